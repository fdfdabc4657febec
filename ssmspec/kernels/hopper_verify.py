"""A window in one persistent Gluon kernel: replay, flush, verify, then snapshots or records.

A program walks over tiles (batch row, value head, V block). While it computes one, the state, tokens and records of
its next are on their way into shared memory.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ssmspec.kernels.hopper_fetch import (
    BASE,
    COUNT,
    FLAT,
    FLUSH,
    LEN,
    ROW,
    allocate,
    allocate_past,
    fetch_keys,
    fetch_row,
    fetch_tokens,
    fetch_updates,
    fetch_window,
    fetched_row,
    field,
    nth,
    place,
    position,
    read_row,
    slot_of,
    state_at,
    updates_of,
)
from ssmspec.kernels.hopper_tile import async_load, barrier, dims, dot, rows_of_tile, view


@gluon.jit
def _keep(memory, x, ROWS: gl.constexpr, c: gl.constexpr):
    """Store [ROWS, K] in chunks."""
    APART: gl.constexpr = c.APART
    shape: gl.constexpr = [ROWS * c.CHUNKS, c.CHUNK]
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
    k, q = s.raw_k.load(EACH).to(gl.float32), s.raw_q.load(EACH).to(gl.float32)
    if not c.MAMBA:
        k = k * rows.index(4 * buffer).load(gl.SliceLayout(1, EACH))[:, None]
        q = q * rows.index(4 * buffer + 1).load(gl.SliceLayout(1, EACH))[:, None] * c.SCALE
    _keep(s.k, k, WINDOW, c)
    _keep(s.q, q, WINDOW, c)
    if c.HISTORY:
        k = past.raw_k.load(EACH).to(gl.float32)
        if not c.MAMBA:
            k = k * past.rnorm.load(gl.SliceLayout(1, EACH))[:, None]
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
    u = past.c.index(j).load(gl.SliceLayout(1, c.TILE)).to(gl.float32)[:, None]
    if c.MAMBA:
        u = u * _scalar(past.dt, j, c)
    return gl.fma(u, k, h * (_kept(past.decay, j, c) if c.CHANNELS else _scalar(past.decay, j, c)))


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
def _token(h, s, t, buffer, first, skip, c: gl.constexpr):
    """The state after token t, its c (Mamba2: x) and its output."""
    k = _kept(s.k, t, c)
    v = s.v.index(buffer * c.WINDOW + t).load(c.spread(c.TURNS)).to(gl.float32)
    at = (buffer * 4 + 2) * c.WINDOW + t
    beta = s.factors.index(at + c.WINDOW).load(c.spread(c.TURNS))
    h = h * (_kept(s.decays, buffer * c.WINDOW + t, c) if c.CHANNELS else _scalar(s.factors, at, c))
    if c.MAMBA:
        u = v * beta
    else:
        u = (v - dot(h, k, first, c.SWAPS, c)) * beta
    q = _kept(s.q, t, c)
    h = gl.fma(rows_of_tile(u, c), k, h)
    o = dot(h, q, first, False, c)
    if skip is not None:
        o = gl.fma(skip, v, o)
    return h, v if c.MAMBA else u, o


@gluon.jit
def verify_window(
    state,
    state_stride,
    records,
    record_strides,
    x,
    strides,
    prepared,
    D,
    snapshots,
    out,
    num_tiles,
    c: gl.constexpr,
):
    """Grid: any number of programs. Reads state, tokens and committed records; writes ``out``, and as the shape says
    the flushed state, snapshots, or c (x) of the window's records. A tile is loaded before any of it is stored."""
    DTYPE: gl.constexpr = state.dtype.element_ty
    TILE: gl.constexpr = c.TILE
    LINES: gl.constexpr = c.lines(c.K, 16 // c.CHUNK)
    s = allocate(state, x, c)
    past = s
    if c.HISTORY:
        past = allocate_past(records, c)
    v = gl.arange(0, c.BV, layout=c.spread(c.TURNS))
    SHARED: gl.constexpr = c.SHARED
    i = 0
    tile = nth(i, c)
    row, ends = read_row(prepared.rows, tile, num_tiles, c)
    fetch_row(s, prepared.rows, nth(i + 1, c), num_tiles, c)
    if field(row, LEN) > 0:
        _, hv, first = place(tile, c)
        async_load(s.state, state_at(state, state_stride, row >> ROW, hv, first, LINES, c))
        fetch_tokens(s, x, strides, row, tile, c)
        fetch_window(s, 0, x, strides, prepared, row, tile, c)
        if c.HISTORY:
            fetch_keys(past, records, record_strides, row, tile, c)
            fetch_updates(past, records, record_strides, row, tile, c)
    async_copy.commit_group()
    while tile < num_tiles:
        async_copy.wait_group(0)
        h = s.state.load(TILE).to(gl.float32)
        buffer = i % 2
        if i % SHARED == 0:
            _normalise(s, past, buffer, c)
        next_tile = nth(i + 1, c)
        next_row, next_ends = fetched_row(s, next_tile, num_tiles, c)
        fetch_row(s, prepared.rows, nth(i + 2, c), num_tiles, c)
        if field(next_row, LEN) > 0:
            _, hv, first = place(next_tile, c)
            async_load(s.state, state_at(state, state_stride, next_row >> ROW, hv, first, LINES, c))
            if (i + 1) % SHARED == 0:
                fetch_tokens(s, x, strides, next_row, next_tile, c)
                if c.HISTORY:
                    fetch_keys(past, records, record_strides, next_row, next_tile, c)
            fetch_window(s, 1 - buffer, x, strides, prepared, next_row, next_tile, c)
        b, hv, first = place(tile, c)
        skip = None if D is None else gl.load(D + hv)
        count = field(row, COUNT)
        if c.HISTORY:
            barrier()
            h = _replay(h, past, count, ends, DTYPE, c)
            if field(next_row, LEN) > 0:
                fetch_updates(past, records, record_strides, next_row, next_tile, c)
            if (field(row, FLUSH) & 1) != 0:
                h = _rounded(h, DTYPE)
                gl.store(state_at(state, state_stride, row >> ROW, hv, first, TILE, c), h.to(DTYPE))
        async_copy.commit_group()
        barrier()  # here, so that none is needed for each token
        p_out = out + (b * (c.T * c.HV * c.V) + hv * c.V + first) + v
        for t in range(field(row, LEN)):
            h, u, o = _token(h, s, t, buffer, first, skip, c)
            gl.store(p_out + t * (c.HV * c.V), o.to(out.dtype.element_ty))
            if c.SNAPSHOTS:
                to = gl.load(snapshots + b * c.T + t)
                if to > 0:
                    gl.store(state_at(state, state_stride, to, hv, first, TILE, c), h.to(DTYPE))
            elif c.R > 0:
                p = hv * c.R + position(field(row, BASE), count + t, c)
                p_c = updates_of(records, c) + slot_of(row) * updates_of(record_strides, c)
                p_c = p_c + (p * c.V + first) + v
                gl.store(p_c, u.to(updates_of(records, c).dtype.element_ty))
        for t in range(field(row, LEN), c.T):
            gl.store(p_out + t * (c.HV * c.V), gl.full([c.BV], 0, out.dtype.element_ty, v.type.layout))
        i += 1
        tile = next_tile
        row, ends = next_row, next_ends
