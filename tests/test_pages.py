"""States may lie in an engine's pages, at rows of their own in every layer: records and cursors stay with the slot."""

import random

import pytest
import torch
from torch import Tensor
from triton_lives import DEVICE, ON_GPU, RECORDING, W, ints, params, shape, staged, tokens

from ssmspec import layout, policies
from ssmspec.geometry import Geometry, Mode, Window
from ssmspec.pool import StatePool, storage

SLOTS, PAGES = 9, 23
LIVE = [1, 2, 3, 4] if ON_GPU else [1, 2]
STEPS = 12 if ON_GPU else 2


def pools(name: str, g: Geometry, w: Window, seed: int) -> tuple[StatePool, StatePool]:
    """The same states by slot, and in NaN-filled pages that are farther apart than a state is long."""
    gen = torch.Generator().manual_seed(seed)
    plain = StatePool.allocate(layout.of(name, g, w), g.num_layers, SLOTS, DEVICE)
    paged = StatePool.allocate(layout.of(name, g, w), g.num_layers, SLOTS, DEVICE)
    state = torch.randn(plain["state"].shape, generator=gen).to(storage(g.state_dtype)).to(DEVICE)
    plain["state"].copy_(state)
    size = g.num_v_heads * g.head_v * g.head_k
    memory = torch.full((g.num_layers, PAGES, size + 64), float("nan"), dtype=state.dtype, device=DEVICE)
    pages = memory[:, :, :size].view(g.num_layers, PAGES, *state.shape[2:])
    rows = []
    for layer in range(g.num_layers):
        at = torch.cat([torch.zeros(1, dtype=torch.int64), 1 + torch.randperm(PAGES - 1, generator=gen)])
        rows.append(at[:SLOTS].to(DEVICE))
        pages[layer][rows[layer]] = state[layer]
    return plain, StatePool(paged.layout, {**paged.tensors, "state": pages}, rows)


def in_slots(pool: StatePool, layer: int, slots: list[int]) -> Tensor:
    at = ints(*slots)
    return pool["state"][layer][at if pool.rows is None else pool.rows[layer][at]]


def play(name: str, g: Geometry, w: Window, backend: str) -> None:
    players = [
        policies.make(name, g, w, pool, [params(g, i) for i in range(g.num_layers)], backend)
        for pool in pools(name, g, w, 1)
    ]
    for p in players:
        p.reset(ints(*LIVE))
    rng, gen = random.Random(0), torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        rows = [*rng.sample(LIVE, len(LIVE)), 0]
        lens = [rng.randint(1, w.max_len) for _ in LIVE] + [0]
        accepted = [rng.randint(1, max(1, n)) for n in lens]
        mark = [1 if rng.random() < 0.5 else 0 for _ in LIVE] + [0]
        step_of = {
            "accepted": accepted,
            "mark": mark,
            "mark_slots": [slot + 4 if m else 0 for slot, m in zip(rows, mark, strict=True)],
            "force_flush": [rng.random() < 0.3 for _ in rows],
        }
        steps = [staged(w, rows, lens, **step_of) for _ in players]  # type: ignore[arg-type]
        for layer in range(g.num_layers):
            x = tokens(g, len(rows), w.max_len, gen)
            a, b = (p.verify(layer, s, x) for p, s in zip(players, steps, strict=True))
            assert a.isfinite().all()
            assert torch.equal(a, b)
        for p, s in zip(players, steps, strict=True):
            p.accept(s.close())
    for p in players:
        p.settle(ints(*LIVE))
    for layer in range(g.num_layers):
        a, b = (in_slots(p.pool, layer, list(range(1, SLOTS))) for p in players)
        assert torch.equal(a, b)
        held = players[1].pool.rows
        assert held is not None
        free = sorted(set(range(PAGES)) - set(held[layer].tolist()))
        assert players[1].pool["state"][layer][free].isnan().all()


@pytest.mark.parametrize("name", RECORDING)
def test_the_reference_finds_states_in_pages(name: str) -> None:
    play(name, shape("gdn", "bf16", num_layers=2), W, "torch")


CASES = [
    ("recover", "gdn", "bf16"),
    ("every-step", "kda", "fp32"),
    ("checkpointing", "gdn", "bf16"),
    ("checkpointing", "mamba2", "fp16"),
]


@pytest.mark.interpreter
@pytest.mark.gpu
@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize(("name", "gate", "store"), CASES)
def test_the_triton_kernels_find_states_in_pages(name: str, gate: str, store: str, mode: Mode) -> None:
    w = Window(max_len=W.max_len, ring_len=W.ring_len, mode=mode)
    play(name, shape(gate, store, num_layers=2), w, "triton")
