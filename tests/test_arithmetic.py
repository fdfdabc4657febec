"""The recurrences, against their formulas written out again in float64, one scalar head at a time."""

import math

import pytest
import torch
from shapes import GATES, geometry

from ssmspec.geometry import Arch, Geometry
from ssmspec.kernels.base import LayerParams, Tokens
from ssmspec.kernels.recurrence import advance, output, tokens


def softplus(x: float) -> float:
    return x if x > 20 else math.log1p(math.exp(x))


def step(g: Geometry, p: LayerParams, s: torch.Tensor, h: int, x: dict[str, torch.Tensor]) -> torch.Tensor:
    """One token on one head's S [V, K], by the formulas of the papers; returns its output [V]."""
    key = h // (g.num_v_heads // g.num_k_heads)
    q, k, v, a = x["q"][key], x["k"][key], x["v"][h], x["a"][h]
    rate, bias = math.exp(p.A_log[h]), p.dt_bias[h]
    if g.arch is Arch.MAMBA2:
        dt = softplus(float(a + bias)) if g.dt_softplus else float(a + bias)
        s *= math.exp(-rate * dt)
        s += torch.outer(dt * v, k)
        return s @ q + float(p.D[h]) * v
    k = k / math.sqrt(float(k @ k) + 1e-6)
    q = q / math.sqrt(float(q @ q) + 1e-6) / math.sqrt(g.head_k)
    gate = a + bias
    if g.arch is Arch.GDN:
        s *= math.exp(-rate * softplus(float(gate)))
    elif g.gate_lower_bound is None:
        s *= torch.tensor([math.exp(-rate * softplus(float(c))) for c in gate], dtype=torch.float64)
    else:
        s *= torch.exp(g.gate_lower_bound * torch.sigmoid(rate * gate))
    beta = 1 / (1 + math.exp(-float(x["b"][h])))
    s += torch.outer(beta * (v - s @ k), k)
    return s @ q


def inputs(g: Geometry, t: int) -> tuple[LayerParams, Tokens]:
    r = torch.randn
    h, hv, k, v = g.num_k_heads, g.num_v_heads, g.head_k, g.head_v
    per_channel = (hv, k) if g.arch is Arch.KDA else (hv,)
    params = LayerParams(index=0, A_log=r(hv), dt_bias=r(per_channel), D=r(hv))
    a = r(1, t, *per_channel) * 3
    if not g.dt_softplus:
        a = a.abs() + 5  # dt has to be positive
    x = Tokens(
        q=r(1, t, h, k),
        k=r(1, t, h, k),
        v=r(1, t, hv, v),
        a=a,
        b=None if g.arch is Arch.MAMBA2 else r(1, t, hv),
    )
    return params, x


@pytest.mark.parametrize("gate", GATES)
def test_a_token_does_what_the_formula_says(gate: str) -> None:
    g = geometry(gate)
    params, x = inputs(g, 6)
    s = torch.randn(g.num_v_heads, g.head_v, g.head_k, dtype=torch.float64)
    want = s.clone()
    single = s.float()
    for t in range(6):
        raw = {n: y[0, t].double() for n, y in vars(x).items() if isinstance(y, torch.Tensor)}
        outs = torch.stack([step(g, params, want[h], h, raw) for h in range(g.num_v_heads)])
        tok = tokens(g, params, x, 0, 6, torch.float64)[t]
        s, _ = advance(s, tok)
        torch.testing.assert_close(s, want, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(output(s, tok), outs, rtol=1e-12, atol=1e-12)
        tok32 = tokens(g, params, x, 0, 6)[t]
        single, _ = advance(single, tok32)
        torch.testing.assert_close(output(single, tok32).double(), outs, rtol=1e-5, atol=1e-5)


def test_softplus_is_the_identity_above_its_threshold() -> None:
    g = geometry("gdn", num_k_heads=1, num_v_heads=1)
    zero = torch.zeros(1)
    params = LayerParams(index=0, A_log=zero, dt_bias=zero)
    for a, want in ((20.5, math.exp(-20.5)), (0.0, 0.5), (-1e4, 1.0), (1e4, 0.0)):
        _, x = inputs(g, 1)
        x = Tokens(q=x.q, k=x.k, v=x.v, a=torch.full((1, 1, 1), a), b=x.b)
        assert tokens(g, params, x, 0, 1, torch.float64)[0].decay.item() == pytest.approx(want, rel=1e-12)
