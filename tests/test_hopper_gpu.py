"""The Gluon kernels on a GPU: native's bits, and plain Triton's."""

import random

import pytest
import torch
from torch import Tensor

from ssmspec import layout, policies
from ssmspec.geometry import Arch, DType, Geometry, Window
from ssmspec.kernels import reference
from ssmspec.kernels.base import History, Kernels, Layer
from ssmspec.pool import StatePool, storage
from ssmspec.step import Step

pytest.importorskip("triton.experimental.gluon")

from hopper_draws import Draw, clone, gdn, near, of_arch

from ssmspec.kernels import hopper, selftest
from ssmspec.kernels.hopper_shape import Order

pytestmark = pytest.mark.gpu


def _policy(name: str, g: Geometry, w: Window, start: Tensor, kernels: Kernels) -> policies.Policy:
    pool = StatePool.allocate(layout.of(name, g, w), 1, len(start), "cuda")
    for field in pool.tensors.values():
        if field.is_floating_point():
            field.fill_(float("nan"))
    params = [Draw(9, "cuda").params(g)]
    policy = policies.POLICIES[name](g, w, pool, kernels, params)
    policy.checkpoint(0).copy_(start)
    return policy


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("store", [DType.FP32, DType.BF16, DType.FP16])
@pytest.mark.parametrize(
    ("arch", "t", "ring", "h", "hv"),
    [
        (Arch.GDN, 1, 5, 2, 4),
        (Arch.GDN, 4, 11, 4, 8),
        (Arch.GDN, 8, 16, 3, 9),
        (Arch.GDN, 16, 32, 2, 4),
        (Arch.KDA, 1, 5, 2, 4),
        (Arch.KDA, 4, 11, 4, 4),
        (Arch.KDA, 16, 32, 3, 3),
        (Arch.MAMBA2, 1, 5, 1, 4),
        (Arch.MAMBA2, 4, 11, 2, 6),
        (Arch.MAMBA2, 16, 32, 1, 2),
    ],
)
def test_policies_have_natives_bits(
    arch: Arch, t: int, ring: int, h: int, hv: int, store: DType, drops: bool
) -> None:
    """64 chained windows with ragged lengths, null rows and rows that change places; dropped windows without native."""
    g, w, chance, draw = (
        of_arch(arch, store, h, hv),
        Window(max_len=t, ring_len=ring),
        random.Random(t),
        Draw(t, "cuda"),
    )
    from ssmspec.kernels import triton_backend

    kernels, batch = triton_backend.make(g, w), 5
    start = draw.normal(batch + 3, hv, g.head_v, g.head_k, dtype=storage(store))
    names = [n for n in layout.POLICY_NAMES if not (drops and n == "native")]
    players = [_policy(n, g, w, start, kernels) for n in names]
    slots = list(range(1, batch + 1))
    for step_no in range(64):
        chance.shuffle(slots)
        lens = [chance.randint(1, t) for _ in slots]
        rows = [0 if chance.random() < 0.1 else s for s in slots]
        accepted = [chance.randint(0 if drops else 1, n) for n in lens]
        x = draw.tokens(g, batch, t)
        outs = []
        for player in players:
            step = Step.empty(batch, t, "cuda")
            step.stage(rows, lens)
            outs.append(player.verify(0, step, x))
            step.accepted.copy_(torch.tensor(accepted))
            player.accept(step.close())
        assert outs[0].isfinite().all()
        assert all(torch.equal(out, outs[0]) for out in outs)
        if step_no % 21 == 0:
            live = torch.tensor(sorted(slots), device="cuda")
            for player in players:
                player.settle(live)
            assert all(torch.equal(p.checkpoint(0)[live], players[0].checkpoint(0)[live]) for p in players)


@pytest.mark.parametrize("policy", ["native", "recover", "checkpointing"])
@pytest.mark.parametrize("store", [DType.FP32, DType.BF16, DType.FP16])
@pytest.mark.parametrize(
    ("arch", "h", "hv", "t"),
    [(Arch.KDA, 32, 32, 4), (Arch.KDA, 2, 4, 7), (Arch.MAMBA2, 2, 32, 4), (Arch.MAMBA2, 1, 3, 8)],
)
def test_kda_and_mamba2_have_the_bits_of_the_plain_kernels(
    arch: Arch, h: int, hv: int, t: int, store: DType, policy: str
) -> None:
    """So prompt chunks, which the plain kernels serve, have the bits of windows."""
    from ssmspec.kernels import triton_backend

    g, w, draw = of_arch(arch, store, h, hv), Window(max_len=t, ring_len=2 * t), Draw(t, "cuda")
    ring, past, snapshots = layout.ring("recover" if policy == "native" else policy, w), None, None
    if policy == "checkpointing":
        count = draw.ints((ring.limit or t) + 1, 6).int()
        ends = draw.ints(1 << ring.capacity, 6) if layout.rounds_at_ends(policy, g, w) else None
        past = History(base=draw.ints(ring.capacity, 6).int(), count=count, limit=ring.limit, ends=ends)
    if policy == "native":
        snapshots = torch.arange(4 * t, device="cuda").view(4, t) + 6
    x, start = draw.tokens(g, 4, t), draw.layer(g, 6 + 4 * t, 0 if policy == "native" else ring.capacity)
    rows, lens = torch.tensor([3, 1, 0, 5], device="cuda"), torch.tensor([t, t - 1, t, 1], device="cuda")
    results = []
    for verify in (triton_backend._Exact(g), hopper.make_verify(g, w, selftest.order_of(g))):
        layer = clone(start)
        out = verify(layer, x, rows, lens, history=past, snapshots=snapshots)
        results.append([out, layer.state, *layer.records.values()])
    for plain, ours in zip(*results, strict=True):
        assert torch.equal(plain, ours)


