"""The cursors of a step in one launch: ``kernels/cursors.py``, a row per lane."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssmspec.kernels.base import Plan
from ssmspec.kernels.launch import column
from ssmspec.layout import Ring
from ssmspec.pool import StatePool
from ssmspec.step import Commit

ROWS = 64  # of a program


@triton.jit
def _move(
    commit,
    base,
    count,
    ends,
    plan,
    plan_ends,
    B,
    LIMIT: tl.constexpr,
    CAPACITY: tl.constexpr,
    ROWS: tl.constexpr,
):
    """``commit`` in the order of its fields; ``plan`` [4, B] int64: base, count, dst, mark. Null slots stay as they are."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = i < B
    slot, n = tl.load(commit[0] + i, mask=inside, other=0), tl.load(commit[1] + i, mask=inside, other=0)
    accepted, to = tl.load(commit[2] + i, mask=inside, other=0), tl.load(commit[3] + i, mask=inside, other=0)
    mark, marked = tl.load(commit[4] + i, mask=inside, other=0), tl.load(commit[5] + i, mask=inside, other=0)
    told = tl.load(commit[6] + i, mask=inside, other=0) != 0
    live = slot > 0
    first, held = slot * 0, slot * 0
    if base is not None:
        first = tl.load(base + slot, mask=live, other=0).to(tl.int64)
        held = tl.load(count + slot, mask=live, other=0).to(tl.int64)
    flushed = tl.where((n > 0) & (held + n > LIMIT), held, 0)
    first, held = (first + flushed) % CAPACITY, held - flushed
    total = held + accepted
    fold = total > 0
    if base is not None:
        fold = fold & ((to != slot) | ((mark > 0) & (marked == to)) | told)
        tl.store(base + slot, 0, mask=live & (to != slot))
        tl.store(count + slot, 0, mask=live & (to != slot))
        tl.store(base + marked, 0, mask=marked > 0)
        tl.store(count + marked, 0, mask=marked > 0)
        tl.store(base + to, first.to(tl.int32), mask=to > 0)
        tl.store(count + to, tl.where(fold, 0, total).to(tl.int32), mask=to > 0)
    if ends is not None:
        bits = tl.load(ends + slot, mask=live, other=0)
        for t in range(0, CAPACITY - LIMIT):
            bit = tl.full([ROWS], 1, tl.int64) << ((first + held + t) % CAPACITY)
            bits = tl.where(n > t, bits & ~bit, bits)
            bits = tl.where(accepted == t + 1, bits | bit, bits)
        tl.store(ends + to, bits, mask=to > 0)
        tl.store(plan_ends + i, bits, mask=inside)
    tl.store(plan + i, first, mask=inside)
    tl.store(plan + B + i, tl.where(fold, total, 0), mask=inside)
    tl.store(plan + 2 * B + i, tl.where(fold, to, 0), mask=inside)
    tl.store(plan + 3 * B + i, tl.where(mark > 0, held + mark, 0), mask=inside)


def advance(pool: StatePool, commit: Commit, ring: Ring) -> Plan:
    """As ``cursors.advance``; states that are rounded stochastically are the reference's alone."""
    assert "position" not in pool
    fields = tuple(column(name, t) for name, t in vars(commit).items())
    batch, device = len(commit.slots), commit.slots.device
    plan = torch.empty(4, batch, dtype=torch.int64, device=device)
    ends: Tensor | None = None
    if "ends" in pool:
        ends = torch.empty(batch, dtype=torch.int64, device=device)
    if batch:
        _move[(triton.cdiv(batch, ROWS),)](
            fields,
            pool.tensors.get("base"),
            pool.tensors.get("count"),
            pool.tensors.get("ends"),
            plan,
            ends,
            batch,
            LIMIT=ring.limit,
            CAPACITY=ring.capacity,
            ROWS=ROWS,
            num_warps=ROWS // 32,
        )
    base, count, dst, mark = plan
    return Plan(
        src=commit.slots, base=base, count=count, dst=dst, mark=mark, mark_dst=commit.mark_slots, ends=ends
    )
