"""At the edges of the number range every policy gives native's bits, and fast mode stays within its bound."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from numeric import Inputs, Numeric, near, params, tokens
from shapes import geometry

from ssmspec import layout
from ssmspec.geometry import Arch, DType, Geometry, Mode, Window
from ssmspec.measure.difference import Tally

W = Window(max_len=4, ring_len=8)
FAST = replace(W, mode=Mode.FAST)
RECORDS = ("recover", "every-step", "checkpointing")
COUNTS = (3, 4, 1, 2, 4, 4)

Edge = Callable[[Geometry, Inputs], Inputs]


def gate(value: float) -> Edge:
    return lambda g, x: replace(x, a=torch.full_like(x.a, value))


def beta(value: float) -> Edge:
    return lambda g, x: replace(x, b=torch.full_like(x.b, value))


def keys(make: Callable[[torch.Tensor], torch.Tensor]) -> Edge:
    """Change the keys, where the packed inputs have them."""

    def edge(g: Geometry, x: Inputs) -> Inputs:
        packed, n = x.x.clone(), g.num_k_heads * g.head_k
        at = g.num_v_heads * g.head_v if g.arch is Arch.MAMBA2 else n
        packed[..., at : at + n] = make(packed[..., at : at + n])
        return replace(x, x=packed)

    return edge


def scaled(factor: float) -> Edge:
    return lambda g, x: replace(x, x=(x.x.float() * factor).to(x.x.dtype))


EDGES = {
    "gate 1e4: decay 0": gate(1e4),
    "gate -1e4: decay 1": gate(-1e4),
    "beta 0": beta(-1e4),
    "beta 1": beta(1e4),
    "zero keys": keys(torch.zeros_like),
    "zero inputs": scaled(0.0),
    "subnormal inputs": scaled(1e-39),
    "large inputs": scaled(1e4),
    "near-collinear keys": keys(lambda k: 1 + 1e-3 * k.float()),
}
shapes = pytest.mark.parametrize("gates", ["gdn", "kda", "kda-bounded", "mamba2"])
edges = pytest.mark.parametrize("edge", EDGES.values(), ids=EDGES)


def run(policy: str, g: Geometry, w: Window, edge: Edge, decay: float) -> list[torch.Tensor]:
    """Outputs of a few windows, and the state behind each, flushes included."""
    rig, seen = Numeric(policy, g, w, params(g, decay)), []
    for i, count in enumerate(COUNTS):
        x = edge(g, tokens(g, seed=i))
        seen += [rig.step(x, count), rig.state()]
    return seen


@shapes
@edges
@pytest.mark.parametrize("store", ["fp32", "bf16", "fp16"])
def test_policies_equal_native_at_the_edges(gates: str, edge: Edge, store: str) -> None:
    g = geometry(gates, store, num_layers=1, act_dtype=DType.FP32)
    native = run("native", g, W, edge, 0.9)
    assert all(t.isfinite().all() for t in native) or store == "fp16"
    for policy in RECORDS:
        for ours, theirs in zip(run(policy, g, W, edge, 0.9), native, strict=True):
            assert torch.equal(ours.nan_to_num(nan=7.0), theirs.nan_to_num(nan=7.0)), policy


@shapes
@edges
def test_fast_mode_stays_within_its_bound_at_the_edges(gates: str, edge: Edge) -> None:
    g = geometry(gates, num_layers=1, act_dtype=DType.FP32)
    native = run("native", g, FAST, edge, 0.9)
    for policy in RECORDS:
        for ours, theirs in zip(run(policy, g, FAST, edge, 0.9), native, strict=True):
            assert near(ours, theirs), policy


@shapes
@pytest.mark.parametrize(
    "decay", [1 - 2**-24, 0.5, 2.0**-140, 2.0**-149], ids=["one ulp below 1", "half", "subnormal", "least"]
)
def test_decays_of_every_size_are_replayed(gates: str, decay: float) -> None:
    g = geometry(gates, num_layers=1, act_dtype=DType.FP32)
    native = run("native", g, W, lambda g, x: x, decay)
    for policy in RECORDS:
        assert all(map(torch.equal, run(policy, g, W, lambda g, x: x, decay), native))


def test_the_edges_are_where_they_are_said_to_be() -> None:
    """Hand-computed: exp(-softplus(1e4)) = 0, exp(-softplus(-1e4)) = 1, sigmoid(-+1e4) = 0 and 1."""
    g = geometry("gdn", num_layers=1, act_dtype=DType.FP32)
    first, second = tokens(g, seed=0), tokens(g, seed=1)

    def after(edge: Edge) -> tuple[torch.Tensor, torch.Tensor]:
        rig = Numeric("native", g, W, params(g, 0.9))
        rig.step(first, 4)
        before = rig.state()
        rig.step(edge(g, second).part(0, 1), 1)
        return before, rig.state()

    before, now = after(lambda g, x: beta(-1e4)(g, gate(-1e4)(g, x)))
    assert torch.equal(now, before), "decay 1 and beta 0 keep the state"
    before, now = after(lambda g, x: beta(-1e4)(g, gate(1e4)(g, x)))
    assert not now.any(), "decay 0 and beta 0 leave nothing"
    before, now = after(keys(torch.zeros_like))
    assert near(now, 0.9 * before) or (now / before).std() < 0.1, "a zero key adds nothing"


@pytest.mark.parametrize("mode", [W, FAST], ids=["exact", "fast"])
@pytest.mark.parametrize("policy", layout.POLICY_NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("gates", ["gdn", "kda", "mamba2"])
def test_a_row_that_is_not_finite_keeps_it_to_itself(
    gates: str, policy: str, mode: Window, bad: float
) -> None:
    """Its own outputs say so, the other rows' bits do not change, and its slot is clean for the next request."""
    g = geometry(gates, num_layers=1, act_dtype=DType.FP32)
    clean, hurt = (Numeric(policy, g, mode, params(g, 0.9), rows=3) for _ in range(2))
    for i, count in enumerate(COUNTS):
        x = tokens(g, seed=i, batch=3)
        y = replace(x, x=x.x.clone(), a=x.a.clone())
        if i == 1:
            y.x[1, 0] = bad
        fine, out = clean.step(x, count), hurt.step(y, count)
        assert torch.equal(out[:, [0, 2]], fine[:, [0, 2]])
        assert not i or not out[:, 1, 0].isfinite().all(), "reported where it happened"
    for slot in (1, 3):
        assert torch.equal(hurt.state(slot), clean.state(slot))
    assert not hurt.state(2).isfinite().all()
    hurt.policy.start(torch.tensor([2]), torch.tensor([1]))
    clean.policy.start(torch.tensor([2]), torch.tensor([1]))
    x = tokens(g, seed=99, batch=3)
    assert torch.equal(hurt.step(x, 4), clean.step(x, 4))


