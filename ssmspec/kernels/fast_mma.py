"""Fast mode's window in Gluon: persistent, the next tile on its way while this one is multiplied.

The same arithmetic as ``fast_dot.window``. A warp owns 16 rows of a tile, and every operand is loaded in the
fragment that the tensor core wants. Sums over K are taken in pieces and added in fp32, because a tensor core cuts
off what does not fit where it should round.
"""

# ruff: noqa: RUF005 - Triton unpacks no tuples
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disable-error-code="assignment"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from ssmspec.kernels.fast_norm import gate, load_gate, store_normed
from ssmspec.kernels.fast_store import rounded, side_by_side, silence, store_outputs, store_updates
from ssmspec.kernels.fast_tile import (
    CURSORS,
    Shared,
    cursor_of,
    fetch,
    fetch_cursor,
    flushes,
    load_head,
    load_values,
    nth,
    place,
    share,
    state_at,
    tokens_of,
    updates_at,
    vectors_at,
)


@gluon.jit
def tf32_parts(x):
    """x fp32 -> (its nearest tf32, the rest). The rest has 12 bits, of which the cores ignore the last."""
    bits = (x.to(gl.int32, bitcast=True) + 0x1000) & -0x2000
    high = bits.to(gl.float32, bitcast=True)
    return high, x - high


@gluon.jit
def tf32(x, y, acc):
    return mma_v2(x, y, acc, input_precision="tf32")


@gluon.jit
def product(x, y):
    """x [M, K] y [K, N] at fp32 grade, the small parts first; 16-bit values are exact in tf32."""
    M: gl.constexpr = x.type.layout.parent
    zeros = gl.full([x.shape[0], y.shape[1]], 0.0, gl.float32, layout=M)
    if x.dtype == y.dtype and x.dtype != gl.float32:
        z = mma_v2(x, y, zeros)
    elif x.dtype != gl.float32 and y.dtype != gl.float32:
        z = tf32(x.to(gl.float32), y.to(gl.float32), zeros)
    elif y.dtype != gl.float32:
        high, rest = tf32_parts(x)
        wide = y.to(gl.float32)
        z = tf32(high, wide, tf32(rest, wide, zeros))
    elif x.dtype != gl.float32:
        high, rest = tf32_parts(y)
        wide = x.to(gl.float32)
        z = tf32(wide, high, tf32(wide, rest, zeros))
    else:
        high, rest = tf32_parts(x)
        y_high, y_rest = tf32_parts(y)
        z = tf32(high, y_high, tf32(high, y_rest, tf32(rest, y_high, zeros)))
    return z


@gluon.jit
def bf16_parts(x):
    """x fp32 -> three bf16 whose sum it is."""
    high = (x.to(gl.int32, bitcast=True) & -0x10000).to(gl.float32, bitcast=True)
    rest = x - high
    middle = (rest.to(gl.int32, bitcast=True) & -0x10000).to(gl.float32, bitcast=True)
    return high.to(gl.bfloat16), middle.to(gl.bfloat16), (rest - middle).to(gl.bfloat16)


@gluon.jit
def _beside(x, y):
    """[M, N] twice -> [M, 2N]."""
    return gl.reshape(gl.permute(gl.join(x, y), (0, 2, 1)), [x.shape[0], 2 * x.shape[1]])


@gluon.jit
def above(x, y):
    """[M, N] twice -> [2M, N]."""
    return gl.reshape(gl.permute(gl.join(x, y), (2, 0, 1)), [2 * x.shape[0], x.shape[1]])


