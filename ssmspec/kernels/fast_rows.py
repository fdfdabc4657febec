"""Where batch rows stand, and in what order fast mode's window kernel takes them."""

import triton
import triton.language as tl

ROWS = tl.constexpr(256)  # looked at in one go


@triton.jit
def live_row(at, row):
    """(slot, tokens, first record, records, flush) of a batch row, or of several; no tokens on a null row."""
    slot = tl.load(at.rows + row).to(tl.int64)
    n = tl.where(slot > 0, tl.load(at.lens + row), 0).to(tl.int32)
    slot = tl.maximum(slot, 0)
    first = tl.cast(0, tl.int32)
    records = first
    if at.count is not None:
        first = tl.load(at.base + slot, mask=n > 0, other=0)
        records = tl.load(at.count + slot, mask=n > 0, other=0)
    flush = (records > 0) & (records + n > at.limit)
    return slot, n, first, records, flush


@triton.jit
def row_of_state(at, slot):
    return slot if at.pages is None else tl.load(at.pages + slot)


@triton.jit
def pack(at, slot, n, first, records, flush):
    """A batch row in one number: 6 bits each, the flush's one, the slot's 20, and the state's row above."""
    numbers = (flush.to(tl.int64) << 18) | (records << 12) | (first << 6) | n
    return (row_of_state(at, slot) << 39) | ((slot & 0xFFFFF) << 19) | numbers


@triton.jit
def _turn(n, flush):
    """Rows that flush first, null rows last."""
    return tl.where(n == 0, 2, tl.where(flush, 0, 1))


@triton.jit
def place_row(to, at, row, slot, n, first, records, flush, several=None):
    """Store a row's cursor in ``to.cursors`` where its turn is.

    A tile that is folded takes about twice as long as one that is not. The window kernel's programs take every so
    many heads (fast_tile.nth), so that all have the same share of either kind if the kinds lie together.
    ``several`` is 0 to ROWS - 1, in Gluon with a layout.
    """
    turn = _turn(n, flush)
    if several is None:
        several = tl.arange(0, ROWS)
    place = tl.cast(0, tl.int64)
    for start in range(0, at.batch, ROWS):
        other = start + several
        _, tokens, _, _, due = live_row(at, tl.minimum(other, at.batch - 1))
        theirs = _turn(tokens, due)
        ahead = (theirs < turn) | ((theirs == turn) & (other < row))
        place += tl.sum((ahead & (other < at.batch)).to(tl.int32), 0)
    tl.store(to.cursors + 2 * place, pack(at, slot, n, first, records, flush))
    tl.store(to.cursors + 2 * place + 1, row)
