"""What an accepted step does to its rows' cursors, in plain torch."""

import torch
from torch import Tensor

from ssmspec.kernels.base import Plan
from ssmspec.layout import Ring
from ssmspec.pool import NULL_SLOT, StatePool
from ssmspec.step import Commit


def advance(pool: StatePool, commit: Commit, ring: Ring) -> Plan:
    """Move the cursors of every row past its accepted tokens -> what is left to fold.

    A row goes on with its records where it can. It is folded where its checkpoint has to be exact: because it moves,
    ends on a boundary, or is told to; without cursors records never outlive a step, and every row is folded.
    """
    start, lasts = torch.zeros_like(commit.slots), "count" in pool
    base, count = (pool["base"][commit.slots], pool["count"][commit.slots]) if lasts else (start, start)
    flushed = (commit.lens > 0) & (count + commit.lens > ring.limit)
    folded = torch.where(flushed, count, 0)  # by this step's verify
    base, count = (base + folded) % ring.capacity, count - folded
    total = count + commit.accepted
    fold = (total > 0) & commit.settles if lasts else total > 0
    ends = _ends(pool, commit, base + count, ring.limit, ring.capacity)
    if "position" in pool:
        pool["position"][commit.slots] += folded.int()
    if lasts:
        _write(pool, torch.where(commit.moved, commit.slots, NULL_SLOT), start, start)
        _write(pool, commit.mark_slots, start, start)
        _write(pool, commit.next_slots, base, torch.where(fold, 0, total))
    if ends is not None:
        pool["ends"][commit.next_slots] = ends
    return Plan(
        src=commit.slots,
        base=base,
        count=torch.where(fold, total, 0),
        dst=torch.where(fold, commit.next_slots, NULL_SLOT),
        mark=torch.where(commit.mark > 0, count + commit.mark, 0),
        mark_dst=commit.mark_slots,
        ends=ends,
    )


def _write(pool: StatePool, slots: Tensor, base: Tensor, count: Tensor) -> None:
    pool["base"][slots] = base.int()
    pool["count"][slots] = count.int()


def _ends(pool: StatePool, commit: Commit, first: Tensor, limit: int, capacity: int) -> Tensor | None:
    """Forget the ends that the window's ring positions had, and set one at its last accepted token."""
    if "ends" not in pool:
        return None
    ends = pool["ends"][commit.slots]
    for t in range(capacity - limit):
        bit = torch.ones_like(ends) << ((first + t) % capacity).long()
        ends = torch.where(commit.lens > t, ends & ~bit, ends)
        ends = torch.where(commit.accepted == t + 1, ends | bit, ends)
    return ends
