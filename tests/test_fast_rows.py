"""In what order fast mode's window takes the rows of a batch: those that flush first, null rows last."""

import pytest
import torch
import triton
from triton_lives import DEVICE

from ssmspec.kernels.fast_rows import begins, live_row, place_row
from ssmspec.kernels.fast_shape import Couplings, Cursors

pytestmark = [pytest.mark.interpreter, pytest.mark.gpu]


@triton.jit
def place_rows(to, at):
    row = triton.language.program_id(0).to(triton.language.int64)
    slot, n, first, records, flush = live_row(at, row)
    place_row(to, at, row, slot, n, first, records, flush)


@pytest.mark.parametrize("batch", [1, 2, 300])
def test_rows_that_flush_come_first_and_null_rows_last(batch: int) -> None:
    gen, limit = torch.Generator().manual_seed(batch), 8

    def ints(top: int, n: int) -> torch.Tensor:
        return torch.randint(top, (n,), generator=gen)

    slots, lens = ints(20, batch) * ints(5, batch), ints(4, batch) + 1
    base, count = ints(11, 100).int(), ints(9, 100).int()
    cursors = torch.full((batch, 2), -1, device=DEVICE)
    at = (slots, None, lens, base, count)
    at = Cursors(*(None if t is None else t.to(DEVICE) for t in at), limit, batch)
    place_rows[(batch,)](Couplings(None, None, None, cursors), at)

    records = count[slots]
    flush = (records > 0) & (records + lens > limit)
    turn = torch.where(slots == 0, 2, torch.where(flush, 0, 1))
    order = turn.argsort(stable=True)
    live = torch.where(slots > 0, lens, 0)
    packed = slots << 39 | slots << 19 | (flush & (live > 0)).long() << 18
    packed |= (
        torch.where(live > 0, records, 0).long() << 12
        | torch.where(live > 0, base[slots], 0).long() << 6
        | live
    )
    assert cursors[:, 1].tolist() == order.tolist()
    assert cursors[:, 0].tolist() == packed[order].tolist()
    assert batch < 300 or len(set(turn.tolist())) == 3


@triton.jit
def who_begins(to, at):
    place, head = triton.language.program_id(0), triton.language.arange(0, 8)
    triton.language.store(to + place * 8 + head, begins(at, place, head))


@pytest.mark.parametrize("programs", [1, 7, 12, 30])
def test_what_is_fetched_ahead_are_the_states_that_programs_begin_with(programs: int) -> None:
    """A program takes every so many of the batch's heads, from the p-th part of its own on, and around."""
    batch, heads, turns = 5, 6, 2
    none = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    at = Cursors(none, None, none, None, None, 0, batch, none, 1, 1, heads, programs, turns)
    got = torch.zeros(batch, 8, dtype=torch.bool, device=DEVICE)
    who_begins[(batch,)](got, at)

    first = set()
    for program in range(programs):
        mine = list(range(program, batch * heads, programs))
        start = program * len(mine) // programs
        first |= set((mine[start:] + mine[:start])[:turns])
    assert {(int(i), int(j)) for i, j in got.nonzero()} == {divmod(i, heads) for i in first}
