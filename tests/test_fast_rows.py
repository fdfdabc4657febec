"""In what order fast mode's window takes the rows of a batch: those that flush first, null rows last."""

import pytest
import torch
import triton
from triton_lives import DEVICE

from ssmspec.kernels.fast_rows import live_row, place_row
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
