"""After a step: the conv inputs behind the last accepted token, at the front of their pages, in all layers at once."""

import triton
import triton.language as tl


@triton.jit
def keep_windows(
    table,
    slots,
    accepted,
    mark,
    mark_slots,
    channels,
    channel_step,
    token_step,
    dtype: tl.constexpr,
    ALIGN: tl.constexpr,
    HISTORY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``table`` [layers, 3] int64: address of the pages, elements from page to page, address of their rows; ALIGN divides
    the first two.

    A thread loads and stores the same channels, so a window may move within its page.
    """
    b, layer = tl.program_id(0), tl.program_id(1)
    n, marked = tl.load(accepted + b), tl.load(mark + b)
    rows = tl.load(table + layer * 3 + 2).to(tl.pointer_type(tl.int64))
    page = tl.load(rows + tl.load(slots + b))
    boundary = tl.load(rows + tl.load(mark_slots + b))
    moves = n > 1
    copies = (marked > 0) & (boundary > 0) & (boundary != page)
    if (page <= 0) | ((not moves) & (not copies)):
        return
    pages = tl.multiple_of(tl.load(table + layer * 3).to(tl.pointer_type(dtype)), ALIGN)
    page_step = tl.multiple_of(tl.load(table + layer * 3 + 1), ALIGN)
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    window = pages + page * page_step + channel * channel_step
    if copies:
        source = window + (marked - 1) * token_step
        target = pages + boundary * page_step + channel * channel_step
        for j in tl.static_range(HISTORY):
            tl.store(target + j * token_step, tl.load(source + j * token_step, mask=inside), mask=inside)
    if moves:
        for j in tl.static_range(HISTORY):
            x = tl.load(window + (n - 1 + j) * token_step, mask=inside)
            tl.store(window + j * token_step, x, mask=inside)
