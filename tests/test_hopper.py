"""The Gluon kernels: the reference's values on the CPU, plain Triton's and native's bits on a GPU."""

import random
from dataclasses import replace

import gluon_on_cpu
import pytest
import torch
from torch import Tensor

from ssmspec import layout, policies
from ssmspec.geometry import Arch, DType, Geometry, Mode, Window
from ssmspec.kernels import reference
from ssmspec.kernels.base import History, Kernels, Layer, LayerParams, Tokens, Verify
from ssmspec.pool import StatePool, storage
from ssmspec.step import Step

pytest.importorskip("triton.experimental.gluon")

from ssmspec.kernels import (
    hopper,
    hopper_call,
    hopper_fetch,
    hopper_prepare,
    hopper_tile,
    hopper_verify,
    selftest,
)
from ssmspec.kernels.hopper_tile import Order

Make = pytest.MonkeyPatch


def gdn(store: DType = DType.FP32, h: int = 1, hv: int = 2) -> Geometry:
    return of_arch(Arch.GDN, store, h, hv)


def of_arch(arch: Arch, store: DType = DType.FP32, h: int = 1, hv: int = 2) -> Geometry:
    k, v = hopper.HEAD[arch]
    return Geometry(
        arch=arch, num_layers=1, num_k_heads=h, num_v_heads=hv, head_k=k, head_v=v, state_dtype=store
    )


class Draw:
    """Random tensors and numbers from one seed."""

    def __init__(self, seed: int, device: str = "cpu") -> None:
        self.noise, self.device = torch.Generator().manual_seed(seed), device

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=self.noise).to(dtype).to(self.device)

    def ints(self, top: int, *shape: int) -> Tensor:
        return torch.randint(0, top, shape, generator=self.noise).to(self.device)

    def params(self, g: Geometry) -> LayerParams:
        bias = (g.num_v_heads, g.head_k) if g.arch is Arch.KDA else (g.num_v_heads,)
        skip = self.normal(g.num_v_heads) if g.arch is Arch.MAMBA2 else None
        return LayerParams(index=0, A_log=self.normal(g.num_v_heads) / 2, dt_bias=self.normal(*bias), D=skip)

    def tokens(self, g: Geometry, batch: int, t: int) -> Tokens:
        h, hv, act = g.num_k_heads, g.num_v_heads, torch.bfloat16
        packed = self.normal(batch, t, 2 * h * g.head_k + hv * g.head_v, dtype=act)
        gate = (hv, g.head_k) if g.arch is Arch.KDA else (hv,)
        a = self.normal(batch, t, *gate, dtype=act)
        return Tokens.unpack(
            g, packed, a, None if g.arch is Arch.MAMBA2 else self.normal(batch, t, hv, dtype=act)
        )

    def layer(self, g: Geometry, slots: int, ring: int) -> Layer:
        hv = g.num_v_heads
        k = self.normal(slots, g.num_k_heads, ring, g.head_k, dtype=torch.bfloat16)
        decay = (slots, hv, ring, g.head_k) if g.arch is Arch.KDA else (slots, hv, ring)
        records = {"k": k, "decay": torch.rand(decay, generator=self.noise).to(self.device)}
        if g.arch is Arch.MAMBA2:
            records["dt"] = self.normal(slots, hv, ring)
            records["x"] = self.normal(slots, hv, ring, g.head_v, dtype=torch.bfloat16)
        else:
            records["rnorm"] = torch.rsqrt(k.float().square().sum(-1) + 1e-6)
            records["c"] = self.normal(slots, hv, ring, g.head_v)
        state = self.normal(slots, hv, g.head_v, g.head_k, dtype=storage(g.state_dtype))
        return Layer(params=self.params(g), state=state, read=None, records=records if ring else {})


def clone(layer: Layer) -> Layer:
    records = {name: field.clone() for name, field in layer.records.items()}
    return Layer(params=layer.params, state=layer.state.clone(), read=None, records=records)


@pytest.fixture
def on_cpu(monkeypatch: Make) -> None:
    modules = [hopper_tile, hopper_fetch, hopper_verify, hopper_prepare]
    for name in ("verify_window", "prepare_window"):
        monkeypatch.setattr(hopper_call, name, gluon_on_cpu.Kernel(getattr(hopper_call, name), modules))
    monkeypatch.setattr(hopper_call, "_resident", lambda *_: 3)  # programs: each meets several tiles


def near(got: Tensor, wanted: Tensor, of: torch.dtype | None = None) -> None:
    """Two roundings of the dtype, or of the dtype ``of`` that was rounded to on the way; sums of 128 fp32 terms in
    another order differ by 2^-20."""
    eps = 2 * max(torch.finfo(of or got.dtype).eps, 2**-20)
    torch.testing.assert_close(got.float(), wanted.float(), rtol=eps, atol=eps)


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
    results = []
    for verify in (reference.make(g, w).verify, hopper.make_verify(g, w, order)):
        layer = clone(start)
        results.append((verify(layer, x, rows, lens, history=past), layer))
    (wanted, theirs), (got, ours) = results
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
    monkeypatch: Make, plain: float, peer: float, found: Order | None
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


def _policy(name: str, g: Geometry, w: Window, start: Tensor, kernels: Kernels) -> policies.Policy:
    pool = StatePool.allocate(layout.of(name, g, w), 1, len(start), "cuda")
    for field in pool.tensors.values():
        if field.is_floating_point():
            field.fill_(float("nan"))
    params = [Draw(9, "cuda").params(g)]
    policy = policies.POLICIES[name](g, w, pool, kernels, params)
    policy.checkpoint(0).copy_(start)
    return policy


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
@pytest.mark.parametrize("store", [DType.FP32, DType.BF16, DType.FP16])
@pytest.mark.parametrize(("h", "hv", "t"), [(16, 32, 4), (2, 8, 2), (4, 4, 8)])
def test_native_has_the_bits_of_plain_triton(store: DType, h: int, hv: int, t: int) -> None:
    finding = selftest.find_order(gdn(store, h, hv), Window(max_len=t))
    assert finding.order is not None, finding.sentence


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
def test_an_empty_batch_is_an_empty_output() -> None:
    g, w, draw = gdn(), Window(max_len=4), Draw(0, "cuda")
    none = torch.zeros(0, dtype=torch.int64, device="cuda")
    verify = hopper.make_verify(g, w, Order.CHAIN)
    assert verify(draw.layer(g, 2, 8), draw.tokens(g, 0, 4), none, none).shape == (0, 4, 2, 128)