@pytest.mark.parametrize("mode", [W, FAST], ids=["exact", "fast"])
@pytest.mark.parametrize("policy", layout.POLICY_NAMES)
@pytest.mark.parametrize("gates", ["gdn", "kda", "mamba2"])
def test_a_rejected_draft_that_is_not_finite_leaves_no_trace(gates: str, policy: str, mode: Window) -> None:
    """Exact mode shows nothing at all. A matrix product in fast mode has the draft in every output of its window; the
    state is clean."""
    g = geometry(gates, num_layers=1, act_dtype=DType.FP32)
    clean, hurt = (Numeric(policy, g, mode, params(g, 0.9)) for _ in range(2))
    for i in range(6):
        x = tokens(g, seed=i)
        y = replace(x, x=x.x.clone())
        y.x[0, 2:] = math.nan
        fine, out = clean.step(x, 2), hurt.step(y, 2)
        if mode is W or policy == "native":
            assert torch.equal(out[:, :, :2], fine[:, :, :2])
        assert torch.equal(hurt.state(), clean.state())


def test_the_comparator_reports_what_is_not_finite() -> None:
    """Two NaNs are not taken for equal."""
    nan = torch.tensor([1.0, math.nan])
    assert Tally().add(nan, nan).different == 1
    assert Tally().add(nan, nan).max_abs == math.inf
    assert Tally().add(torch.tensor([math.inf]), torch.tensor([1.0])).max_abs == math.inf
