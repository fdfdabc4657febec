"""Short random lives for the Triton backend: tiny under TRITON_INTERPRET=1, of a served size on a GPU."""

import os
import random

import torch
from shapes import geometry
from torch import Tensor

from ssmspec import layout, policies
from ssmspec.geometry import Arch, Geometry, Window
from ssmspec.kernels.base import LayerParams, Tokens
from ssmspec.pool import StatePool, storage
from ssmspec.step import Step

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
        else:
            t[0] = 0x3E3E3E3E  # nobody has a cursor in the null slot
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
