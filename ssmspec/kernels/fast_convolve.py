"""The conv and the couplings of a window in one launch: what the two give apart, without reading keys and queries again."""

# mypy: disable-error-code="assignment, var-annotated, misc"

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ssmspec.kernels.conv_math import load_inputs, output, ring_at, store_behind, store_inputs
from ssmspec.kernels.fast_couplings import (
    couple_tokens,
    load_gates,
    load_history,
    load_tokens,
)
from ssmspec.kernels.fast_rows import live_row, place_row
from ssmspec.kernels.handed import hand_over


class Conv(NamedTuple):
    """A layer's conv: the window's inputs [B, T, D] and settled ones, of neighbouring channels; its taps [W, D], or PACKED
    [D]; and room for the outputs [B, T, D].

    Settled inputs lie in rings, in front of ``at``, or without it at the front of pages, where a window's move up.
    """

    x: Any
    x_row: Any
    x_token: Any
    settled: Any
    row: Any  # elements from one ring or page to the next
    input: Any
    at: Any  # [slots]
    pages: Any  # [slots], the page of each; None: its number
    slots: Any  # [B]
    taps: Any
    bias: Any
    out: Any


@triton.jit
def _load(conv, row, own, first, d, n, inside, w: tl.constexpr):
    """As conv_math.load_inputs, of channels ``d``; and where the settled ones are."""
    p_settled = conv.settled + own * conv.row + d
    p_x = conv.x + row * conv.x_row + d
    p_bias = None if conv.bias is None else conv.bias + d
    inputs, taps = load_inputs(
        p_x, conv.x_token, p_settled, conv.input, conv.taps + d, w.D, p_bias, first, n, inside, w
    )
    return inputs, taps, p_settled


@triton.jit
def _convolve(loaded, conv, row, first, d, n, inside, w: tl.constexpr):
    """Stores a window's outputs, and its inputs behind the settled ones."""
    T: tl.constexpr = w.T
    inputs, taps, p_settled = loaded
    if conv.at is None:
        tl.debug_barrier()  # all is read before any of it moves
        store_behind(inputs, p_settled, conv.input, n, inside, w)
    else:
        store_inputs(inputs, p_settled, conv.input, first, n, inside, w)
    for t in tl.static_range(T):
        y = output(inputs, taps, t, w).to(conv.out.dtype.element_ty)
        hand_over(conv.out + (row * T + t) * w.D + d, y, mask=inside & (t < n))


@triton.jit
def _values_at(first, BLOCK: tl.constexpr, c: tl.constexpr):
    """Channels of BLOCK values from ``first`` on, and which of them there are."""
    i = first + tl.arange(0, BLOCK)
    return (0 if c.MAMBA else 2 * c.H * c.K) + i, i < c.HV * c.V


@triton.jit
def _keys(
    to, conv, x, x_step, A_log, dt_bias, D, rec, rec_step, row, slot, own, oldest, n, first, records,
    OPERAND: tl.constexpr, w: tl.constexpr, c: tl.constexpr,
):  # fmt: skip
    """HEADS value heads of one key head. Loads are under way early, as far as there are registers: a program is short,
    and mostly waits."""
    EARLY: tl.constexpr = c.T <= 4
    parts: tl.constexpr = c.GROUP // c.HEADS
    VALUES: tl.constexpr = c.HV * c.V
    h = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    channel = tl.arange(0, c.KP)
    inside = channel < c.K
    of_q = (VALUES + c.H * c.K if c.MAMBA else 0) + h * c.K + channel
    of_k = (VALUES if c.MAMBA else c.H * c.K) + h * c.K + channel
    head = h * c.GROUP + part * c.HEADS
    heads = head + tl.arange(0, c.HEADS)
    queries = _load(conv, row, own, oldest, of_q, n, inside, w)
    keys = _load(conv, row, own, oldest, of_k, n, inside, w)
    gates = load_gates(x, x_step, A_log, dt_bias, row, head, n, c)
    history = ()
    if EARLY & (c.HP > 0):
        history = load_history(rec, rec_step, slot, h, heads, first, records, part == 0, c)
    _convolve(queries, conv, row, oldest, of_q, n, inside, w)
    _convolve(keys, conv, row, oldest, of_k, n, inside, w)
    tl.debug_barrier()  # what a program has just stored it finds in the cache, a token to a row
    keys, queries = load_tokens(x, x_step, row, h, n, c)
    if (not EARLY) & (c.HP > 0):
        history = load_history(rec, rec_step, slot, h, heads, first, records, part == 0, c)
    couple_tokens(
        to, keys, queries, gates, history, D, rec, rec_step, row, slot, h, part, n, ring_at(first + records, c),
        OPERAND, c,
    )  # fmt: skip


@triton.jit
def convolve_and_couple(
    to, conv, x, x_step, A_log, dt_bias, D, at, rec, rec_step, OPERAND: tl.constexpr, w: tl.constexpr,
    c: tl.constexpr,
):  # fmt: skip
    """Grid (programs, B): writes what conv_triton.convolve writes for live tokens, and fast_couplings.couple. A row's
    last program gives the row its turn, which takes a look at all rows."""
    row = tl.program_id(1).to(tl.int64)
    own = tl.maximum(tl.load(conv.slots + row).to(tl.int64), 0)
    oldest = tl.cast(0, tl.int32)
    if conv.at is not None:
        oldest = ring_at(tl.load(conv.at + own) + (w.R - w.HISTORY), w)
    if conv.pages is not None:
        own = tl.load(conv.pages + own)
    slot, n, first, records, flush = live_row(at, row)
    heads: tl.constexpr = c.HV // c.HEADS
    if tl.program_id(0) == tl.num_programs(0) - 1:
        place_row(to, at, row, slot, n, first, records, flush)
    elif n > 0:
        if tl.program_id(0) < heads:
            _keys(
                to, conv, x, x_step, A_log, dt_bias, D, rec, rec_step, row, slot, own, oldest, n, first, records,
                OPERAND, w, c,
            )  # fmt: skip
        else:
            d, inside = _values_at((tl.program_id(0) - heads) * w.BLOCK, w.BLOCK, c)
            _convolve(_load(conv, row, own, oldest, d, n, inside, w), conv, row, oldest, d, n, inside, w)
