"""Backend ``triton``: native's bits under every policy, the reference's values, nothing written that is not its own.

Shapes are tiny under TRITON_INTERPRET=1 and those of a served model on a GPU; the claims are the same.
"""

import os
import random
from dataclasses import replace

import pytest
import torch
from shapes import geometry
from torch import Tensor

from ssmspec import layout, policies
from ssmspec.geometry import Arch, DType, Geometry, Mode, Window
from ssmspec.kernels.base import LayerParams, Tokens
from ssmspec.pool import StatePool, storage
from ssmspec.step import Step

pytestmark = [pytest.mark.interpreter, pytest.mark.gpu]
ON_GPU = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = "cuda" if ON_GPU else "cpu"
RECORDING = layout.POLICY_NAMES[1:]
SIZE = (
    {"num_k_heads": 4, "num_v_heads": 8, "head_k": 128, "head_v": 128}
    if ON_GPU
    else {"num_k_heads": 1, "num_v_heads": 2}
)
W = Window(max_len=4, ring_len=9) if ON_GPU else Window(max_len=3, ring_len=4)
ROWS, STEPS = (5, 40) if ON_GPU else (2, 4)

Seen = list[tuple[str, Tensor]]


def shape(gate: str = "gdn", store: str = "fp32", **changes: object) -> Geometry:
    return geometry(gate, store, **{"num_layers": 2 if ON_GPU else 1, **SIZE, **changes})


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def params(g: Geometry, layer: int) -> LayerParams:
    gen = torch.Generator().manual_seed(100 + layer)
    bias = (g.num_v_heads, g.head_k) if g.arch is Arch.KDA else (g.num_v_heads,)
    values = [torch.randn(n, generator=gen).to(DEVICE) for n in ((g.num_v_heads,), bias, (g.num_v_heads,))]
    skip = values[2] if g.arch is Arch.MAMBA2 else None
    shift = -1 if g.dt_softplus else 4  # a raw dt has to be positive, or the state grows without bound
    return LayerParams(index=layer, A_log=values[0] / 2, dt_bias=values[1] + shift, D=skip)


def tokens(g: Geometry, batch: int, t: int, gen: torch.Generator) -> Tokens:
    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=gen).bfloat16().to(DEVICE)

    packed = draw(batch, t, 2 * g.num_k_heads * g.head_k + g.num_v_heads * g.head_v)
    gate = (g.head_k,) if g.arch is Arch.KDA else ()
    b = None if g.arch is Arch.MAMBA2 else draw(batch, t, g.num_v_heads)
    return Tokens.unpack(g, packed, draw(batch, t, g.num_v_heads, *gate), b)


def poisoned(pool: StatePool, value: int) -> StatePool:
    for t in pool.tensors.values():
        if t.is_floating_point():
            t.view(torch.uint8).fill_(value)
    return pool


def policy(
    name: str, g: Geometry, w: Window = W, backend: str = "triton", slots: int = 16, poison: int = 0xFF
) -> policies.Policy:
    pool = poisoned(StatePool.allocate(layout.of(name, g, w), g.num_layers, slots, DEVICE), poison)
    return policies.make(name, g, w, pool, [params(g, i) for i in range(g.num_layers)], backend)


def start(p: policies.Policy, rows: list[int], seed: int) -> None:
    """Random states in these slots; nothing pending."""
    gen, g = torch.Generator().manual_seed(seed), p.g
    for layer in range(g.num_layers):
        s = torch.randn(len(rows), g.num_v_heads, g.head_v, g.head_k, generator=gen)
        p.checkpoint(layer)[ints(*rows)] = s.to(storage(g.state_dtype)).to(DEVICE)
    p.reset(ints(*rows))


def staged(w: Window, rows: list[int], lens: list[int], **rest: list[int]) -> Step:
    step = Step.empty(len(rows), w.max_len, DEVICE)
    step.stage(rows, lens, **rest)
    return step


