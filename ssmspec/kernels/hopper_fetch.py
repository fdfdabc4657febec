"""What the window kernel keeps in shared memory, and the asynchronous loads that bring a tile's share of it."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ssmspec.kernels.hopper_tile import async_load, dims, view

# where fast_rows.pack puts the numbers of a batch row: 6 bits each, the flush's one, the slot's 20, and the state's row above
LEN, BASE, COUNT, FLUSH, SLOT, ROW = (gl.constexpr(i) for i in (0, 6, 12, 18, 19, 39))
MAX_SLOTS, MAX_ROWS = 2**20, 2**24
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


class Prepared(NamedTuple):
    """What was computed once for all tiles: by ``prepare_window`` for GDN, by ``prepare.prepare`` for the others."""

    rows: Any  # [B, 2] int64: packed numbers, and the ends of accepted steps from the oldest record on
    factors: Any  # [B, HV, 4, WINDOW] fp32: 1/norm of k, 1/norm of q, decay, beta (Mamba2: dt)
    decays: Any = None  # [B, T, HV, K] fp32, for KDA instead of the factor


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
    decays: Any  # for KDA: two buffers of [WINDOW, K] fp32, in chunks


class Past(NamedTuple):
    """Shared memory for committed records."""

    raw_k: Any  # [HISTORY, K]
    rnorm: Any  # [HISTORY]
    k: Any  # [HISTORY, K] fp32, in chunks
    c: Any  # [HISTORY, BV], for Mamba2 x
    decay: Any  # [HISTORY]; KDA [HISTORY, K] fp32, in chunks
    dt: Any  # [HISTORY], for Mamba2


@gluon.jit
def updates_of(records, c: gl.constexpr):
    """The field, or its stride, that a window's tokens leave per row of V."""
    return records.x if c.MAMBA else records.c


@gluon.jit
def allocate(state, x, c: gl.constexpr):
    ACT: gl.constexpr = x.k.dtype.element_ty
    STATE: gl.constexpr = gl.SwizzledSharedLayout(c.CHUNK, 1, 8, [1, 0])
    rows = gl.allocate_shared_memory(gl.int64, [2, 1], FLAT)
    decays = rows
    if c.CHANNELS:
        decays = gl.allocate_shared_memory(gl.float32, [2 * c.WINDOW, c.CHUNKS, c.CHUNK], c.APART)
    return Shared(
        rows,
        gl.allocate_shared_memory(state.dtype.element_ty, [c.BV, c.K], STATE),
        gl.allocate_shared_memory(ACT, [c.WINDOW, c.K], PLAIN),
        gl.allocate_shared_memory(ACT, [c.WINDOW, c.K], PLAIN),
        gl.allocate_shared_memory(gl.float32, [c.WINDOW, c.CHUNKS, c.CHUNK], c.APART),
        gl.allocate_shared_memory(gl.float32, [c.WINDOW, c.CHUNKS, c.CHUNK], c.APART),
        gl.allocate_shared_memory(ACT, [2 * c.WINDOW, c.BV], FLAT),
        gl.allocate_shared_memory(gl.float32, [8 * c.WINDOW, 1], FLAT),
        decays,
    )


@gluon.jit
def allocate_past(records, c: gl.constexpr):
    if c.CHANNELS:
        decay = gl.allocate_shared_memory(gl.float32, [c.HISTORY, c.CHUNKS, c.CHUNK], c.APART)
    else:
        decay = gl.allocate_shared_memory(gl.float32, [c.HISTORY, 1], FLAT)
    dt = decay
    if c.MAMBA:
        dt = gl.allocate_shared_memory(gl.float32, [c.HISTORY, 1], FLAT)
    return Past(
        gl.allocate_shared_memory(records.k.dtype.element_ty, [c.HISTORY, c.K], PLAIN),
        gl.allocate_shared_memory(gl.float32, [c.HISTORY], FLAT),
        gl.allocate_shared_memory(gl.float32, [c.HISTORY, c.CHUNKS, c.CHUNK], c.APART),
        gl.allocate_shared_memory(updates_of(records, c).dtype.element_ty, [c.HISTORY, c.BV], FLAT),
        decay,
        dt,
    )


@gluon.jit
def field(row, AT: gl.constexpr):
    return ((row >> AT) & 63).to(gl.int32)


@gluon.jit
def slot_of(row):
    return (row >> SLOT) & 0xFFFFF


