"""A step's rows in one launch each: from an engine's batch and block tables before its layers, and closed after sampling."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n", "ordered", "settled"])
def stage_rows(
    requests,
    starts,
    ends,
    order,
    ordered,
    settle,
    settled,
    n,
    tables,
    entry: tl.constexpr,
    groups,
    numbers,
    flags,
    pages,
    size,
    align,
    ROWS: tl.constexpr,
):
    """``numbers`` [6, size] as the fields of a Step, ``pages`` [groups, 2 * size + 1]; rows behind ``n`` become null rows.

    Of the engine's batch, if ``ordered`` in the order of ``order``: request slots, token offsets, lengths of whole
    requests. Both orders, with ``settle`` if ``settled`` and without, are one kernel: none is compiled while serving.
    ``tables`` [groups, 2] int64: address of a block table of type ``entry``, entries from request to request.
    """
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside, live = i < size, i < n
    row = tl.where(ordered > 0, tl.load(order + i, mask=live & (ordered > 0), other=0), i)
    request = tl.load(requests + row, mask=live, other=-1).to(tl.int64)
    start = tl.load(starts + row, mask=live, other=0).to(tl.int64)
    length = tl.load(starts + row + 1, mask=live, other=0).to(tl.int64) - start
    computed = tl.load(ends + row, mask=live, other=0).to(tl.int64) - length
    slot, none = request + 1, tl.zeros([ROWS], tl.int64)
    column, marked, mark, beside, mark_slot = none, none > 0, none, none, none
    running = none
    if align > 0:
        column, running = computed // align, (computed + length - 1) // align
        mark = (column + 1) * align - computed
        marked = live & (mark <= length)
        mark = tl.where(marked, mark, 0)
        beside = slot + size
        mark_slot = tl.where(marked, tl.where(column == running, slot, beside), 0)
    told = tl.load(settle + i, mask=live & (settled > 0), other=0) != 0
    tl.store(numbers + i, slot, mask=inside)
    tl.store(numbers + size + i, length, mask=inside)
    tl.store(numbers + 2 * size + i, none, mask=inside)
    tl.store(numbers + 3 * size + i, slot, mask=inside)
    tl.store(numbers + 4 * size + i, mark, mask=inside)
    tl.store(numbers + 5 * size + i, mark_slot, mask=inside)
    tl.store(flags + i, told, mask=inside)
    for group in range(groups):
        table = tl.load(tables + 2 * group).to(tl.pointer_type(entry)) + request * tl.load(
            tables + 2 * group + 1
        )
        at = pages + group * (2 * size + 1)
        tl.store(at + slot, tl.load(table + running, mask=live, other=0).to(tl.int64), mask=live)
        page = tl.load(table + column, mask=marked, other=0).to(tl.int64)
        tl.store(at + beside, page, mask=marked)


@triton.jit(do_not_specialize=["n"])
def close_rows(numbers, flags, count, limit, commit, told, counters, n, size, ROWS: tl.constexpr):
    """``numbers`` [6, size], ``flags`` -> ``commit`` [6, size], ``told``, in the order of a Commit's fields.

    A live row accepts at least one token. ``counters`` [4] grow by rows, tokens, flushes (where records last: rows of
    ``count`` that exceed ``limit`` with this window) and boundaries.
    """
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = i < n
    slot = tl.load(numbers + i, mask=inside, other=0)
    length = tl.load(numbers + size + i, mask=inside, other=0)
    accepted = tl.load(numbers + 2 * size + i, mask=inside, other=0)
    to = tl.load(numbers + 3 * size + i, mask=inside, other=0)
    mark = tl.load(numbers + 4 * size + i, mask=inside, other=0)
    mark_slot = tl.load(numbers + 5 * size + i, mask=inside, other=0)
    flag = tl.load(flags + i, mask=inside, other=0) != 0
    live = (length > 0) & (slot > 0)
    slot, length = tl.where(live, slot, 0), tl.where(live, length, 0)
    accepted = tl.minimum(tl.maximum(accepted, 1), length)
    crossed = (mark > 0) & (mark <= accepted)
    flushed = live & False
    if count is not None:
        held = tl.load(count + slot, mask=live, other=0).to(tl.int64)
        flushed = live & (held > 0) & (held + length > limit)
    tl.store(commit + i, slot, mask=inside)
    tl.store(commit + size + i, length, mask=inside)
    tl.store(commit + 2 * size + i, accepted, mask=inside)
    tl.store(commit + 3 * size + i, tl.where(accepted > 0, to, slot), mask=inside)
    tl.store(commit + 4 * size + i, tl.where(crossed, mark, 0), mask=inside)
    tl.store(commit + 5 * size + i, tl.where(crossed, mark_slot, 0), mask=inside)
    tl.store(told + i, flag & live, mask=inside)
    tl.store(numbers + size + i, tl.zeros([ROWS], tl.int64), mask=inside)
    tl.atomic_add(counters, tl.sum(live.to(tl.int64), 0))
    tl.atomic_add(counters + 1, tl.sum(accepted, 0))
    tl.atomic_add(counters + 2, tl.sum(flushed.to(tl.int64), 0))
    tl.atomic_add(counters + 3, tl.sum(crossed.to(tl.int64), 0))