class Life:
    """A few requests that verify, accept in part, cross boundaries, move, settle and go on; two null rows."""

    def __init__(self, p: policies.Policy, seed: int) -> None:
        self.p, self.seen = p, Seen()
        self.gen, self.rng = torch.Generator().manual_seed(seed), random.Random(seed)
        self.rows = list(range(1, ROWS + 1))
        self.free = list(range(ROWS + 1, 16))
        start(p, self.rows, seed)

    def look(self, slot: int) -> None:
        for layer in range(self.p.g.num_layers):
            self.seen.append(("state", self.p.checkpoint(layer)[slot].clone()))

    def step(self) -> None:
        p, rng, t = self.p, self.rng, self.p.w.max_len
        rng.shuffle(self.rows)
        rows = [*self.rows, 0, -1]
        lens = [rng.randint(1, t) for _ in self.rows] + [0, t]
        accepted = [rng.randint(1, max(n, 1)) for n in lens]
        mark, to, marked = [0] * len(rows), [*rows], [0] * len(rows)
        for i, slot in enumerate(self.rows):
            if rng.random() < 0.3:
                mark[i], spare = rng.randint(1, lens[i]), self.free.pop(0)
                crossed, leaves = mark[i] <= accepted[i], rng.random() < 0.5
                to[i], marked[i] = (spare, slot) if crossed and leaves else (slot, spare)
        flush = [rng.random() < 0.1 for _ in rows]
        step = staged(
            p.w, rows, lens, accepted=accepted, mark=mark, mark_slots=marked, next_slots=to, force_flush=flush
        )
        for layer in range(p.g.num_layers):
            out = p.verify(layer, step, tokens(p.g, len(rows), t, self.gen))
            for b, n in enumerate(lens):
                self.seen.append(("output", out[b, : n if rows[b] > 0 else 0].clone()))
                assert not out[b, n if rows[b] > 0 else 0 :].any()
        p.accept(step.close())
        for i, slot in enumerate(self.rows):
            if mark[i]:
                if mark[i] <= accepted[i]:
                    self.look(marked[i])
                self.free.append(slot if to[i] != slot else marked[i])
            if flush[i]:
                self.look(to[i])
        self.rows = to[: len(self.rows)]

    def move(self) -> None:
        i, spare = self.rng.randrange(len(self.rows)), self.free.pop(0)
        slot, self.rows[i] = self.rows[i], spare
        if self.rng.random() < 0.5:
            self.p.settle(ints(slot))
        self.p.pool.copy(ints(slot), ints(spare))
        self.p.reset(ints(slot))
        self.free.append(slot)

    def live(self, steps: int) -> Seen:
        for i in range(steps):
            self.step()
            if i % 3 == 1:
                self.move()
        for slot in sorted(self.rows):
            self.p.settle(ints(slot))
            self.look(slot)
        return self.seen


def lived(name: str, g: Geometry, seed: int = 0, w: Window = W, steps: int = STEPS, **rest: object) -> Seen:
    return Life(policy(name, g, w, **rest), seed).live(steps)


def assert_same(want: Seen, got: Seen, why: object) -> None:
    assert [what for what, _ in want] == [what for what, _ in got]
    for i, ((what, a), (_, b)) in enumerate(zip(want, got, strict=True)):
        assert torch.equal(a, b), (why, i, what)
        assert a.isfinite().all()


EVERY = ["gdn", "kda", "kda-bounded", "mamba2", "mamba2-raw-dt"]
CASES = (
    [(gate, store) for gate in EVERY for store in ("fp32", "bf16", "fp16")]
    if ON_GPU
    else [
        ("gdn", "fp16"),
        ("kda", "fp32"),
        ("kda-bounded", "bf16"),
        ("mamba2", "bf16"),
        ("mamba2-raw-dt", "fp32"),
    ]
)


@pytest.mark.parametrize(("gate", "store"), CASES)
def test_every_policy_has_native_bits_over_a_whole_life(gate: str, store: str) -> None:
    g = shape(gate, store)
    want = lived("native", g, poison=0x3E)
    for name in RECORDING:
        assert_same(want, lived(name, g, poison=0xFF), name)


def tolerance(g: Geometry, count: int) -> float:
    """Of the largest value, after ``count`` tokens that one backend sums in another order than the other.

    A token rounds K products and sums, and its gates by 2^-20 at most (``ex2.approx`` of an argument up to 16);
    a delta rule never amplifies an error. A stored 16-bit state, and a bf16 output, may land one unit apart.
    """
    unit = {DType.FP32: 0.0, DType.BF16: 2**-7, DType.FP16: 2**-10}[g.state_dtype]
    return count * ((g.head_k + 16) * 2**-24 + unit)


