"""The cursors of a step move in one launch as the reference moves them: the launch is the story, lane by lane."""

import random
from dataclasses import fields

import pytest
import torch
from triton_lives import DEVICE, RECORDING, shape, staged

from ssmspec import layout
from ssmspec.geometry import Window
from ssmspec.kernels import cursors
from ssmspec.kernels.base import Plan
from ssmspec.pool import StatePool

pytestmark = [pytest.mark.interpreter, pytest.mark.gpu]
ROWS = 70  # more than a program serves


@pytest.mark.parametrize("store", ["fp32", "bf16"])
@pytest.mark.parametrize("name", RECORDING)
def test_cursors_move_as_the_reference_moves_them(name: str, store: str) -> None:
    from ssmspec.kernels.triton_cursors import advance

    g, w, rng = (
        shape("gdn", store, num_k_heads=1, num_v_heads=1),
        Window(max_len=3, ring_len=7),
        random.Random(0),
    )
    ring = layout.ring(name, w)
    ours, theirs = (StatePool.allocate(layout.of(name, g, w), 1, 2 * ROWS + 1, DEVICE) for _ in range(2))
    for field in ("base", "count", "ends"):
        if field in ours:
            top = {"base": ring.capacity, "count": ring.limit + w.max_len + 1, "ends": 1 << ring.capacity}[
                field
            ]
            ours[field].copy_(torch.tensor([rng.randrange(top) for _ in range(2 * ROWS + 1)]))
            theirs[field].copy_(ours[field])
    for _ in range(6):
        rows = rng.sample(range(1, 2 * ROWS + 1), ROWS)
        free = sorted(set(range(1, 2 * ROWS + 1)) - set(rows))
        lens = [rng.randint(0, 3) for _ in rows]
        accepted = [rng.randint(0, n) for n in lens]
        mark = [rng.randint(0, 3) for _ in rows]
        moves = [rng.random() < 0.3 for _ in rows]
        to = [f if m else r for r, f, m in zip(rows, free, moves, strict=False)]
        marked = [rng.choice([a, b]) if m else a for a, b, m in zip(to, rows, mark, strict=True)]
        rows = [rng.choice([0, -1]) if rng.random() < 0.1 else r for r in rows]
        flush = [rng.random() < 0.2 for _ in rows]
        step_of = {
            "accepted": accepted,
            "mark": mark,
            "mark_slots": marked,
            "next_slots": to,
            "force_flush": flush,
        }
        commit = staged(w, rows, lens, **step_of).close()  # type: ignore[arg-type]
        plans = advance(ours, commit, ring), cursors.advance(theirs, commit, ring)
        live = commit.slots > 0
        for f in fields(Plan):
            a, b = (getattr(plan, f.name) for plan in plans)
            assert (a is None) is (b is None)
            assert a is None or torch.equal(a[live], b[live].to(a.dtype)), f.name
            assert a is None or f.name not in ("dst", "mark_dst") or not (a[~live] > 0).any()
        for field in ("base", "count", "ends"):
            assert field not in ours or torch.equal(ours[field][1:], theirs[field][1:]), field
