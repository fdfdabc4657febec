"""The Gluon kernels on the CPU, in the reference's values; what they serve, and how their order of sums is found."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ssmspec import layout
from ssmspec.geometry import Arch, DType, Geometry, Mode, Window
from ssmspec.kernels import reference
from ssmspec.kernels.base import History, Layer, Tokens, Verify
from ssmspec.pool import storage

pytest.importorskip("triton.experimental.gluon")

import hopper_draws
from hopper_draws import Draw, clone, each, gdn, near, of_arch

from ssmspec.kernels import hopper, selftest
from ssmspec.kernels.hopper_shape import Order

on_cpu = hopper_draws.on_cpu


@pytest.mark.parametrize("order", list(Order))
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("policy", "store", "t", "h", "hv"),
    [
        ("recover", DType.FP32, 3, 1, 2),
        ("every-step", DType.BF16, 4, 1, 2),
        ("checkpointing", DType.FP32, 4, 1, 2),
        ("checkpointing", DType.BF16, 5, 2, 2),
        ("checkpointing", DType.FP16, 2, 1, 3),
    ],
)
def test_a_window_has_the_values_of_the_reference(
    on_cpu: None, policy: str, store: DType, t: int, h: int, hv: int, seed: int, order: Order
) -> None:
    """Any ring position and count, wraps and flushes included; a null row, a short and an empty window."""
    _has_the_references_values(gdn(store, h, hv), policy, t, Draw(seed), order)


@pytest.mark.parametrize(("policy", "store"), [("every-step", DType.BF16), ("checkpointing", DType.FP32)])
def test_keys_that_serve_all_tiles_of_a_head_give_the_same(
    on_cpu: None, policy: str, store: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long windows of many heads take them: a program has the tiles of a head in a row."""
    monkeypatch.setattr(hopper, "LONG", 1)
    monkeypatch.setattr(hopper, "MANY", 1)
    _has_the_references_values(gdn(store, 1, 2), policy, 4, Draw(3), Order.CHAIN)


@pytest.mark.interpreter
@pytest.mark.parametrize("arch", [Arch.KDA, Arch.MAMBA2])
@pytest.mark.parametrize(
    ("policy", "store", "t", "h", "hv"),
    [
        ("recover", DType.FP32, 3, 1, 2),
        ("every-step", DType.FP16, 4, 1, 2),
        ("checkpointing", DType.FP32, 4, 2, 2),
        ("checkpointing", DType.FP16, 5, 1, 2),
        ("checkpointing", DType.FP32, 1, 2, 4),
    ],
)
def test_kda_and_mamba2_have_the_values_of_the_reference(
    on_cpu: None, arch: Arch, policy: str, store: DType, t: int, h: int, hv: int
) -> None:
    """What their window needs of its tokens comes from the plain kernels' own launch, interpreted."""
    _has_the_references_values(of_arch(arch, store, h, hv), policy, t, Draw(t), Order.CHAIN)


def _has_the_references_values(g: Geometry, policy: str, t: int, draw: Draw, order: Order) -> None:
    w = Window(max_len=t, ring_len=11)
    ring = layout.ring(policy, w)
    past = None
    if policy != "recover":
        count = draw.ints((ring.limit or t) + 1, 6).int()
        ends = draw.ints(1 << ring.capacity, 6) if layout.rounds_at_ends(policy, g, w) else None
        past = History(base=draw.ints(ring.capacity, 6).int(), count=count, limit=ring.limit, ends=ends)
    x, start = draw.tokens(g, 4, t), draw.layer(g, 6, ring.capacity)
    rows, lens = torch.tensor([3, 1, 0, 5]), torch.tensor([t, t - 1, t, 0])
    verifies = reference.make(g, w).verify, hopper.make_verify(g, w, order)
    (wanted, theirs), (got, ours) = each(verifies, start, x, rows, lens, past)
    near(got, wanted)
    near(ours.state, theirs.state)
    for name in start.records:
        near(ours.records[name], theirs.records[name], of=storage(g.state_dtype))
    assert not got[2:].any()
    for slot in (0, 2, 4, 5):
        assert torch.equal(ours.state[slot], start.state[slot])
        assert all(torch.equal(field[slot], start.records[n][slot]) for n, field in ours.records.items())