@pytest.mark.parametrize(("gate", "store"), CASES)
def test_values_are_those_of_the_reference(gate: str, store: str) -> None:
    g, steps = shape(gate, store), 4 if ON_GPU else 2
    pairs = zip(
        lived("native", g, steps=steps, backend="torch"), lived("native", g, steps=steps), strict=True
    )
    for (what, a), (_, b) in pairs:
        bound = tolerance(g, steps * W.max_len) + (2**-7 if what == "output" else 0.0)
        if a.numel():
            assert (
                a.float().cpu() - b.float().cpu()
            ).abs().max() <= bound * a.float().abs().max().cpu().clamp(min=1), what


def snapshot(p: policies.Policy) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in p.pool.tensors.items()}


def assert_untouched(p: policies.Policy, before: dict[str, Tensor], slots: list[int]) -> None:
    for f in p.pool.layout:
        now, then = (t if f.shared else t.movedim(1, 0) for t in (p.pool[f.name], before[f.name]))
        assert torch.equal(now[slots].view(torch.uint8), then[slots].view(torch.uint8)), f.name


@pytest.mark.parametrize("name", layout.POLICY_NAMES)
def test_null_rows_give_zeros_and_write_nothing(name: str) -> None:
    """Padding rows overwrote a live slot, or came back uninitialised: lightseekorg/tokenspeed#700, sgl-project/sglang#30974."""
    g, t = shape(), W.max_len
    p = policy(name, g)
    start(p, [3], seed=1)
    before = snapshot(p)
    step = staged(W, [0, -1, 3, -7], [t, t, 0, 0], accepted=[t, 1, 0, 0])
    for layer in range(g.num_layers):
        out = p.verify(layer, step, tokens(g, 4, t, torch.Generator().manual_seed(1)))
        assert not out.any()
    p.accept(step.close())
    assert_untouched(p, before, list(range(1, 16)))
    assert not p.verify(0, staged(W, [], []), tokens(g, 0, t, torch.Generator())).numel()


@pytest.mark.parametrize("name", ["recover", "checkpointing"])
def test_a_step_touches_its_own_slots_alone(name: str) -> None:
    g, rng = shape("kda"), torch.Generator().manual_seed(2)
    p = policy(name, g)
    start(p, [2, 5], seed=1)
    before = snapshot(p)
    for accepted in (W.max_len, W.max_len, 1):
        step = staged(W, [5], [W.max_len], accepted=[accepted])
        for layer in range(g.num_layers):
            p.verify(layer, step, tokens(g, 1, W.max_len, rng))
        p.accept(step.close())
    p.settle(ints(5))
    assert_untouched(p, before, [i for i in range(1, 16) if i != 5])


def run_once(p: policies.Policy, x: Tokens, rows: Tensor, lens: Tensor) -> Tensor:
    return p.kernels.verify(p.layers[0], x, rows, lens)


@pytest.mark.parametrize("gate", ["gdn", "kda", "mamba2"])
def test_strides_do_not_matter(gate: str) -> None:
    """A strided column read as its neighbours: vllm-project/vllm#51682."""
    g, t = shape(gate), W.max_len
    x = tokens(g, 2, t, torch.Generator().manual_seed(3))
    wide = {
        n: torch.full((*y.shape[:2], 2, *y.shape[2:]), torch.nan, dtype=y.dtype, device=DEVICE)
        for n in "qkvab"
        if (y := getattr(x, n)) is not None
    }
    for n, y in wide.items():
        y[:, :, 1] = getattr(x, n)
    strided = Tokens(**{n: y[:, :, 1] for n, y in wide.items()})
    table = ints(7, 2, -7, 7, 3, -7).view(2, 3)
    outs = []
    for tokens_in, rows in ((x, ints(2, 3)), (strided, table[:, 1])):
        p = policy("recover", g)
        start(p, [2, 3], seed=1)
        outs.append(run_once(p, tokens_in, rows, torch.stack([ints(t, t - 1)] * 2, 1)[:, 0]))
    assert torch.equal(*outs)


def test_tokens_that_are_not_packed_along_the_head_are_refused() -> None:
    g = shape()
    p, x = policy("recover", g), tokens(g, 1, 2, torch.Generator())
    with pytest.raises(ValueError, match=r"k has strides .*: the last must be 1"):
        run_once(p, replace(x, k=x.k.repeat_interleave(2, -1)[..., ::2]), ints(1), ints(2))