@gluon.jit
def nth(i, c: gl.constexpr):
    """A program's i-th tile: SHARED neighbours, then those further on."""
    turn = gl.program_id(0) + (i // c.SHARED) * gl.num_programs(0)
    return turn * c.SHARED + i % c.SHARED


@gluon.jit
def place(tile, c: gl.constexpr):
    """Batch row, value head and first V row of a tile."""
    at = tile.to(gl.uint32)
    return (
        (at // (c.HV * c.BLOCKS)).to(gl.int32),
        ((at // c.BLOCKS) % c.HV).to(gl.int32),
        ((at % c.BLOCKS) * c.BV).to(gl.int32),
    )


@gluon.jit
def read_row(rows, tile, num_tiles, c: gl.constexpr):
    """The packed numbers and step ends of a tile's batch row; behind the last tile a null row."""
    b, _, _ = place(gl.minimum(tile, num_tiles - 1), c)
    return gl.load(rows + 2 * b) * (tile < num_tiles).to(gl.int64), gl.load(rows + 2 * b + 1)


@gluon.jit
def fetch_row(s, rows, tile, num_tiles, c: gl.constexpr):
    b, _, _ = place(gl.minimum(tile, num_tiles - 1), c)
    i = gl.arange(0, 2, layout=gl.BlockedLayout([2], [32], [c.WARPS], [0]))
    async_load(view(s.rows, dims(2), FLAT), rows + 2 * b + i)


@gluon.jit
def fetched_row(s, tile, num_tiles, c: gl.constexpr):
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [c.WARPS], [0])
    row = gl.max(s.rows.index(0).load(ONE), 0) * (tile < num_tiles).to(gl.int64)
    ends = row
    if c.ENDS:
        ends = gl.max(s.rows.index(1).load(ONE), 0)
    return row, ends


@gluon.jit
def state_at(state, stride, row_of_state, hv, first, LAYOUT: gl.constexpr, c: gl.constexpr):
    """Pointers [BV, K] to a tile."""
    v = gl.arange(0, c.BV, layout=gl.SliceLayout(1, LAYOUT))
    k = gl.arange(0, c.K, layout=gl.SliceLayout(0, LAYOUT))
    return state + row_of_state * stride + ((hv * c.V + first) * c.K + v[:, None] * c.K + k[None, :])


@gluon.jit
def _fetch_channels(into, vectors, token, step, live, ROWS: gl.constexpr, c: gl.constexpr):
    """Row token [ROWS * CHUNKS] of vectors [., K] that lie ``step`` apart, into [ROWS * CHUNKS, CHUNK]."""
    L: gl.constexpr = c.lines(c.CHUNK, 4)
    chunk = gl.arange(0, ROWS * c.CHUNKS, layout=gl.SliceLayout(1, L)) % c.CHUNKS
    k = gl.arange(0, c.CHUNK, layout=gl.SliceLayout(0, L))
    at = token * step + chunk * c.CHUNK
    async_load(into, vectors + (at[:, None] + k[None, :]), mask=live[:, None])


@gluon.jit
def fetch_tokens(s, x, strides, row, tile, c: gl.constexpr):
    """Raw q and k. Rows behind the window's end are not read."""
    b, hv, _ = place(tile, c)
    h = hv // c.GROUP
    WIDE: gl.constexpr = c.lines(c.K, x.k.dtype.element_ty.primitive_bitwidth // 8)
    t = gl.arange(0, c.WINDOW, layout=gl.SliceLayout(1, WIDE))[:, None]
    k = gl.arange(0, c.K, layout=gl.SliceLayout(0, WIDE))[None, :]
    live = t < field(row, LEN)
    async_load(s.raw_k, x.k + (b * strides.k[0] + h * strides.k[2] + (t * strides.k[1] + k)), mask=live)
    async_load(s.raw_q, x.q + (b * strides.q[0] + h * strides.q[2] + (t * strides.q[1] + k)), mask=live)


@gluon.jit
def fetch_window(s, buffer, x, strides, prepared, row, tile, c: gl.constexpr):
    """v, norms and gates. Rows behind the window's end are not read."""
    b, hv, first = place(tile, c)
    NARROW: gl.constexpr = c.lines(c.BV, x.v.dtype.element_ty.primitive_bitwidth // 8)
    t = gl.arange(0, c.WINDOW, layout=gl.SliceLayout(1, NARROW))[:, None]
    v = gl.arange(0, c.BV, layout=gl.SliceLayout(0, NARROW))[None, :]
    values = view(s.v, dims(2, c.WINDOW, c.BV), PLAIN).index(buffer)
    p_v = x.v + (b * strides.v[0] + hv * strides.v[2] + first + (t * strides.v[1] + v))
    async_load(values, p_v, mask=t < field(row, LEN))
    i = gl.arange(0, 4 * c.WINDOW, layout=gl.BlockedLayout([1], [32], [c.WARPS], [0]))
    into = view(s.factors, dims(2, 4 * c.WINDOW), FLAT).index(buffer)
    async_load(into, prepared.factors + (b * c.HV + hv) * (4 * c.WINDOW) + i)
    if c.CHANNELS:
        WINDOW: gl.constexpr = c.WINDOW
        APART: gl.constexpr = c.APART
        into = view(s.decays, dims(2, c.WINDOW * c.CHUNKS, c.CHUNK), APART).index(buffer)
        t = gl.arange(0, c.WINDOW * c.CHUNKS, layout=gl.SliceLayout(1, c.lines(c.CHUNK, 4))) // c.CHUNKS
        vectors = prepared.decays + (b * (c.T * c.HV) + hv).to(gl.int64) * c.K
        _fetch_channels(into, vectors, t, c.HV * c.K, t < field(row, LEN), WINDOW, c)


@gluon.jit
def position(base, j, c: gl.constexpr):
    """Ring position of record j, counted from the oldest."""
    p = base + j
    return gl.where(p >= c.R, p - c.R, p)


@gluon.jit
def fetch_keys(past, records, strides, row, tile, c: gl.constexpr):
    """Raw keys of the committed records, and their norms."""
    _, hv, _ = place(tile, c)
    h = hv // c.GROUP
    WIDE: gl.constexpr = c.lines(c.K, records.k.dtype.element_ty.primitive_bitwidth // 8)
    j = gl.arange(0, c.HISTORY, layout=gl.SliceLayout(1, WIDE))
    k = gl.arange(0, c.K, layout=gl.SliceLayout(0, WIDE))
    p = h * c.R + position(field(row, BASE), j, c)
    p_k = records.k + slot_of(row) * strides.k + (p[:, None] * c.K + k[None, :])
    async_load(past.raw_k, p_k, mask=(j < field(row, COUNT))[:, None])
    if not c.MAMBA:
        j = gl.arange(0, c.HISTORY, layout=gl.BlockedLayout([1], [32], [c.WARPS], [0]))
        p = h * c.R + position(field(row, BASE), j, c)
        async_load(past.rnorm, records.rnorm + slot_of(row) * strides.rnorm + p, mask=j < field(row, COUNT))


@gluon.jit
def _fetch_numbers(into, numbers, row, hv, c: gl.constexpr):
    """One number of each committed record of a head."""
    j = gl.arange(0, c.HISTORY, layout=gl.BlockedLayout([1], [32], [c.WARPS], [0]))
    p = hv * c.R + position(field(row, BASE), j, c)
    async_load(view(into, dims(c.HISTORY), FLAT), numbers + p, mask=j < field(row, COUNT))


@gluon.jit
def fetch_updates(past, records, strides, row, tile, c: gl.constexpr):
    """The c (or x and dt) and the decay of the committed records."""
    _, hv, first = place(tile, c)
    updates = updates_of(records, c)
    NARROW: gl.constexpr = c.lines(c.BV, updates.dtype.element_ty.primitive_bitwidth // 8)
    j = gl.arange(0, c.HISTORY, layout=gl.SliceLayout(1, NARROW))
    v = gl.arange(0, c.BV, layout=gl.SliceLayout(0, NARROW))
    p = hv * c.R + position(field(row, BASE), j, c)
    p_c = updates + slot_of(row) * updates_of(strides, c) + (first + (p[:, None] * c.V + v[None, :]))
    into = view(past.c, dims(c.HISTORY, c.BV), PLAIN)
    async_load(into, p_c, mask=(j < field(row, COUNT))[:, None])
    decays = records.decay + slot_of(row) * strides.decay
    if c.CHANNELS:
        HISTORY: gl.constexpr = c.HISTORY
        APART: gl.constexpr = c.APART
        into = view(past.decay, dims(c.HISTORY * c.CHUNKS, c.CHUNK), APART)
        j = gl.arange(0, c.HISTORY * c.CHUNKS, layout=gl.SliceLayout(1, c.lines(c.CHUNK, 4))) // c.CHUNKS
        p = hv * c.R + position(field(row, BASE), j, c)
        _fetch_channels(into, decays, p, c.K, j < field(row, COUNT), HISTORY, c)
    else:
        _fetch_numbers(past.decay, decays, row, hv, c)
    if c.MAMBA:
        _fetch_numbers(past.dt, records.dt + slot_of(row) * strides.dt, row, hv, c)
