"""A step's rows, staged from an engine's batch and closed: by hand, and the launched ones as those in torch."""

import random

import pytest
import torch
from torch import Tensor

from ssmspec.runtime.launched_rows import LaunchedRows
from ssmspec.runtime.rows import Batch, Rows
from ssmspec.step import Commit

REQUESTS, COLUMNS, BLOCK, T = 4, 9, 5, 4
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BOTH = [
    pytest.param(Rows, id="torch"),
    pytest.param(LaunchedRows, id="triton", marks=pytest.mark.interpreter),
]


def ints(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def tables() -> list[Tensor]:
    """Page 100 * group + 10 * request + column; columns of a longer table."""
    of_group = torch.arange(REQUESTS)[:, None] * 10 + torch.arange(COLUMNS + 1)
    return [(100 * (1 + group) + of_group).int().to(DEVICE)[:, :COLUMNS] for group in range(2)]


def made(kind: type[Rows], align: int = BLOCK) -> Rows:
    rows = kind(REQUESTS, T, DEVICE)
    rows.bind(tables(), align)
    return rows


def batch() -> Batch:
    """Of three rows the last two, the other way round: request 2 with tokens 4..7 across the boundary at 5, request 0 with
    3..4 onto it."""
    return Batch(
        rows=ints(2, 1, dtype=torch.int64),
        count=2,
        requests=ints(3, 0, 2),
        starts=ints(0, 1, 3, 7),
        ends=ints(9, 5, 8),
        settle=torch.tensor([False, True], device=DEVICE),
    )


@pytest.mark.parametrize("kind", BOTH)
def test_a_row_goes_on_behind_its_windows_end_and_leaves_the_boundary_beside(kind: type[Rows]) -> None:
    rows = made(kind)
    rows.stage(batch())
    step = rows.step(REQUESTS)
    assert step.slots.tolist() == step.next_slots.tolist() == [3, 1, 0, 0]
    assert step.lens.tolist() == [4, 2, 0, 0]
    assert step.mark.tolist() == [1, 2, 0, 0]
    assert step.mark_slots.tolist() == [3 + REQUESTS, 1, 0, 0]
    assert step.force_flush.tolist() == [False, True, False, False]
    for group, first in enumerate((100, 200)):
        assert int(rows.pages[group, 3]) == first + 21  # token 7 lies in block 1
        assert int(rows.pages[group, 3 + REQUESTS]) == first + 20
        assert int(rows.pages[group, 1]) == first
    assert not rows.pages[:, 0].any()


@pytest.mark.parametrize("kind", BOTH)
def test_without_blocks_a_request_has_one_page(kind: type[Rows]) -> None:
    rows = made(kind, align=0)
    rows.stage(batch())
    assert rows.step(2).mark.tolist() == rows.step(2).mark_slots.tolist() == [0, 0]
    assert rows.pages[:, [1, 3]].tolist() == [[100, 120], [200, 220]]


@pytest.mark.parametrize("kind", BOTH)
def test_a_closed_row_has_accepted_and_is_counted_once(kind: type[Rows]) -> None:
    """Nothing sampled is one token; more than the window is all of it; a row on the null slot decides nothing.

    A row flushes where its records and its window exceed the limit, but not without records.
    """
    rows = made(kind)
    rows.stage(batch())
    rows.accept(ints(0, 9))
    rows.numbers[1, 2], rows.flags[2] = 4, True
    count = ints(*[0] * 9)
    count[3] = 3
    first = rows.close(3, count, 1)
    assert (first.accepted.tolist(), first.lens.tolist()) == ([1, 2, 0], [4, 2, 0])
    assert (first.mark.tolist(), first.mark_slots.tolist()) == ([1, 2, 0], [3 + REQUESTS, 1, 0])
    assert (first.slots.tolist(), first.next_slots.tolist()) == ([3, 1, 0], [3, 1, 0])
    assert first.force_flush.tolist() == [False, True, False]
    assert rows.counters.tolist() == [2, 3, 1, 2]
    again = rows.close(3, count, 1)
    assert again.slots.tolist() == again.accepted.tolist() == again.mark.tolist() == [0, 0, 0]
    assert rows.counters.tolist() == [2, 3, 1, 2]


@pytest.mark.parametrize("kind", BOTH)
def test_a_dummy_batch_is_null_rows(kind: type[Rows]) -> None:
    rows = made(kind)
    rows.stage(batch())
    rows.stage(Batch(**{**vars(batch()), "dummy": True, "settle": None}))
    assert not rows.numbers.any()
    assert not rows.flags.any()


@pytest.mark.interpreter
@pytest.mark.parametrize("align", [0, BLOCK])
def test_launched_rows_are_those_of_torch(align: int) -> None:
    rng = random.Random(0)
    ours, theirs = made(LaunchedRows, align), made(Rows, align)
    count = ints(*(rng.randint(0, 6) for _ in range(2 * REQUESTS + 1)))
    for _ in range(30):
        n = rng.randint(1, REQUESTS)
        requests, lens = rng.sample(range(REQUESTS), n), [rng.randint(1, T) for _ in range(n)]
        ends = [rng.randint(0, 30) + length for length in lens]
        order = rng.sample(range(n), rng.randint(1, n)) if rng.random() < 0.5 else None
        size = n if order is None else len(order)
        settle = [rng.random() < 0.5 for _ in range(size)] if rng.random() < 0.5 else None
        step = Batch(
            rows=slice(n) if order is None else ints(*order, dtype=torch.int64),
            count=size,
            requests=ints(*requests),
            starts=ints(0, *(sum(lens[: i + 1]) for i in range(n))),
            ends=ints(*ends),
            settle=None if settle is None else torch.tensor(settle, device=DEVICE),
        )
        counts = ints(*(rng.randint(0, T) for _ in range(size)))
        commits: list[Commit] = []
        for rows in (ours, theirs):
            rows.stage(step)
        assert torch.equal(ours.numbers, theirs.numbers)
        assert torch.equal(ours.flags, theirs.flags)
        assert torch.equal(ours.pages, theirs.pages)
        for rows in (ours, theirs):
            rows.accept(counts)
            commits.append(rows.close(REQUESTS, count, 6))
        for name, mine in vars(commits[0]).items():
            assert torch.equal(mine, getattr(commits[1], name)), name
        assert torch.equal(ours.counters, theirs.counters)