@pytest.mark.parametrize("name", layout.POLICY_NAMES)
def test_a_page_may_be_larger_than_a_state(name: str) -> None:
    """A pool that is not contiguous was copied and the update lost: flashinfer-ai/flashinfer#3490."""
    g, gap = shape("gdn", "bf16"), 3
    field = "snapshots" if name == "native" else "state"
    whole, padded = policy(name, g), policy(name, g)
    t = padded.pool[field]
    pages = torch.full((*t.shape[:-3], t.shape[-3:].numel() + gap), 7.0, dtype=t.dtype, device=DEVICE)
    padded.pool.tensors[field] = pages[..., :-gap].view(t.shape)
    padded = policies.make(name, g, W, padded.pool, [x.params for x in padded.layers], "triton")
    assert_same(Life(whole, seed=4).live(2), Life(padded, seed=4).live(2), name)
    assert (pages[..., -gap:] == 7.0).all()


FIELDS = [
    ("gdn", "k"),
    ("gdn", "rnorm"),
    ("gdn", "c"),
    ("gdn", "decay"),
    ("kda", "gate"),
    ("mamba2", "x"),
    ("mamba2", "dt"),
    ("mamba2", "decay"),
]


@pytest.mark.parametrize(("gate", "field"), FIELDS, ids=[f"{a}-{b}" for a, b in FIELDS])
def test_a_changed_record_changes_the_next_output(gate: str, field: str) -> None:
    g, t = shape(gate, num_layers=1), W.max_len
    outs = []
    for teeth in (False, True):
        p, gen = policy("checkpointing", g), torch.Generator().manual_seed(5)
        start(p, [1], seed=1)
        step = staged(W, [1], [t], accepted=[1])
        p.verify(0, step, tokens(g, 1, t, gen))
        p.accept(step.close())
        if teeth:
            record = p.pool[f"rec_{field}"][0, 1, :, 0]
            record += 1
        outs.append(p.verify(0, staged(W, [1], [1]), tokens(g, 1, t, gen)))
        p.settle(ints(1))
        outs.append(p.checkpoint(0)[1].clone())
    assert not torch.equal(outs[0], outs[2])
    assert not torch.equal(outs[1], outs[3])