@gluon.jit
def _see(shared, i, of_head, M: gl.constexpr, c: gl.constexpr):
    """What every probe sees of state and records [BV, NC]."""
    scale, seen, _, weight, total = of_head
    states = shared.states.index(i % 2)
    probes = shared.probes.index((i // c.BLOCKS) % 2).permute((1, 0))
    WIDE: gl.constexpr = c.wide(states.dtype, probes.dtype)
    WIDTH: gl.constexpr = 2 if WIDE else 4
    PART: gl.constexpr = 64 if WIDE else 32
    PARTS: gl.constexpr = c.KP // PART
    y = gl.full([c.BV, c.NC], 0.0, gl.float32, layout=M)
    for j in gl.static_range(PARTS):
        s = states.slice(j * PART, PART, 1).load(gl.DotOperandLayout(0, M, WIDTH))
        p = probes.slice(j * PART, PART, 0).load(gl.DotOperandLayout(1, M, WIDTH))
        y = y + product(s, p)
    if c.HP > 0:
        old = shared.updates.index(i % 2).permute((1, 0)).load(gl.DotOperandLayout(0, M, 4))
        y = y * total[:, None] + product(old.to(gl.float32) * weight[None, :], seen)
    return y * scale[None, :]


@gluon.jit
def _solve(y, solve, value, M: gl.constexpr, c: gl.constexpr):
    """What the probes of a delta rule see -> its updates and outputs, [BV, TP] each."""
    seen, answer = gl.split(gl.reshape(y, [c.BV, c.TP, 2]))
    high, rest = tf32_parts(gl.convert_layout(value.to(gl.float32), seen.type.layout) - seen)
    z_high, z_rest = tf32_parts(solve)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, M, 1)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, M, 1)
    zeros = gl.full([c.BV, c.NC], 0.0, gl.float32, layout=M)
    left = _beside(high, rest)
    right, low = above(z_high, z_high), above(z_rest, z_rest)
    if c.TP < 8:  # a product has a depth of 16 at least
        both = gl.convert_layout(_beside(left, left), LEFT)
        solved = mma_v2(both, gl.convert_layout(above(right, low), RIGHT), zeros, input_precision="tf32")
    else:
        left = gl.convert_layout(left, LEFT)
        solved = mma_v2(left, gl.convert_layout(right, RIGHT), zeros, input_precision="tf32")
        solved += mma_v2(left, gl.convert_layout(low, RIGHT), zeros, input_precision="tf32")
    update, extra = gl.split(gl.reshape(solved, [c.BV, c.TP, 2]))
    return update, answer + extra


