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
    v: Tensor | None = None  # [HV, V]; Mamba2: x
    beta: Tensor | None = None  # [HV]
    q: Tensor | None = None  # [HV, K]
    skip: Tensor | None = None  # [HV, V], Mamba2's D * x
    key: Tensor | None = None  # [H, K], as it came in; this and the next are there to be recorded
    rnorm: Tensor | None = None  # [H], 1 / its norm
    dt: Tensor | None = None  # [HV], Mamba2's


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), the identity above 20."""
    return torch.where(x <= 20, torch.log1p(torch.exp(x.clamp(max=20))), x)


def sigmoid(x: Tensor) -> Tensor:
    """Of each token [n, ...] by itself: torch's bits depend on where in a tensor an element lies."""
    return torch.stack([torch.sigmoid(token) for token in x])


def decay_of(g: Geometry, p: LayerParams, a: Tensor) -> Tensor:
    """a [n, HV] or, for KDA, [n, HV, K], fp -> the factor that is multiplied, [n, HV, 1 | K].

    GDN: exp(-exp(A_log) softplus(a + dt_bias)); KDA the same per channel, or with a lower bound
    exp(bound * sigmoid(exp(A_log) (a + dt_bias))); Mamba2 takes dt: exp(-exp(A_log) dt).
    """
    rate = p.A_log.to(a.dtype).exp()
    bias = p.dt_bias.to(a.dtype)
    if g.arch is Arch.MAMBA2:
        return torch.exp(-rate * a)[..., None]
    if g.arch is Arch.GDN:
        return torch.exp(-rate * softplus(a + bias))[..., None]
    if g.gate_lower_bound is not None:
        return torch.exp(g.gate_lower_bound * sigmoid(rate[:, None] * (a + bias)))
    return torch.exp(-rate[:, None] * softplus(a + bias))


def rnorm_of(x: Tensor) -> Tensor:
    """[..., H, K] -> 1 / norm, [..., H]."""
    return torch.rsqrt((x * x).sum(-1) + EPS)


def heads(g: Geometry, x: Tensor) -> Tensor:
    """Key heads [..., H, K] -> one per value head, [..., HV, K]."""
    return x if g.group == 1 else x.repeat_interleave(g.group, dim=-2)


def tokens(
    g: Geometry, p: LayerParams, x: Tokens, b: int, n: int, dtype: torch.dtype = torch.float32
) -> list[Token]:
    """The first ``n`` tokens of a window of row ``b``, from the raw layer inputs. In float64 they are the oracle's."""
    q, k, v, a = (y[b, :n].to(dtype).contiguous() for y in (x.q, x.k, x.v, x.a))
    found = {"key": k, "v": v}
    if g.arch is Arch.MAMBA2:
        dt = softplus(a + p.dt_bias.to(dtype)) if g.dt_softplus else a + p.dt_bias.to(dtype)
        found |= {"dt": dt, "c": dt[..., None] * v, "decay": decay_of(g, p, dt)}
        if p.D is not None:
            found["skip"] = p.D.to(dtype)[:, None] * v
    else:
        assert x.b is not None
        rnorm = rnorm_of(k)
        found |= {"rnorm": rnorm, "beta": sigmoid(x.b[b, :n].to(dtype)), "decay": decay_of(g, p, a)}
        k = k * rnorm[..., None]
        q = q * rnorm_of(q)[..., None] * g.head_k**-0.5
    found |= {"k": heads(g, k), "q": heads(g, q)}
    columns = zip(*(values.unbind() for values in found.values()), strict=True)
    return [Token(**dict(zip(found, column, strict=True))) for column in columns]


def advance(s: Tensor, t: Token) -> tuple[Tensor, Tensor]:
    """s [HV, V, K] -> the state after the token, and the c that was applied."""
    s, k, c = s * t.decay.unsqueeze(1), t.k.unsqueeze(1), t.c
    if c is None:
        assert t.v is not None
        assert t.beta is not None
        c = t.beta.unsqueeze(1) * (t.v - (s * k).sum(-1))
    return s + c.unsqueeze(2) * k, c


def output(s: Tensor, t: Token) -> Tensor:
    """[HV, V], from the state after the token."""
    assert t.q is not None
    o = (s * t.q.unsqueeze(1)).sum(-1)
    return o if t.skip is None else o + t.skip


def record(g: Geometry, layer: Layer, t: Token, c: Tensor, slot: int, position: int) -> None:
    """Write down what a token did: what was multiplied, or what gives it again by the same operation."""
    decay = t.decay if g.arch is Arch.KDA else t.decay[:, 0]
    values = {"k": t.key, "c": c, "x": t.v, "dt": t.dt, "v": t.v, "beta": t.beta}
    values |= {"rnorm": t.rnorm, "decay": decay}
    for name, field in layer.records.items():
        value = values[name]
        assert value is not None, name
        field[slot, :, position] = value


def recorded(g: Geometry, layer: Layer, slot: int, position: int) -> Token:
    """The token that ``record`` wrote, ready to be applied again."""
    r = {name: field[slot, :, position].float() for name, field in layer.records.items()}
    k = r["k"] * r["rnorm"][:, None] if "rnorm" in r else r["k"]
    decay = r["decay"] if g.arch is Arch.KDA else r["decay"][:, None]
    c = r["dt"][:, None] * r["x"] if "x" in r else r.get("c")
    return Token(k=heads(g, k), decay=decay, c=c, v=r.get("v"), beta=r.get("beta"))