@pytest.mark.parametrize("gate", ["gdn", "kda", "mamba2"] if ON_GPU else ["gdn"])
def test_a_dropped_window_leaves_no_trace(gate: str) -> None:
    g, t = shape(gate), W.max_len
    for name in RECORDING:
        seen = []
        for dropped in (0, 2):
            p, gen = policy(name, g), torch.Generator().manual_seed(6)
            start(p, [1], seed=1)
            for accepted in (t, 1):
                for _ in range(dropped if accepted == 1 else 0):
                    step = staged(W, [1], [t], accepted=[0])
                    for layer in range(g.num_layers):
                        p.verify(layer, step, tokens(g, 1, t, torch.Generator().manual_seed(7)))
                    p.accept(step.close())
                step = staged(W, [1], [t], accepted=[accepted])
                for layer in range(g.num_layers):
                    seen.append(("output", p.verify(layer, step, tokens(g, 1, t, gen))))
                p.accept(step.close())
            p.settle(ints(1))
            seen.append(("state", p.checkpoint(0)[1].clone()))
        assert_same(seen[: len(seen) // 2], seen[len(seen) // 2 :], name)


ODD = [(64, 96), (96, 64), (128, 192), (192, 128), (256, 64), (64, 256)] if ON_GPU else [(24, 12)]


@pytest.mark.parametrize(("k", "v"), ODD)
def test_head_sizes_need_not_be_powers_of_two(k: int, v: int) -> None:
    g = shape("gdn", head_k=k, head_v=v)
    w = replace(W, ring_len=None)
    want = lived("native", g, w=w, steps=2)
    assert_same(want, lived("checkpointing", g, w=w, steps=2), (k, v))
    for (what, a), (_, b) in zip(lived("native", g, w=w, steps=2, backend="torch"), want, strict=True):
        bound = tolerance(g, 2 * w.max_len) + (2**-7 if what == "output" else 0.0)
        assert not a.numel() or (
            a.float().cpu() - b.float().cpu()
        ).abs().max() <= bound * a.float().abs().max().cpu().clamp(min=1)


@pytest.mark.skipif(not ON_GPU, reason="the interpreter sums over lanes in NumPy's order")
@pytest.mark.parametrize("store", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("lanes_k", "lane_rows", "warps"),
    [(8, 4, 2), (4, 2, 1), (16, 4, 4), (8, 2, 8), (2, 1, 1)],
)
def test_the_tile_does_not_decide_the_bits(
    store: str, lanes_k: int, lane_rows: int, warps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ssmspec.kernels import triton_backend

    g = shape("gdn", store)
    want = lived("recover", g, steps=8)
    own = triton_backend.window_tile(g, ROWS)
    tile = replace(own, lanes_k=lanes_k, lane_rows=lane_rows, warps=warps, registers=None)
    monkeypatch.setattr(triton_backend, "window_tile", lambda *_: tile)
    assert_same(want, lived("recover", g, steps=8), tile)


@pytest.mark.skipif(not ON_GPU, reason="needs 5 GB of GPU memory")
def test_offsets_beyond_32_bits() -> None:
    """Slot times stride overflowed in several kernels: vllm-project/vllm#35275, flash-linear-attention#1082."""
    g = shape("gdn", "bf16", num_layers=1, num_k_heads=16, num_v_heads=32)
    far = 2**31 // (32 * 128 * 128) + 3
    seen = []
    for slots, slot in ((4, 3), (far + 1, far)):
        p, gen = policy("every-step", g, slots=slots), torch.Generator().manual_seed(8)
        start(p, [slot], seed=1)
        for _ in range(3):
            step = staged(W, [slot], [4], accepted=[3])
            seen.append(("output", p.verify(0, step, tokens(g, 1, 4, gen))))
            p.accept(step.close())
        p.settle(ints(slot))
        seen.append(("state", p.checkpoint(0)[slot].clone()))
    assert_same(seen[:4], seen[4:], far)


@pytest.mark.skipif(not ON_GPU, reason="needs CUDA graphs")
@pytest.mark.parametrize("name", layout.POLICY_NAMES)
def test_a_captured_step_equals_an_eager_one(name: str) -> None:
    """Captured once, replayed over moving slots and every cursor state: sgl-project/sglang#19415."""
    g, w = shape("kda"), W
    seen: dict[bool, Seen] = {False: [], True: []}
    for captured in (False, True):
        p, gen, rng = policy(name, g), torch.Generator().manual_seed(9), random.Random(9)
        step, x = (
            Step.empty(3, w.max_len, DEVICE),
            [tokens(g, 3, w.max_len, gen) for _ in range(g.num_layers)],
        )
        start(p, [1, 2, 3], seed=1)

        def run(p: policies.Policy = p, step: Step = step, x: list[Tokens] = x) -> list[Tensor]:
            outs = [p.verify(layer, step, x[layer]) for layer in range(g.num_layers)]
            p.accept(step.close())
            return outs

        if captured:
            run()  # on null rows: compiles, and builds what is built once
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outs = run()
        for _ in range(12):
            slots = rng.sample([1, 2, 3], 3)
            lens = [rng.randint(1, w.max_len) for _ in slots]
            step.stage(slots, lens, accepted=[rng.randint(1, n) for n in lens])
            for layer in x:
                fresh = tokens(g, 3, w.max_len, gen)
                for n in "qkvab":
                    getattr(layer, n).copy_(getattr(fresh, n))
            if captured:
                graph.replay()
            else:
                outs = run()
            seen[captured] += [("output", o[b, :n].clone()) for o in outs for b, n in enumerate(lens)]
        p.settle(ints(1, 2, 3))
        seen[captured] += [("state", p.checkpoint(i)[1:4].clone()) for i in range(g.num_layers)]
    assert_same(seen[False], seen[True], name)


REFUSED = [
    ({"store": "nvfp4"}, W, "state_dtype=nvfp4"),
    ({"store": "bf16-stochastic"}, W, "stochastic=True"),
    ({"read_dtype": DType.BF16}, W, "read_dtype=bfloat16"),
    ({"head_k": 512}, W, "head_k=512"),
    ({}, replace(W, mode=Mode.FAST), "mode=fast"),
]


@pytest.mark.parametrize(("changes", "w", "words"), REFUSED, ids=[r[2] for r in REFUSED])
def test_what_is_not_offered_is_refused_by_name(changes: dict[str, object], w: Window, words: str) -> None:
    with pytest.raises(ValueError, match=f"backend=triton: {words}"):
        policy("recover", shape(**changes), w)