@pytest.mark.parametrize("store", [DType.FP32, DType.BF16, DType.FP16])
@pytest.mark.parametrize(("h", "hv", "t"), [(16, 32, 4), (2, 8, 2), (4, 4, 8)])
def test_native_has_the_bits_of_plain_triton(store: DType, h: int, hv: int, t: int) -> None:
    finding = selftest.find_order(gdn(store, h, hv), Window(max_len=t))
    assert finding.order is not None, finding.sentence


def test_states_in_pages_and_far_away_are_served() -> None:
    """Slots 2^31 elements into a bf16 tensor whose pages have room for more than the state."""
    g, w, draw = gdn(DType.BF16), Window(max_len=2), Draw(0, "cuda")
    page = 2 * 128 * 128 + 64
    far = (2**31) // page + 5
    pages = torch.zeros(far + 2, page, dtype=torch.bfloat16, device="cuda")
    state = pages[:, : 2 * 128 * 128].view(far + 2, 2, 128, 128)
    near_by = draw.normal(3, 2, 128, 128, dtype=torch.bfloat16)
    state[far] = near_by[1]
    x, params = draw.tokens(g, 1, 2), draw.params(g)
    verify = hopper.make_verify(g, w, selftest.order_of(g))
    outs = []
    for held, row, to in ((near_by, 1, 2), (state, far, far + 1)):
        layer = Layer(params=params, state=held, read=None, records={})
        snapshots = torch.tensor([[0, to]], device="cuda")
        rows, lens = torch.tensor([row], device="cuda"), torch.tensor([2], device="cuda")
        outs.append((verify(layer, x, rows, lens, snapshots=snapshots), held[to].clone()))
    assert torch.equal(outs[0][0], outs[1][0])
    assert torch.equal(outs[0][1], outs[1][1])
    assert not pages[:, 2 * 128 * 128 :].any()


def test_a_captured_window_serves_every_cursor_state() -> None:
    g, w, draw = gdn(DType.FP32, 2, 4), Window(max_len=4, ring_len=8), Draw(0, "cuda")
    ring = layout.ring("checkpointing", w)
    start, x = draw.layer(g, 5, ring.capacity), draw.tokens(g, 3, 4)
    base, count = (torch.zeros(5, dtype=torch.int32, device="cuda") for _ in range(2))
    rows, lens = (torch.zeros(3, dtype=torch.int64, device="cuda") for _ in range(2))
    past = History(base=base, count=count, limit=ring.limit)
    verify = hopper.make_verify(g, w, selftest.order_of(g))
    captured = clone(start)
    verify(captured, x, rows, lens, history=past)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = verify(captured, x, rows, lens, history=past)
    eager = clone(start)
    for _ in range(12):
        base.copy_(draw.ints(ring.capacity, 5))
        count.copy_(draw.ints(ring.limit + 1, 5))
        rows.copy_(torch.randperm(5, generator=draw.noise)[:3])
        lens.copy_(draw.ints(5, 3))
        graph.replay()
        assert torch.equal(out, verify(eager, x, rows, lens, history=past))
        assert torch.equal(captured.state, eager.state)
        assert all(torch.equal(field, eager.records[n]) for n, field in captured.records.items())


def test_the_backend_takes_these_kernels_for_windows_and_its_plain_ones_for_longer_chunks() -> None:
    from ssmspec.kernels import triton_backend

    g, w, draw = gdn(), Window(max_len=4), Draw(0, "cuda")
    verify = triton_backend.make(g, w).verify
    assert isinstance(verify, triton_backend._Windows)
    x, layer = draw.tokens(g, 1, 17), draw.layer(g, 2, 0)
    one, full = torch.tensor([1], device="cuda"), torch.tensor([17], device="cuda")
    snapshots = torch.zeros(1, 17, dtype=torch.int64, device="cuda")
    got = verify(layer, x, one, full, snapshots=snapshots)
    near(got, reference.make(g, w).verify(layer, x, one, full, snapshots=snapshots).cuda())
    assert not isinstance(triton_backend.make(gdn(), Window(max_len=17)).verify, triton_backend._Windows)


def test_an_empty_batch_is_an_empty_output() -> None:
    g, w, draw = gdn(), Window(max_len=4), Draw(0, "cuda")
    none = torch.zeros(0, dtype=torch.int64, device="cuda")
    verify = hopper.make_verify(g, w, Order.CHAIN)
    assert verify(draw.layer(g, 2, 8), draw.tokens(g, 0, 4), none, none).shape == (0, 4, 2, 128)
