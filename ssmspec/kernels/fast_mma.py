"""Fast mode's window in Gluon: persistent, the next state tile on its way while this one is multiplied.

The same arithmetic as ``fast_dot.window``. A warp owns 16 rows of a tile, and every operand is loaded in the
fragment that the tensor core wants, so only the state passes through shared memory. Sums over K are taken in
pieces and added in fp32, because a tensor core cuts off what does not fit where it should round.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from ssmspec.kernels.hopper_tile import async_load


class Call(NamedTuple):
    """Arguments of the kernel."""

    state: Any
    slot: Any  # elements of state per slot
    w: Any  # Couplings
    x: Any
    x_step: Any
    out: Any  # [B, T, HV, V]
    rec: Any
    rec_step: Any
    tiles: Any


class Shared(NamedTuple):
    """Shared memory: two of each, one of which is filled while the other is used, and a ring of cursors."""

    states: Any  # [BV, KP]
    probes: Any  # [NC, KP]
    updates: Any  # [HP, BV]
    keys: Any  # [HP, KP], of rows that will be folded
    cursors: Any  # [1]


CURSORS = gl.constexpr(4)


@gluon.jit
def tf32_parts(x):
    """x fp32 -> (its nearest tf32, the nearest tf32 of the rest); the cores ignore the low bits of the latter."""
    bits = (x.to(gl.int32, bitcast=True) + 0x1000) & -0x2000
    high = bits.to(gl.float32, bitcast=True)
    rest = (x - high).to(gl.int32, bitcast=True) + 0x1000
    return high, rest.to(gl.float32, bitcast=True)


@gluon.jit
def product(x, y, acc):
    """acc + x [M, K] y [K, N] at fp32 grade; 16-bit values are exact in tf32."""
    low = gl.zeros_like(acc)
    if x.dtype == y.dtype and x.dtype != gl.float32:
        z = mma_v2(x, y, acc)
    elif x.dtype != gl.float32 and y.dtype != gl.float32:
        z = mma_v2(x.to(gl.float32), y.to(gl.float32), acc, input_precision="tf32")
    elif y.dtype != gl.float32:
        high, rest = tf32_parts(x)
        wide = y.to(gl.float32)
        z = mma_v2(high, wide, acc, input_precision="tf32") + mma_v2(rest, wide, low, input_precision="tf32")
    elif x.dtype != gl.float32:
        high, rest = tf32_parts(y)
        wide = x.to(gl.float32)
        z = mma_v2(wide, high, acc, input_precision="tf32") + mma_v2(wide, rest, low, input_precision="tf32")
    else:
        high, rest = tf32_parts(x)
        y_high, y_rest = tf32_parts(y)
        low = mma_v2(high, y_rest, mma_v2(rest, y_high, low, input_precision="tf32"), input_precision="tf32")
        z = mma_v2(high, y_high, acc, input_precision="tf32") + low
    return z


@gluon.jit
def _beside(x, y):
    """[M, N] twice -> [M, 2N]."""
    return gl.reshape(gl.permute(gl.join(x, y), (0, 2, 1)), [x.shape[0], 2 * x.shape[1]])


@gluon.jit
def _above(x, y):
    """[M, N] twice -> [2M, N]."""
    return gl.reshape(gl.permute(gl.join(x, y), (2, 0, 1)), [2 * x.shape[0], x.shape[1]])


@gluon.jit
def _place(tile, a, c: gl.constexpr):
    """Batch row, value head and first row of V of a tile; behind the last tile those of the last."""
    at = gl.minimum(tile, a.tiles - 1).to(gl.uint32)
    row = (at // (c.HV * c.BLOCKS)).to(gl.int32)
    return row, ((at // c.BLOCKS) % c.HV).to(gl.int32), ((at % c.BLOCKS) * c.BV).to(gl.int32)


@gluon.jit
def _fetch_cursor(shared, i, tile, a, c: gl.constexpr):
    """Start copying a tile's cursor; through a register the whole warp would wait for it."""
    row, _, _ = _place(tile, a, c)
    one = gl.arange(0, 1, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    async_load(shared.cursors.index(i % CURSORS), a.w.cursors + row + one)


@gluon.jit
def _cursor(shared, i):
    one = shared.cursors.index(i % CURSORS).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    return gl.max(one, 0)


@gluon.jit
def _unpack(cursor):
    """(slot, tokens, first record, records, flush) as fast_couplings.pack has them."""
    low = cursor.to(gl.int32)
    return cursor >> 24, low & 63, (low >> 6) & 63, (low >> 12) & 63, (low >> 18) & 1


@gluon.jit
def _ring(position, c: gl.constexpr):
    """position in 0 .. 2R - 1."""
    return gl.where(position >= c.R, position - c.R, position)


@gluon.jit
def _state_at(a, slot, head, v, k, c: gl.constexpr):
    return a.state + slot * a.slot + (head * (c.V * c.K) + v[:, None] * c.K + k[None, :])


@gluon.jit
def _updates_at(a, slot, head, c: gl.constexpr):
    """The records of c, or x for Mamba2, [R, V]."""
    updates = a.rec.x if c.MAMBA else a.rec.c
    return updates + slot * (a.rec_step.x if c.MAMBA else a.rec_step.c) + head * (c.R * c.V)


@gluon.jit
def _vectors_at(a, row, head, c: gl.constexpr):
    return a.w.vectors + (row * c.HV + head) * (c.VECTORS * c.K)


@gluon.jit
def _fetch_keys(keys, cursor, tile, a, c: gl.constexpr):
    """Start copying the keys of the records."""
    slot, _, first, records, _ = _unpack(cursor)
    row, head, _ = _place(tile, a, c)
    L: gl.constexpr = c.lines(c.KP, keys.dtype.primitive_bitwidth, gl.num_warps())
    record = gl.arange(0, c.HP, layout=gl.SliceLayout(1, L))
    k = gl.arange(0, c.KP, layout=gl.SliceLayout(0, L))
    if c.CHANNELS:
        of_key = _vectors_at(a, row, head, c) + (c.NC + record)[:, None] * c.K + k[None, :]
    else:
        of_key = a.rec.k + slot * a.rec_step.k + (head // c.GROUP) * (c.R * c.K)
        of_key = of_key + _ring(first + record, c)[:, None] * c.K + k[None, :]
    async_load(keys, of_key, mask=(record < records)[:, None] & (k < c.K)[None, :])


@gluon.jit
def _fetch(shared, i, cursor, tile, a, c: gl.constexpr):
    """Start copying a state tile, its probes and old updates into shared memory; zeros for what lies outside."""
    slot, n, first, records, flush = _unpack(cursor)
    row, head, tile_v = _place(tile, a, c)
    L: gl.constexpr = c.lines(c.KP, a.state.dtype.element_ty.primitive_bitwidth, gl.num_warps())
    v = tile_v + gl.arange(0, c.BV, layout=gl.SliceLayout(1, L))
    k = gl.arange(0, c.KP, layout=gl.SliceLayout(0, L))
    inside = (v < c.V)[:, None] & (k < c.K)[None, :]
    async_load(shared.states.index(i), _state_at(a, slot, head, v, k, c), mask=inside)
    LP: gl.constexpr = c.lines(c.KP, shared.probes.dtype.primitive_bitwidth, gl.num_warps())
    column = gl.arange(0, c.NC, layout=gl.SliceLayout(1, LP))
    k = gl.arange(0, c.KP, layout=gl.SliceLayout(0, LP))
    of = column // c.PROBES
    if c.CHANNELS:
        of_p = _vectors_at(a, row, head, c) + column * c.K
    else:
        h = head // c.GROUP
        of_p = a.x.q + row * a.x_step.q[0] + (of * a.x_step.q[1] + h * a.x_step.q[2])
        if not c.MAMBA:
            of_k = a.x.k + row * a.x_step.k[0] + (of * a.x_step.k[1] + h * a.x_step.k[2])
            of_p = gl.where(column % 2 == 1, of_p, of_k)
    async_load(shared.probes.index(i), of_p[:, None] + k[None, :], mask=(of < n)[:, None] & (k < c.K)[None, :])
    if c.HP > 0:
        of_c = _updates_at(a, slot, head, c)
        LC: gl.constexpr = c.lines(c.BV, of_c.dtype.element_ty.primitive_bitwidth, gl.num_warps())
        record = gl.arange(0, c.HP, layout=gl.SliceLayout(1, LC))
        v = tile_v + gl.arange(0, c.BV, layout=gl.SliceLayout(0, LC))
        held = (record < records)[:, None] & (v < c.V)[None, :]
        async_load(shared.updates.index(i), of_c + _ring(first + record, c)[:, None] * c.V + v[None, :], mask=held)
        if flush != 0:
            _fetch_keys(shared.keys.index(i), cursor, tile, a, c)


@gluon.jit
def _load(cursor, tile, a, M: gl.constexpr, c: gl.constexpr):
    """What a tile needs besides, in the fragments that use it: scale, past, solve and the values v (or x)."""
    _, n, _, _, _ = _unpack(cursor)
    row, head, tile_v = _place(tile, a, c)
    of_w = a.w.heads + (row * c.HV + head) * c.COEFFICIENTS
    scale = gl.load(of_w + c.SCALE + gl.arange(0, c.NC, layout=gl.SliceLayout(0, M)))
    past = scale
    weight = scale
    total = 0.0
    LW: gl.constexpr = gl.DotOperandLayout(1, M, 4)
    column = gl.arange(0, c.NC, layout=gl.SliceLayout(0, LW))
    if c.HP > 0:
        record = gl.arange(0, c.HP, layout=gl.SliceLayout(1, LW))
        past = gl.load(of_w + column[None, :] * c.HP + record[:, None])
        record = gl.arange(0, c.HP, layout=gl.SliceLayout(0, gl.DotOperandLayout(0, M, 4)))
        weight = gl.load(of_w + c.FOLD + record)
        total = gl.load(of_w + c.TOTAL)
    if c.MAMBA:
        WIDE: gl.constexpr = max(16, c.TP)
        token = gl.arange(0, WIDE, layout=gl.SliceLayout(1, LW))
        of_solve = of_w + c.SOLVE + column[None, :] * c.TP + token[:, None]
        solve = gl.load(of_solve, mask=(token < c.TP)[:, None], other=0.0)
        LV: gl.constexpr = gl.DotOperandLayout(0, M, 4)
        token = gl.arange(0, WIDE, layout=gl.SliceLayout(0, LV))
    else:
        LZ: gl.constexpr = gl.DotOperandLayout(1, M, 1)
        token = gl.arange(0, c.TP, layout=gl.SliceLayout(1, LZ))
        column = gl.arange(0, c.NC, layout=gl.SliceLayout(0, LZ))
        solve = gl.load(of_w + c.SOLVE + column[None, :] * c.TP + token[:, None])
        LV: gl.constexpr = c.tokens()
        token = gl.arange(0, c.TP, layout=gl.SliceLayout(0, LV))
    v = tile_v + gl.arange(0, c.BV, layout=gl.SliceLayout(1, LV))
    of_v = a.x.v + row * a.x_step.v[0] + (token * a.x_step.v[1] + head * a.x_step.v[2])[None, :] + v[:, None]
    value = gl.load(of_v, mask=(token < n)[None, :] & (v < c.V)[:, None], other=0.0)
    return scale, past, solve, value, weight, total


@gluon.jit
def _see(shared, i, loaded, M: gl.constexpr, c: gl.constexpr):
    """What every probe sees of state and records [BV, NC]."""
    scale, past, _, _, _, _ = loaded
    states = shared.states.index(i)
    probes = shared.probes.index(i).permute((1, 0))
    WIDTH: gl.constexpr = 8 if c.wide(states.dtype, probes.dtype) else 4
    PART: gl.constexpr = 8 * WIDTH
    PARTS: gl.constexpr = c.KP // PART
    zeros = gl.full([c.BV, c.NC], 0.0, gl.float32, layout=M)
    y = zeros
    for j in gl.static_range(PARTS):
        s = states.slice(j * PART, PART, 1).load(gl.DotOperandLayout(0, M, WIDTH))
        p = probes.slice(j * PART, PART, 0).load(gl.DotOperandLayout(1, M, WIDTH))
        y = y + product(s, p, zeros)
    y = y * scale[None, :]
    if c.HP > 0:
        old = shared.updates.index(i).permute((1, 0)).load(gl.DotOperandLayout(0, M, 4))
        y = y + product(old.to(gl.float32), past, zeros)
    return y


@gluon.jit
def _solve(y, solve, value, M: gl.constexpr, c: gl.constexpr):
    """What the probes of a delta rule see -> its updates and outputs, [BV, TP] each."""
    seen, answer = gl.split(gl.reshape(y, [c.BV, c.TP, 2]))
    high, rest = tf32_parts(gl.convert_layout(value.to(gl.float32), seen.type.layout) - seen)
    z_high, z_rest = tf32_parts(solve)
    # four products in one: [high rest high rest] times [high high rest rest]
    left = gl.convert_layout(_beside(_beside(high, rest), _beside(high, rest)), gl.DotOperandLayout(0, M, 1))
    z = gl.convert_layout(_above(_above(z_high, z_high), _above(z_rest, z_rest)), gl.DotOperandLayout(1, M, 1))
    solved = mma_v2(left, z, gl.full([c.BV, c.NC], 0.0, gl.float32, layout=M), input_precision="tf32")
    update, extra = gl.split(gl.reshape(solved, [c.BV, c.TP, 2]))
    return update, answer + extra


@gluon.jit
def _store(update, o, cursor, tile, a, c: gl.constexpr):
    """Updates [BV, tokens] behind the records; outputs [BV, tokens], zeros behind the window's end."""
    slot, n, first, records, _ = _unpack(cursor)
    row, head, tile_v = _place(tile, a, c)
    L: gl.constexpr = c.columns(gl.num_warps())
    v = tile_v + gl.arange(0, c.BV, layout=gl.SliceLayout(1, L))
    token = gl.arange(0, o.shape[1], layout=gl.SliceLayout(0, L))
    o = gl.convert_layout(o.to(a.out.dtype.element_ty), L)
    o = gl.where((token < n)[None, :], o, 0.0)
    of_out = a.out + (row * c.T * c.HV + head) * c.V + (token * (c.HV * c.V))[None, :] + v[:, None]
    gl.store(of_out, o, mask=(token < c.T)[None, :] & (v < c.V)[:, None])
    of_c = _updates_at(a, slot, head, c)
    token = gl.arange(0, update.shape[1], layout=gl.SliceLayout(0, L))
    update = gl.convert_layout(update.to(of_c.dtype.element_ty), L)
    of_c = of_c + (_ring(_ring(first + records, c) + token, c) * c.V)[None, :] + v[:, None]
    gl.store(of_c, update, mask=(token < n)[None, :] & (v < c.V)[:, None])


@gluon.jit
def _fold(shared, i, loaded, cursor, tile, a, M: gl.constexpr, c: gl.constexpr):
    """Store the state behind all records, total * S + sum of weight_j c_j k_j^T: summed in fp32, rounded once."""
    slot, _, _, _, _ = _unpack(cursor)
    row, head, tile_v = _place(tile, a, c)
    PART: gl.constexpr = 32
    PARTS: gl.constexpr = c.KP // PART
    states = shared.states.index(i)
    parts = ()
    for j in gl.static_range(PARTS):
        parts = parts + (states.slice(j * PART, PART, 1).load(M),)
    old = shared.updates.index(i).permute((1, 0)).load(gl.DotOperandLayout(0, M, 4)).to(gl.float32)
    old = old * loaded[4][None, :]
    for j in gl.static_range(PARTS):
        keys = shared.keys.index(i).slice(j * PART, PART, 1).load(gl.DotOperandLayout(1, M, 4))
        added = product(old, keys, gl.full([c.BV, PART], 0.0, gl.float32, layout=M))
        if c.CHANNELS:
            k = j * PART + gl.arange(0, PART, layout=gl.SliceLayout(0, M))
            of_total = _vectors_at(a, row, head, c) + (c.NC + c.HP) * c.K
            part = parts[j].to(gl.float32) * gl.load(of_total + k, mask=k < c.K, other=0.0)[None, :] + added
        else:
            part = parts[j].to(gl.float32) * loaded[5] + added
        states.slice(j * PART, PART, 1).store(part.to(states.dtype))
    L: gl.constexpr = c.lines(c.KP, a.state.dtype.element_ty.primitive_bitwidth, gl.num_warps())
    v = tile_v + gl.arange(0, c.BV, layout=gl.SliceLayout(1, L))
    k = gl.arange(0, c.KP, layout=gl.SliceLayout(0, L))
    gl.store(_state_at(a, slot, head, v, k, c), states.load(L), mask=(v < c.V)[:, None] & (k < c.K)[None, :])


@gluon.jit
def _silence(tile, a, c: gl.constexpr):
    """A null row's outputs are zeros."""
    L: gl.constexpr = c.columns(gl.num_warps())
    row, head, tile_v = _place(tile, a, c)
    token = gl.arange(0, c.TP, layout=gl.SliceLayout(0, L))
    v = tile_v + gl.arange(0, c.BV, layout=gl.SliceLayout(1, L))
    of_out = a.out + (row * c.T * c.HV + head) * c.V + (token * (c.HV * c.V))[None, :] + v[:, None]
    zeros = gl.full([c.BV, c.TP], 0.0, a.out.dtype.element_ty, layout=L)
    gl.store(of_out, zeros, mask=(token < c.T)[None, :] & (v < c.V)[:, None])


@gluon.jit
def _answer(shared, i, loaded, cursor, tile, a, M: gl.constexpr, c: gl.constexpr):
    y = _see(shared, i, loaded, M, c)
    if c.MAMBA:
        o = y + product(loaded[3], loaded[2], gl.full([c.BV, c.NC], 0.0, gl.float32, layout=M))
        _store(loaded[3], o, cursor, tile, a, c)
    else:
        update, o = _solve(y, loaded[2], loaded[3], M, c)
        _store(update, o, cursor, tile, a, c)
    if c.HP > 0:
        if (cursor >> 18) & 1 != 0:
            _fold(shared, i, loaded, cursor, tile, a, M, c)


@gluon.jit
def window(a, c: gl.constexpr):
    """Answer the probes, store c (or x) and o, then fold the records if due, for every tile (row, value head, V)."""
    M: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, 8])
    STATE: gl.constexpr = a.state.dtype.element_ty
    PROBE: gl.constexpr = gl.float32 if c.CHANNELS else a.x.k.dtype.element_ty
    UPDATE: gl.constexpr = _updates_at(a, 0, 0, c).dtype.element_ty
    PAST: gl.constexpr = max(c.HP, 16)
    BUFFERS: gl.constexpr = 2
    shared = Shared(
        gl.allocate_shared_memory(STATE, [BUFFERS, c.BV, c.KP], c.swizzled(STATE, PROBE)),
        gl.allocate_shared_memory(PROBE, [BUFFERS, c.NC, c.KP], c.swizzled(STATE, PROBE)),
        gl.allocate_shared_memory(UPDATE, [BUFFERS, PAST, c.BV], gl.SwizzledSharedLayout(8, 4, 4, [1, 0])),
        gl.allocate_shared_memory(PROBE, [BUFFERS, PAST, c.KP], gl.SwizzledSharedLayout(8, 1, 8, [1, 0])),
        gl.allocate_shared_memory(gl.int64, [CURSORS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
    )
    tile = gl.program_id(0)
    step = gl.num_programs(0)
    for i in gl.static_range(3):
        _fetch_cursor(shared, i, tile + i * step, a, c)
    async_copy.commit_group()
    async_copy.wait_group(0)
    cursor = _cursor(shared, 0)
    _fetch(shared, 0, cursor, tile, a, c)
    async_copy.commit_group()
    loaded = _load(cursor, tile, a, M, c)
    i = 0
    while tile < a.tiles:
        next = _cursor(shared, i + 1)
        _fetch(shared, (i + 1) % BUFFERS, next, tile + step, a, c)
        _fetch_cursor(shared, i + 3, tile + 3 * step, a, c)
        async_copy.commit_group()
        upcoming = _load(next, tile + step, a, M, c)
        async_copy.wait_group(1)
        if cursor & 63 != 0:
            _answer(shared, i % BUFFERS, loaded, cursor, tile, a, M, c)
        else:
            _silence(tile, a, c)
        cursor, loaded = next, upcoming
        i += 1
        tile += step