def test_states_in_pages_are_found_and_kept_there(on_cpu: None) -> None:
    g, w, draw = gdn(DType.BF16), Window(max_len=3, ring_len=11), Draw(3)
    ring = layout.ring("checkpointing", w)
    count = torch.tensor([0, 2, ring.limit, 1], dtype=torch.int32)  # slot 2 flushes
    past = History(base=torch.zeros_like(count), count=count, limit=ring.limit, ends=torch.zeros(4).long())
    x, plain = draw.tokens(g, 3, 3), draw.layer(g, 4, ring.capacity)
    pages = torch.full((9, *plain.state.shape[1:]), float("nan"), dtype=plain.state.dtype)
    at = torch.tensor([0, 7, 2, 5])
    pages[at] = plain.state
    paged = replace(clone(plain), state=pages, rows=at)
    verify, slots, lens = hopper.make_verify(g, w, Order.CHAIN), torch.tensor([1, 2, 3]), torch.full((3,), 3)
    assert torch.equal(*(verify(layer, x, slots, lens, history=past) for layer in (plain, paged)))
    assert torch.equal(pages[at], plain.state)
    assert all(torch.equal(field, plain.records[n]) for n, field in paged.records.items())
    assert pages[[1, 3, 4, 6, 8]].isnan().all()


def test_snapshots_hold_every_tokens_state(on_cpu: None) -> None:
    g, w, draw = gdn(), Window(max_len=3), Draw(0)
    x, start = draw.tokens(g, 2, 3), draw.layer(g, 8, 0)
    snapshots = torch.tensor([[2, 3, 4], [0, 5, 0]])  # the start may be overwritten, null is not stored
    results = []
    for verify in (reference.make(g, w).verify, hopper.make_verify(g, w, Order.CHAIN)):
        layer = clone(start)
        rows, lens = torch.tensor([2, 1]), torch.tensor([3, 2])
        results.append((verify(layer, x, rows, lens, snapshots=snapshots), layer.state))
    near(results[1][0], results[0][0])
    near(results[1][1], results[0][1])
    assert all(torch.equal(results[1][1][i], start.state[i]) for i in (0, 1, 6, 7))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"arch": Arch.MAMBA2}, "arch=mamba2: head_k=128, head_v=128"),
        ({"head_k": 64}, "head_k=64"),
        ({"state_dtype": DType.NVFP4}, "state_dtype=nvfp4"),
        ({"act_dtype": DType.FP32}, "act_dtype=float32"),
        ({"state_dtype": DType.BF16, "stochastic": True}, "stochastic=True"),
    ],
)
def test_a_geometry_that_is_not_served_is_refused_by_name(changes: dict[str, object], word: str) -> None:
    values = {
        "arch": Arch.GDN,
        "num_layers": 1,
        "num_k_heads": 1,
        "num_v_heads": 2,
        "head_k": 128,
        "head_v": 128,
    }
    g = Geometry(**{**values, **changes})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=word):
        hopper.make_verify(g, Window(max_len=4), Order.CHAIN)


@pytest.mark.parametrize("w", [Window(max_len=17), Window(max_len=4, mode=Mode.FAST)])
def test_a_window_that_is_not_served_has_a_reason(w: Window) -> None:
    assert hopper.unsupported(gdn(), w) is not None
    assert hopper.unsupported(gdn(), Window(max_len=16)) is None


def _stands_for(*values: float) -> Verify:
    def verify(layer: Layer, x: Tokens, rows: Tensor, lens: Tensor, **_: object) -> Tensor:
        return torch.tensor(values)

    return verify  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("plain", "peer", "found"),
    [(1.0, 1.0, Order.CHAIN), (2.0, 2.0, Order.TREE), (1.0, 2.0, None), (3.0, 3.0, None)],
)
def test_the_self_test_picks_the_order_of_all_peers_or_none(
    monkeypatch: pytest.MonkeyPatch, plain: float, peer: float, found: Order | None
) -> None:
    bits = {Order.CHAIN: 1.0, Order.TREE: 2.0}
    monkeypatch.setattr(selftest, "OURS", selftest.Peer("plain Triton", _stands_for(plain)))
    monkeypatch.setattr(hopper, "make_verify", lambda g, w, order: _stands_for(bits[order]))
    selftest.find_order.cache_clear()
    ask = (gdn(), Window(max_len=2), "cpu", (selftest.Peer("a peer", _stands_for(peer)),))
    finding = selftest.find_order(*ask)
    assert finding.order is found
    if found is None:
        with pytest.raises(selftest.OrderError, match=r"no known order .* CHAIN differs"):
            selftest.order_of(*ask)
    else:
        assert selftest.order_of(*ask) is found
        assert "plain Triton and of a peer" in finding.sentence
    selftest.find_order.cache_clear()
