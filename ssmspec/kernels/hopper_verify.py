"""The GDN window in one persistent Gluon kernel: replay, flush, verify, then snapshots or records.

A program walks over tiles (batch row, value head, V block). While it computes one, the state, tokens and records of
its next are on their way into shared memory.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ssmspec.kernels.hopper_tile import async_load, barrier, dims, dot, rows_of_tile, view

# where the numbers of a batch row are packed: 6 bits each, the slot above
LEN, COUNT, BASE, FLUSH, SLOT = (gl.constexpr(i) for i in (0, 6, 12, 18, 24))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


class Inputs(NamedTuple):
    """One entry per layer input: pointers, or strides (row, token, head)."""

    q: Any
    k: Any
    v: Any
    a: Any
    b: Any


class Records(NamedTuple):
    """One entry per record field: pointers, or the stride of a slot."""

    k: Any
    rnorm: Any
    c: Any
    decay: Any


class Prepared(NamedTuple):
    """What ``prepare_window`` computed, once for all tiles."""

    rows: Any  # [B, 2] int64: packed numbers, and the ends of accepted steps from the oldest record on
    factors: Any  # [B, HV, 4, WINDOW] fp32: 1/norm of k, 1/norm of q, decay, beta


class Shared(NamedTuple):
    """Shared memory of a program: what arrives, and the fp32 keys and queries made of it."""

    rows: Any  # [2]
    state: Any  # [BV, K]
    raw_k: Any  # [WINDOW, K]
    raw_q: Any  # [WINDOW, K]
    k: Any  # [WINDOW, K] fp32, in chunks
    q: Any  # the same
    v: Any  # two buffers of [WINDOW, BV]
    factors: Any  # two buffers of [4 * WINDOW]


class Past(NamedTuple):
    """Shared memory for committed records."""

    raw_k: Any  # [HISTORY, K]
    rnorm: Any  # [HISTORY]
    k: Any  # [HISTORY, K] fp32, in chunks
    c: Any  # [HISTORY, BV]
    decay: Any  # [HISTORY]


@gluon.jit
def _allocate(state, x, c: gl.constexpr):
    ACT: gl.constexpr = x.k.dtype.element_ty
    STATE: gl.constexpr = gl.SwizzledSharedLayout(c.CHUNK, 1, 8, [1, 0])
    return Shared(
        gl.allocate_shared_memory(gl.int64, [2, 1], FLAT),
        gl.allocate_shared_memory(state.dtype.element_ty, [c.BV, c.K], STATE),
        gl.allocate_shared_memory(ACT, [c.WINDOW, c.K], PLAIN),
        gl.allocate_shared_memory(ACT, [c.WINDOW, c.K], PLAIN),
        gl.allocate_shared_memory(gl.float32, [c.WINDOW, c.K // c.CHUNK, c.CHUNK], c.APART),
        gl.allocate_shared_memory(gl.float32, [c.WINDOW, c.K // c.CHUNK, c.CHUNK], c.APART),
        gl.allocate_shared_memory(ACT, [2 * c.WINDOW, c.BV], FLAT),
        gl.allocate_shared_memory(gl.float32, [8 * c.WINDOW, 1], FLAT),
    )


@gluon.jit
def _allocate_past(records, c: gl.constexpr):
    return Past(
        gl.allocate_shared_memory(records.k.dtype.element_ty, [c.HISTORY, c.K], PLAIN),
        gl.allocate_shared_memory(gl.float32, [c.HISTORY], FLAT),
        gl.allocate_shared_memory(gl.float32, [c.HISTORY, c.K // c.CHUNK, c.CHUNK], c.APART),
        gl.allocate_shared_memory(records.c.dtype.element_ty, [c.HISTORY, c.BV], FLAT),
        gl.allocate_shared_memory(gl.float32, [c.HISTORY, 1], FLAT),
    )


@gluon.jit
def _field(row, AT: gl.constexpr):
    return ((row >> AT) & 63).to(gl.int32)


@gluon.jit
def _place(tile, c: gl.constexpr):
    """Batch row, value head and first V row of a tile."""
    at = tile.to(gl.uint32)
    return (
        (at // (c.HV * c.BLOCKS)).to(gl.int32),
        ((at // c.BLOCKS) % c.HV).to(gl.int32),
        ((at % c.BLOCKS) * c.BV).to(gl.int32),
    )


@gluon.jit
def _row(rows, tile, num_tiles, c: gl.constexpr):
    """The packed numbers and step ends of a tile's batch row; behind the last tile a null row."""
    b, _, _ = _place(gl.minimum(tile, num_tiles - 1), c)
    return gl.load(rows + 2 * b) * (tile < num_tiles).to(gl.int64), gl.load(rows + 2 * b + 1)


