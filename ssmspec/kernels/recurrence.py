"""The arithmetic of one token, once per architecture, in plain torch. Gates, norms and scale are computed here only."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ssmspec.geometry import Arch, Geometry
from ssmspec.kernels.base import Layer, LayerParams, Tokens

EPS = 1e-6  # of the l2 norm


@dataclass(frozen=True, kw_only=True)
class Token:
    """What one token does: S <- decay * S + c k^T, where c is given, or is beta * (v - decay * S k)."""

    k: Tensor  # [HV, K]
    decay: Tensor  # [HV, 1 | K]
    c: Tensor | None = None  # [HV, V]
    v: Tensor | None = None  # [HV, V]
    beta: Tensor | None = None  # [HV]
    q: Tensor | None = None  # [HV, K]
    skip: Tensor | None = None  # [HV, V], Mamba2's D * x


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), the identity above 20."""
    return torch.where(x <= 20, torch.log1p(torch.exp(x.clamp(max=20))), x)


def decay_of(g: Geometry, p: LayerParams, a: Tensor) -> Tensor:
    """a [HV] or, for KDA, [HV, K], fp -> the factor that is multiplied, [HV, 1 | K].

    GDN: exp(-exp(A_log) softplus(a + dt_bias)); KDA the same per channel, or with a lower bound
    exp(bound * sigmoid(exp(A_log) (a + dt_bias))); Mamba2 takes dt: exp(-exp(A_log) dt).
    """
    rate = p.A_log.to(a.dtype).exp()
    bias = p.dt_bias.to(a.dtype)
    if g.arch is Arch.MAMBA2:
        return torch.exp(-rate * a)[:, None]
    if g.arch is Arch.GDN:
        return torch.exp(-rate * softplus(a + bias))[:, None]
    if g.gate_lower_bound is not None:
        return torch.exp(g.gate_lower_bound * torch.sigmoid(rate[:, None] * (a + bias)))
    return torch.exp(-rate[:, None] * softplus(a + bias))


def rnorm_of(x: Tensor) -> Tensor:
    """[H, K] -> 1 / norm, [H]."""
    return torch.rsqrt((x * x).sum(-1) + EPS)


def heads(g: Geometry, x: Tensor) -> Tensor:
    """Key heads [H, K] -> one per value head, [HV, K]."""
    return x.repeat_interleave(g.group, dim=0)


def token(
    g: Geometry, p: LayerParams, x: Tokens, b: int, t: int, dtype: torch.dtype = torch.float32
) -> Token:
    """Token (b, t) of a window, from the raw layer inputs. In float64 it is the oracle's."""
    q, k, v, a = (y[b, t].to(dtype) for y in (x.q, x.k, x.v, x.a))
    if g.arch is Arch.MAMBA2:
        dt = softplus(a + p.dt_bias.to(dtype)) if g.dt_softplus else a + p.dt_bias.to(dtype)
        skip = None if p.D is None else p.D.to(dtype)[:, None] * v
        c = dt[:, None] * v
        return Token(k=heads(g, k), q=heads(g, q), decay=decay_of(g, p, dt), c=c, skip=skip)
    assert x.b is not None
    k = k * rnorm_of(k)[:, None]
    q = q * rnorm_of(q)[:, None] * g.head_k**-0.5
    beta = torch.sigmoid(x.b[b, t].to(dtype))
    return Token(k=heads(g, k), q=heads(g, q), decay=decay_of(g, p, a), v=v, beta=beta)


def advance(s: Tensor, t: Token) -> tuple[Tensor, Tensor]:
    """s [HV, V, K] -> the state after the token, and the c that was applied."""
    s = s * t.decay[:, None, :]
    c = t.c
    if c is None:
        assert t.v is not None
        assert t.beta is not None
        c = t.beta[:, None] * (t.v - (s * t.k[:, None, :]).sum(-1))
    return s + c[:, :, None] * t.k[:, None, :], c


def output(s: Tensor, t: Token) -> Tensor:
    """[HV, V], from the state after the token."""
    assert t.q is not None
    o = (s * t.q[:, None, :]).sum(-1)
    return o if t.skip is None else o + t.skip


def record(g: Geometry, layer: Layer, x: Tokens, b: int, t: int, c: Tensor, slot: int, position: int) -> None:
    """Write down what token (b, t) did: what was multiplied, or what gives it again by the same operation."""
    values = {"k": x.k[b, t], "c": c, "x": x.v[b, t], "v": x.v[b, t]}
    a = x.a[b, t].float()
    if g.arch is Arch.MAMBA2:
        values["dt"] = softplus(a + layer.params.dt_bias) if g.dt_softplus else a + layer.params.dt_bias
        values["decay"] = decay_of(g, layer.params, values["dt"])[:, 0]
    else:
        assert x.b is not None
        values["rnorm"] = rnorm_of(x.k[b, t].float())
        values["beta"] = torch.sigmoid(x.b[b, t].float())
        decay = decay_of(g, layer.params, a)
        values["decay"] = decay if g.arch is Arch.KDA else decay[:, 0]
    for name, field in layer.records.items():
        field[slot, :, position] = values[name].to(field.dtype)


def recorded(g: Geometry, layer: Layer, slot: int, position: int) -> Token:
    """The token that ``record`` wrote, ready to be applied again."""
    r = {name: field[slot, :, position].float() for name, field in layer.records.items()}
    k = r["k"] * r["rnorm"][:, None] if "rnorm" in r else r["k"]
    decay = r["decay"] if g.arch is Arch.KDA else r["decay"][:, None]
    c = r["dt"][:, None] * r["x"] if "x" in r else r.get("c")
    return Token(k=heads(g, k), decay=decay, c=c, v=r.get("v"), beta=r.get("beta"))