@gluon.jit
def _fold(shared, i, of_head, cursor, tile, a, M: gl.constexpr, c: gl.constexpr):
    """Store the state behind all records, total * S + sum of weight_j c_j k_j^T: summed in fp32, rounded once."""
    row, head, tile_v = place(cursor, tile, a, c)
    states = shared.states.index(i % 2)
    PIECES: gl.constexpr = shared.keys.dtype == gl.bfloat16
    WIDTH: gl.constexpr = 2 if PIECES else 4
    old = shared.updates.index(i % 2).permute((1, 0)).load(gl.DotOperandLayout(0, M, WIDTH)).to(gl.float32)
    old = old * gl.convert_layout(of_head[3], gl.SliceLayout(0, old.type.layout))[None, :]
    keys = shared.keys.index((i // c.BLOCKS) % 2).load(gl.DotOperandLayout(1, M, WIDTH))
    if PIECES:
        high, middle, low = bf16_parts(old)
        added = gl.full([c.BV, c.KP], 0.0, gl.float32, layout=M)
        added = mma_v2(high, keys, mma_v2(middle, keys, mma_v2(low, keys, added)))
    else:
        added = product(old, keys)
    total = of_head[4][:, None]
    if c.CHANNELS:
        k = gl.arange(0, c.KP, layout=gl.SliceLayout(0, M))
        of_total = vectors_at(a, row, head, c) + (c.NC + c.HP) * c.K
        total = gl.load(of_total + k, mask=k < c.K, other=0.0)[None, :]
    states = shared.states.index(i % 2)
    full = states.load(M).to(gl.float32) * total + added
    states.store(full.to(states.dtype))
    L: gl.constexpr = c.lines(c.KP, a.state.dtype.element_ty.primitive_bitwidth, gl.num_warps())
    v = gl.arange(0, c.BV, layout=gl.SliceLayout(1, L))
    k = gl.arange(0, c.KP, layout=gl.SliceLayout(0, L))
    inside = (v < c.V - tile_v)[:, None] & (k < c.K)[None, :]
    gl.store(state_at(a, cursor, head, tile_v, v, k, c), states.load(L), mask=inside)


@gluon.jit
def _answer(shared, i, of_head, value, M: gl.constexpr, c: gl.constexpr):
    """-> updates and outputs, [BV, tokens] each."""
    y = _see(shared, i, of_head, M, c)
    if c.MAMBA:
        update = value
        o = y + product(value, of_head[2])
    else:
        update, o = _solve(y, of_head[2], value, M, c)
    return update, o


@gluon.jit
def window(a, c: gl.constexpr):
    """Answer the probes, store c (or x) and o, then fold the records if due, for every tile (row, value head, V)."""
    M: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, 8]
    )
    STATE: gl.constexpr = a.state.dtype.element_ty
    PROBE: gl.constexpr = gl.float32 if c.CHANNELS else a.x.k.dtype.element_ty
    UPDATE: gl.constexpr = updates_at(a, 0, 0, c).dtype.element_ty
    PAST: gl.constexpr = max(c.HP, 16)
    BUFFERS: gl.constexpr = 2
    shared = Shared(
        gl.allocate_shared_memory(STATE, [BUFFERS, c.BV, c.KP], c.swizzled(STATE, PROBE)),
        gl.allocate_shared_memory(UPDATE, [BUFFERS, PAST, c.BV], gl.SwizzledSharedLayout(8, 4, 4, [1, 0])),
        gl.allocate_shared_memory(PROBE, [BUFFERS, c.NC, c.KP], c.swizzled(STATE, PROBE)),
        gl.allocate_shared_memory(PROBE, [BUFFERS, PAST, c.KP], gl.SwizzledSharedLayout(8, 1, 8, [1, 0])),
        gl.allocate_shared_memory(gl.int64, [CURSORS, 2], gl.SwizzledSharedLayout(1, 1, 1, [0])),
    )
    mine = share(a, c)
    for i in gl.static_range(3):
        fetch_cursor(shared, i, nth(i, mine, c), a, c)
    async_copy.commit_group()
    async_copy.wait_group(0)
    cursor = cursor_of(shared, 0)
    tile = nth(0, mine, c)
    fetch(shared, 0, cursor, tile, a, c)
    async_copy.commit_group()
    L: gl.constexpr = c.columns(gl.num_warps())
    squares = gl.full([c.TP], 0.0, gl.float32, layout=gl.SliceLayout(0, L))
    BLOCKS: gl.constexpr = c.BLOCKS
    waiting = ()
    for _ in gl.static_range(BLOCKS):
        waiting = waiting + (gl.full([c.BV, c.TP], 0.0, gl.float32, layout=L),)
    of_head = load_head(cursor, tile, a, M, c)
    i = 0
    while i < mine[0] * c.BLOCKS:
        if i % c.BLOCKS == 0:
            of_head = load_head(cursor, tile, a, M, c)  # in front of the copies, which take a while to issue
        value = load_values(cursor, tile, a, M, c)
        if c.GATE is not None:
            of_gate = load_gate(cursor, tile, a, c)
        next = cursor_of(shared, i + 1)
        fetch(shared, i + 1, next, nth(i + 1, mine, c), a, c)
        fetch_cursor(shared, i + 3, nth(i + 3, mine, c), a, c)
        async_copy.commit_group()
        async_copy.wait_group(1)
        if tokens_of(cursor) != 0:
            update, o = _answer(shared, i, of_head, value, M, c)
            if c.GATE is not None:
                gates = gate(of_gate, c)
            update, o = side_by_side(update, o, c)
            o = rounded(o, cursor, a, c)
            if c.GATE is not None:
                squares, waiting = store_normed(o, gates, i, squares, waiting, cursor, tile, a, c)
            else:
                store_outputs(o, True, cursor, tile, a, c)
            store_updates(update, cursor, tile, a, c)
            if c.HP > 0:
                if flushes(cursor):
                    _fold(shared, i, of_head, cursor, tile, a, M, c)
        else:
            silence(cursor, tile, a, c)
        cursor = next
        i += 1
        tile = nth(i, mine, c)