@gluon.jit
def _fetch_row(s, rows, tile, num_tiles, c: gl.constexpr):
    b, _, _ = _place(gl.minimum(tile, num_tiles - 1), c)
    i = gl.arange(0, 2, layout=gl.BlockedLayout([2], [32], [c.WARPS], [0]))
    async_load(view(s.rows, dims(2), FLAT), rows + 2 * b + i)


@gluon.jit
def _fetched_row(s, tile, num_tiles, c: gl.constexpr):
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [c.WARPS], [0])
    row = gl.max(s.rows.index(0).load(ONE), 0) * (tile < num_tiles).to(gl.int64)
    ends = row
    if c.ENDS:
        ends = gl.max(s.rows.index(1).load(ONE), 0)
    return row, ends


@gluon.jit
def _state_at(state, stride, row_of_state, hv, first, LAYOUT: gl.constexpr, c: gl.constexpr):
    """Pointers [BV, K] to a tile."""
    v = gl.arange(0, c.BV, layout=gl.SliceLayout(1, LAYOUT))
    k = gl.arange(0, c.K, layout=gl.SliceLayout(0, LAYOUT))
    return state + row_of_state * stride + ((hv * c.V + first) * c.K + v[:, None] * c.K + k[None, :])


@gluon.jit
def _fetch_window(s, buffer, x, strides, factors, row, tile, c: gl.constexpr):
    """Raw q and k, v, norms and gates. Rows behind the window's end are not read."""
    b, hv, first = _place(tile, c)
    h = hv // c.GROUP
    WIDE: gl.constexpr = c.lines(c.K, x.k.dtype.element_ty.primitive_bitwidth // 8)
    t = gl.arange(0, c.WINDOW, layout=gl.SliceLayout(1, WIDE))[:, None]
    k = gl.arange(0, c.K, layout=gl.SliceLayout(0, WIDE))[None, :]
    live = t < _field(row, LEN)
    async_load(s.raw_k, x.k + (b * strides.k[0] + h * strides.k[2] + (t * strides.k[1] + k)), mask=live)
    async_load(s.raw_q, x.q + (b * strides.q[0] + h * strides.q[2] + (t * strides.q[1] + k)), mask=live)
    NARROW: gl.constexpr = c.lines(c.BV, x.v.dtype.element_ty.primitive_bitwidth // 8)
    t = gl.arange(0, c.WINDOW, layout=gl.SliceLayout(1, NARROW))[:, None]
    v = gl.arange(0, c.BV, layout=gl.SliceLayout(0, NARROW))[None, :]
    values = view(s.v, dims(2, c.WINDOW, c.BV), PLAIN).index(buffer)
    p_v = x.v + (b * strides.v[0] + hv * strides.v[2] + first + (t * strides.v[1] + v))
    async_load(values, p_v, mask=t < _field(row, LEN))
    i = gl.arange(0, 4 * c.WINDOW, layout=gl.BlockedLayout([1], [32], [c.WARPS], [0]))
    into = view(s.factors, dims(2, 4 * c.WINDOW), FLAT).index(buffer)
    async_load(into, factors + (b * c.HV + hv) * (4 * c.WINDOW) + i)


@gluon.jit
def _position(base, j, c: gl.constexpr):
    """Ring position of record j, counted from the oldest."""
    p = base + j
    return gl.where(p >= c.R, p - c.R, p)


@gluon.jit
def _fetch_keys(past, records, strides, row, tile, c: gl.constexpr):
    """Raw keys of the committed records, and their norms."""
    _, hv, _ = _place(tile, c)
    h = hv // c.GROUP
    WIDE: gl.constexpr = c.lines(c.K, records.k.dtype.element_ty.primitive_bitwidth // 8)
    j = gl.arange(0, c.HISTORY, layout=gl.SliceLayout(1, WIDE))
    k = gl.arange(0, c.K, layout=gl.SliceLayout(0, WIDE))
    p = h * c.R + _position(_field(row, BASE), j, c)
    p_k = records.k + (row >> SLOT) * strides.k + (p[:, None] * c.K + k[None, :])
    async_load(past.raw_k, p_k, mask=(j < _field(row, COUNT))[:, None])
    j = gl.arange(0, c.HISTORY, layout=gl.BlockedLayout([1], [32], [c.WARPS], [0]))
    p = h * c.R + _position(_field(row, BASE), j, c)
    async_load(past.rnorm, records.rnorm + (row >> SLOT) * strides.rnorm + p, mask=j < _field(row, COUNT))


@gluon.jit
def _fetch_updates(past, records, strides, row, tile, c: gl.constexpr):
    """The c and the decay of the committed records."""
    _, hv, first = _place(tile, c)
    NARROW: gl.constexpr = c.lines(c.BV, records.c.dtype.element_ty.primitive_bitwidth // 8)
    j = gl.arange(0, c.HISTORY, layout=gl.SliceLayout(1, NARROW))
    v = gl.arange(0, c.BV, layout=gl.SliceLayout(0, NARROW))
    p = hv * c.R + _position(_field(row, BASE), j, c)
    p_c = records.c + (row >> SLOT) * strides.c + (first + (p[:, None] * c.V + v[None, :]))
    into = view(past.c, dims(c.HISTORY, c.BV), PLAIN)
    async_load(into, p_c, mask=(j < _field(row, COUNT))[:, None])
    j = gl.arange(0, c.HISTORY, layout=gl.BlockedLayout([1], [32], [c.WARPS], [0]))
    p = hv * c.R + _position(_field(row, BASE), j, c)
    into = view(past.decay, dims(c.HISTORY), FLAT)
    async_load(into, records.decay + (row >> SLOT) * strides.decay + p, mask=j < _field(row, COUNT))


@gluon.jit
def _keep(memory, x, ROWS: gl.constexpr, c: gl.constexpr):
    """Store [ROWS, K] in chunks."""
    APART: gl.constexpr = c.APART
    shape: gl.constexpr = [ROWS * (c.K // c.CHUNK), c.CHUNK]
    view(memory, shape, APART).store(gl.reshape(x, shape))


@gluon.jit
def _kept(memory, i, c: gl.constexpr):
    """Row i of what _keep stored, [1, K]."""
    return gl.convert_layout(gl.reshape(memory.index(i).load(c.PIECES), [1, c.K]), c.TILE)


@gluon.jit
def _normalise(s, past, buffer, c: gl.constexpr):
    """Raw keys and queries -> the fp32 ones that are multiplied, once per tile."""
    EACH: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [c.WARPS, 1], [1, 0])
    WINDOW: gl.constexpr = c.WINDOW
    HISTORY: gl.constexpr = c.HISTORY
    rows = view(s.factors, dims(8, c.WINDOW), FLAT)
    k = s.raw_k.load(EACH).to(gl.float32) * rows.index(4 * buffer).load(gl.SliceLayout(1, EACH))[:, None]
    q = s.raw_q.load(EACH).to(gl.float32) * rows.index(4 * buffer + 1).load(gl.SliceLayout(1, EACH))[:, None]
    _keep(s.k, k, WINDOW, c)
    _keep(s.q, q * c.SCALE, WINDOW, c)
    if c.HISTORY:
        k = past.raw_k.load(EACH).to(gl.float32) * past.rnorm.load(gl.SliceLayout(1, EACH))[:, None]
        _keep(past.k, k, HISTORY, c)


@gluon.jit
def _scalar(memory, i, c: gl.constexpr):
    """One number of shared memory, as [1, 1]."""
    return memory.index(i).load(gl.SliceLayout(1, c.TILE))[:, None]


@gluon.jit
def _rounded(h, DTYPE: gl.constexpr):
    """h as stored and loaded again. Two at a time for bf16: the conversion of one runs at a sixteenth of the rate."""
    if gl.bfloat16 == DTYPE:
        return gl.inline_asm_elementwise(
            "{.reg .b32 p; cvt.rn.bf16x2.f32 p, $3, $2; shl.b32 $0, p, 16; and.b32 $1, p, 0xffff0000;}",
            "=r,=r,r,r",
            [h],
            dtype=gl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return h.to(DTYPE).to(gl.float32)


@gluon.jit
def _apply(h, past, j, c: gl.constexpr):
    """One record. The fma is the one that the token loop's update is: a contracted h * decay + c k^T is another."""
    k = _kept(past.k, j, c)
    u = past.c.index(j).load(gl.SliceLayout(1, c.TILE)).to(gl.float32)
    return gl.fma(u[:, None], k, h * _scalar(past.decay, j, c))


@gluon.jit
def _replay(h, past, count, ends, DTYPE: gl.constexpr, c: gl.constexpr):
    """Apply the committed records, rounding where native did: behind every accepted step."""
    if c.ENDS:
        j = 0
        while j < count:
            stop = j + 1
            while (stop < count) & (((ends >> (stop - 1)) & 1) == 0):
                stop += 1
            for i in range(j, stop):
                h = _apply(h, past, i, c)
            j = stop
            if ((ends >> (stop - 1)) & 1) != 0:
                h = _rounded(h, DTYPE)
    else:
        for j in range(count):
            h = _apply(h, past, j, c)
    return h


@gluon.jit
def _token(h, s, t, buffer, first, c: gl.constexpr):
    """The state after token t, its c and its output."""
    k = _kept(s.k, t, c)
    v = s.v.index(buffer * c.WINDOW + t).load(c.spread(c.TURNS)).to(gl.float32)
    at = (buffer * 4 + 2) * c.WINDOW + t
    h = h * _scalar(s.factors, at, c)
    u = (v - dot(h, k, first, True, c)) * s.factors.index(at + c.WINDOW).load(c.spread(c.TURNS))
    q = _kept(s.q, t, c)
    h = gl.fma(rows_of_tile(u, c), k, h)
    return h, u, dot(h, q, first, False, c)


@gluon.jit
def verify_window(
    state,
    state_stride,
    records,
    record_strides,
    x,
    strides,
    prepared,
    snapshots,
    out,
    num_tiles,
    c: gl.constexpr,
):
    """Grid: any number of programs. Reads state, tokens and committed records; writes ``out``, and as the shape says
    the flushed state, snapshots, or c of the window's records. A tile is loaded before any of it is stored."""
    DTYPE: gl.constexpr = state.dtype.element_ty
    TILE: gl.constexpr = c.TILE
    LINES: gl.constexpr = c.lines(c.K, 16 // c.CHUNK)
    s = _allocate(state, x, c)
    past = s
    if c.HISTORY:
        past = _allocate_past(records, c)
    v = gl.arange(0, c.BV, layout=c.spread(c.TURNS))
    tile = gl.program_id(0)
    step = gl.num_programs(0)
    row, ends = _row(prepared.rows, tile, num_tiles, c)
    _fetch_row(s, prepared.rows, tile + step, num_tiles, c)
    if _field(row, LEN) > 0:
        _, hv, first = _place(tile, c)
        async_load(s.state, _state_at(state, state_stride, row >> SLOT, hv, first, LINES, c))
        _fetch_window(s, 0, x, strides, prepared.factors, row, tile, c)
        if c.HISTORY:
            _fetch_keys(past, records, record_strides, row, tile, c)
            _fetch_updates(past, records, record_strides, row, tile, c)
    async_copy.commit_group()
    buffer = 0
    while tile < num_tiles:
        async_copy.wait_group(0)
        h = s.state.load(TILE).to(gl.float32)
        _normalise(s, past, buffer, c)
        next_row, next_ends = _fetched_row(s, tile + step, num_tiles, c)
        _fetch_row(s, prepared.rows, tile + 2 * step, num_tiles, c)
        if _field(next_row, LEN) > 0:
            _, hv, first = _place(tile + step, c)
            async_load(s.state, _state_at(state, state_stride, next_row >> SLOT, hv, first, LINES, c))
            _fetch_window(s, 1 - buffer, x, strides, prepared.factors, next_row, tile + step, c)
            if c.HISTORY:
                _fetch_keys(past, records, record_strides, next_row, tile + step, c)
        b, hv, first = _place(tile, c)
        count = _field(row, COUNT)
        if c.HISTORY:
            barrier()
            h = _replay(h, past, count, ends, DTYPE, c)
            if _field(next_row, LEN) > 0:
                _fetch_updates(past, records, record_strides, next_row, tile + step, c)
            if (_field(row, FLUSH) & 1) != 0:
                h = _rounded(h, DTYPE)
                gl.store(_state_at(state, state_stride, row >> SLOT, hv, first, TILE, c), h.to(DTYPE))
        async_copy.commit_group()
        barrier()  # here, so that none is needed for each token
        p_out = out + (b * (c.T * c.HV * c.V) + hv * c.V + first) + v
        for t in range(_field(row, LEN)):
            h, u, o = _token(h, s, t, buffer, first, c)
            gl.store(p_out + t * (c.HV * c.V), o.to(out.dtype.element_ty))
            if c.SNAPSHOTS:
                to = gl.load(snapshots + b * c.T + t)
                if to > 0:
                    gl.store(_state_at(state, state_stride, to, hv, first, TILE, c), h.to(DTYPE))
            elif c.R > 0:
                p = hv * c.R + _position(_field(row, BASE), count + t, c)
                p_c = records.c + (row >> SLOT) * record_strides.c + (p * c.V + first) + v
                gl.store(p_c, u.to(records.c.dtype.element_ty))
        for t in range(_field(row, LEN), c.T):
            gl.store(p_out + t * (c.HV * c.V), gl.full([c.BV], 0, out.dtype.element_ty, v.type.layout))
        buffer = 1 - buffer
        tile += step
        row, ends = next_row, next_ends
