"""The fold kernel: replay committed records onto the checkpoints of every layer in one launch."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ssmspec.kernels.triton_records import (
    Records,
    load_state,
    locate,
    replay,
    state_at,
    store_state,
)


class Ports(NamedTuple):
    """A column per pointer of a layer; also their dtypes, None where a layout has no such field."""

    state: Any
    k: Any = None
    rnorm: Any = None
    c: Any = None
    x: Any = None
    dt: Any = None
    decay: Any = None
    rows: Any = None


class Moves(NamedTuple):
    """A Plan as the kernel takes it, a number per row each."""

    src: Any
    base: Any
    count: Any
    dst: Any
    mark: Any
    mark_dst: Any
    ends: Any


@triton.jit
def _port(table, layer, i: tl.constexpr, dtype: tl.constexpr, ALIGN: tl.constexpr):
    """Port i of a layer: its address, and its elements per slot."""
    entry = table + (layer * 8 + i) * 2
    pointer = tl.load(entry).to(tl.pointer_type(dtype))
    return tl.multiple_of(pointer, ALIGN), tl.multiple_of(tl.load(entry + 1), ALIGN)


@triton.jit(do_not_specialize=["B"])
def fold(
    table,
    layers,
    span,
    plan,
    B,
    types: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    g: tl.constexpr,
):
    """Carry out a plan. ``table`` [layers, ports, 2] int64; a program serves ``span`` layers of ROWS rows and one tile.

    Most plans are nearly empty: a program looks at its rows at once, and goes through them only if one has to move.
    """
    first = tl.program_id(1) * ROWS
    b = first + tl.arange(0, ROWS)
    moves = tl.load(plan.dst + b, mask=b < B, other=0) > 0
    moves = moves | (tl.load(plan.mark_dst + b, mask=b < B, other=0) > 0)
    if tl.sum(moves.to(tl.int32), 0) > 0:
        for row in range(first, tl.minimum(first + ROWS, B)):
            _fold_row(table, layers, span, plan, row, types, ALIGN, g)


@triton.jit
def _fold_row(table, layers, span, plan, b, types: tl.constexpr, ALIGN: tl.constexpr, g: tl.constexpr):
    tiles: tl.constexpr = (g.V + g.LV * g.NV - 1) // (g.LV * g.NV)
    v_tile, hv = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    row, start = tl.load(plan.src + b).to(tl.int64), tl.load(plan.base + b).to(tl.int32)
    n_end, to_end = tl.load(plan.count + b).to(tl.int32), tl.load(plan.dst + b).to(tl.int64)
    n_mark, to_mark = tl.load(plan.mark + b).to(tl.int32), tl.load(plan.mark_dst + b).to(tl.int64)
    if (row > 0) & ((to_end > 0) | (to_mark > 0)):
        nearer = n_mark <= n_end
        n0, n1 = tl.where(nearer, n_mark, n_end), tl.where(nearer, n_end, n_mark)
        to0, to1 = tl.where(nearer, to_mark, to_end), tl.where(nearer, to_end, to_mark)
        bits = None
        if plan.ends is not None:
            bits = tl.load(plan.ends + b)
        first = tl.program_id(2) * span
        for layer in range(first, tl.minimum(first + span, layers)):
            _fold_layer(table, layer, row, start, n0, to0, n1, to1, bits, hv, v_tile, types, ALIGN, g)


@triton.jit
def _fold_layer(
    table, layer, row, start, n0, to0, n1, to1, bits, hv, v_tile,
    types: tl.constexpr, ALIGN: tl.constexpr, g: tl.constexpr,
):  # fmt: skip
    """Store the state ``n0`` records on in row ``to0``, and the one ``n1`` on in ``to1``."""
    CHANNELS: tl.constexpr = ALIGN if g.ARCH == "kda" else 1
    state, state_step = _port(table, layer, 0, types.state, ALIGN)
    k, k_step = _port(table, layer, 1, types.k, ALIGN) if types.k is not None else (None, None)
    rnorm, rnorm_step = _port(table, layer, 2, types.rnorm, 1) if types.rnorm is not None else (None, None)
    c, c_step = _port(table, layer, 3, types.c, ALIGN) if types.c is not None else (None, None)
    x, x_step = _port(table, layer, 4, types.x, ALIGN) if types.x is not None else (None, None)
    dt, dt_step = _port(table, layer, 5, types.dt, 1) if types.dt is not None else (None, None)
    decay, decay_step = (
        _port(table, layer, 6, types.decay, CHANNELS) if types.decay is not None else (None, None)
    )
    rec = Records(k=k, rnorm=rnorm, c=c, x=x, dt=dt, decay=decay)
    step = Records(k=k_step, rnorm=rnorm_step, c=c_step, x=x_step, dt=dt_step, decay=decay_step)

    held, held0, held1 = row, to0, to1
    if types.rows is not None:
        rows, _ = _port(table, layer, 7, types.rows, 1)
        held = tl.load(rows + row)
        held0, held1 = tl.load(rows + tl.maximum(to0, 0)), tl.load(rows + tl.maximum(to1, 0))
    at = locate(hv, v_tile, g)
    state += state_at(at, g)
    s = load_state(state + held * state_step, at, g)
    done = 0
    if to0 > 0:
        if types.k is not None:
            s = replay(s, rec, step, row, start, 0, n0, bits, types.state, at, g)
        store_state(state + held0 * state_step, s, at, g)
        done = n0
    if to1 > 0:
        if types.k is not None:
            s = replay(s, rec, step, row, start, done, n1, bits, types.state, at, g)
        store_state(state + held1 * state_step, s, at, g)
