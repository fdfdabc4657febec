"""Fast mode's window in Gluon: persistent, the next state tile on its way while this one is multiplied.

The same arithmetic as ``fast_dot.window``. A warp owns 16 rows of a tile, and every operand is loaded in the
fragment that the tensor core wants, so only the state passes through shared memory. Sums over K are taken in
pieces and added in fp32, because a tensor core cuts off what does not fit where it should round.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from ssmspec.kernels.hopper_tile import async_load


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
def _place(tile, tiles, c: gl.constexpr):
    """Batch row, value head and first row of V of a tile; behind the last tile those of the last."""
    at = gl.minimum(tile, tiles - 1).to(gl.uint32)
    row = (at // (c.HV * c.BLOCKS)).to(gl.int64)
    return row, ((at // c.BLOCKS) % c.HV).to(gl.int32), ((at % c.BLOCKS) * c.BV).to(gl.int32)


@gluon.jit
def _unpack(packed):
    """(slot, tokens, first record, records, flush) as fast_couplings.pack has them."""
    low = packed.to(gl.int32)
    return packed >> 24, low & 63, (low >> 6) & 63, (low >> 12) & 63, (low >> 18) & 1


@gluon.jit
def _ring(position, c: gl.constexpr):
    """position in 0 .. 2R - 1."""
    return gl.where(position >= c.R, position - c.R, position)


@gluon.jit
def _fetch(states, probes, S, s_step, x, x_step, packed, tile, tiles, c: gl.constexpr):
    """Start copying a state tile and its probes into shared memory; what lies outside arrives as zeros."""
    slot, n, _, _, _ = _unpack(packed)
    row, head, first = _place(tile, tiles, c)
    h = head // c.GROUP
    L: gl.constexpr = c.lines(c.KP, S.dtype.element_ty.primitive_bitwidth, gl.num_warps())
    v = first + gl.arange(0, c.BV, layout=gl.SliceLayout(1, L))
    k = gl.arange(0, c.KP, layout=gl.SliceLayout(0, L))
    of_s = S + slot * s_step + (head * c.V * c.K + v[:, None] * c.K + k[None, :])
    async_load(states, of_s, mask=(v < c.V)[:, None] & (k < c.K)[None, :])
    LP: gl.constexpr = c.lines(c.KP, x.k.dtype.element_ty.primitive_bitwidth, gl.num_warps())
    column = gl.arange(0, c.NC, layout=gl.SliceLayout(1, LP))
    k = gl.arange(0, c.KP, layout=gl.SliceLayout(0, LP))
    of = column // c.PROBES
    of_p = x.q + row * x_step.q[0] + (of * x_step.q[1] + h * x_step.q[2])
    if not c.MAMBA:
        of_k = x.k + row * x_step.k[0] + (of * x_step.k[1] + h * x_step.k[2])
        of_p = gl.where(column % 2 == 1, of_p, of_k)
    async_load(probes, of_p[:, None] + k[None, :], mask=(of < n)[:, None] & (k < c.K)[None, :])
    async_copy.commit_group()


@gluon.jit
def _load(W, x, x_step, rec, rec_step, packed, tile, tiles, M: gl.constexpr, c: gl.constexpr):
    """What a tile needs besides: scale, past, solve, old updates and values, in their fragments."""
    slot, n, first, records, _ = _unpack(packed)
    row, head, tile_v = _place(tile, tiles, c)
    of_w = W + (row * c.HV + head) * c.COEFFICIENTS
    scale = gl.load(of_w + c.SCALE + gl.arange(0, c.NC, layout=gl.SliceLayout(0, M)))
    past = scale
    old = scale
    LC: gl.constexpr = gl.DotOperandLayout(0, M, 4)
    LW: gl.constexpr = gl.DotOperandLayout(1, M, 4)
    if c.HP > 0:
        column = gl.arange(0, c.NC, layout=gl.SliceLayout(0, LW))
        record = gl.arange(0, c.HP, layout=gl.SliceLayout(1, LW))
        past = gl.load(of_w + column[None, :] * c.HP + record[:, None])
        updates = rec.x if c.MAMBA else rec.c
        of_c = updates + slot * (rec_step.x if c.MAMBA else rec_step.c) + head * (c.R * c.V)
        v = tile_v + gl.arange(0, c.BV, layout=gl.SliceLayout(1, LC))
        record = gl.arange(0, c.HP, layout=gl.SliceLayout(0, LC))
        held = (record < records)[None, :] & (v < c.V)[:, None]
        old = gl.load(of_c + (_ring(first + record, c) * c.V)[None, :] + v[:, None], mask=held, other=0.0)
    if c.MAMBA:
        WIDE: gl.constexpr = max(16, c.TP)
        token = gl.arange(0, WIDE, layout=gl.SliceLayout(1, LW))
        column = gl.arange(0, c.NC, layout=gl.SliceLayout(0, LW))
        at_solve = of_w + c.SOLVE + column[None, :] * c.TP + token[:, None]
        solve = gl.load(at_solve, mask=(token < c.TP)[:, None], other=0.0)
        token = gl.arange(0, WIDE, layout=gl.SliceLayout(0, LC))
        v = tile_v + gl.arange(0, c.BV, layout=gl.SliceLayout(1, LC))
    else:
        LZ: gl.constexpr = gl.DotOperandLayout(1, M, 1)
        LT: gl.constexpr = c.tokens(gl.num_warps())
        token = gl.arange(0, c.TP, layout=gl.SliceLayout(1, LZ))
        column = gl.arange(0, c.NC, layout=gl.SliceLayout(0, LZ))
        solve = gl.load(of_w + c.SOLVE + column[None, :] * c.TP + token[:, None])
        token = gl.arange(0, c.TP, layout=gl.SliceLayout(0, LT))
        v = tile_v + gl.arange(0, c.BV, layout=gl.SliceLayout(1, LT))
    of_v = x.v + row * x_step.v[0] + (token * x_step.v[1] + head * x_step.v[2])[None, :] + v[:, None]
    value = gl.load(of_v, mask=(token < n)[None, :] & (v < c.V)[:, None], other=0.0)
    return scale, past, old, solve, value


@gluon.jit
def _see(states, probes, loaded, M: gl.constexpr, c: gl.constexpr):
    """What every probe sees of state and records [BV, NC]."""
    scale, past, old, _, _ = loaded
    SAME: gl.constexpr = states.dtype == probes.dtype and states.dtype != gl.float32
    WIDTH: gl.constexpr = 8 if SAME else 4
    PART: gl.constexpr = 8 * WIDTH
    PARTS: gl.constexpr = c.KP // PART
    y = gl.full([c.BV, c.NC], 0.0, gl.float32, layout=M)
    for i in gl.static_range(PARTS):
        s = states.slice(i * PART, PART, 1).load(gl.DotOperandLayout(0, M, WIDTH))
        p = probes.slice(i * PART, PART, 1).permute((1, 0)).load(gl.DotOperandLayout(1, M, WIDTH))
        y = y + product(s, p, gl.full([c.BV, c.NC], 0.0, gl.float32, layout=M))
    y = y * scale[None, :]
    if c.HP > 0:
        y = y + product(old.to(gl.float32), past, gl.full([c.BV, c.NC], 0.0, gl.float32, layout=M))
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
def _store(update, o, out, rec, rec_step, packed, tile, tiles, c: gl.constexpr):
    """Updates [BV, tokens] behind the records, outputs [BV, tokens]; zeros behind the window's end."""
    slot, n, first, records, _ = _unpack(packed)
    row, head, tile_v = _place(tile, tiles, c)
    LO: gl.constexpr = o.type.layout
    token = gl.arange(0, o.shape[1], layout=gl.SliceLayout(0, LO))
    v = tile_v + gl.arange(0, c.BV, layout=gl.SliceLayout(1, LO))
    of_out = out + (row * c.T * c.HV + head) * c.V + (token * (c.HV * c.V))[None, :] + v[:, None]
    o = gl.where((token < n)[None, :], o, 0.0).to(out.dtype.element_ty)
    gl.store(of_out, o, mask=(token < c.T)[None, :] & (v < c.V)[:, None])
    updates = rec.x if c.MAMBA else rec.c
    LU: gl.constexpr = update.type.layout
    token = gl.arange(0, update.shape[1], layout=gl.SliceLayout(0, LU))
    v = tile_v + gl.arange(0, c.BV, layout=gl.SliceLayout(1, LU))
    of_c = updates + slot * (rec_step.x if c.MAMBA else rec_step.c) + head * (c.R * c.V)
    of_c = of_c + (_ring(_ring(first + records, c) + token, c) * c.V)[None, :] + v[:, None]
    gl.store(of_c, update.to(updates.dtype.element_ty), mask=(token < n)[None, :] & (v < c.V)[:, None])


@gluon.jit
def _fold(states, S, s_step, W, rec, rec_step, old, packed, tile, tiles, M: gl.constexpr, c: gl.constexpr):
    """Store the state behind all records, total * S + sum of weight_j c_j k_j^T: summed in fp32, rounded once."""
    slot, _, first, records, _ = _unpack(packed)
    row, head, tile_v = _place(tile, tiles, c)
    LC: gl.constexpr = gl.DotOperandLayout(0, M, 4)
    LK: gl.constexpr = gl.DotOperandLayout(1, M, 4)
    PART: gl.constexpr = 32
    PARTS: gl.constexpr = c.KP // PART
    of_w = W + (row * c.HV + head) * c.COEFFICIENTS
    total = gl.load(of_w + c.TOTAL)
    weight = gl.load(of_w + c.FOLD + gl.arange(0, c.HP, layout=gl.SliceLayout(0, LC)))
    old = old.to(gl.float32) * weight[None, :]
    record = gl.arange(0, c.HP, layout=gl.SliceLayout(1, LK))
    of_key = rec.k + slot * rec_step.k + (head // c.GROUP) * (c.R * c.K) + _ring(first + record, c) * c.K
    v = tile_v + gl.arange(0, c.BV, layout=gl.SliceLayout(1, M))
    for i in gl.static_range(PARTS):
        k = i * PART + gl.arange(0, PART, layout=gl.SliceLayout(0, LK))
        held = (record < records)[:, None] & (k < c.K)[None, :]
        keys = gl.load(of_key[:, None] + k[None, :], mask=held, other=0.0)
        added = product(old, keys, gl.full([c.BV, PART], 0.0, gl.float32, layout=M))
        full = states.slice(i * PART, PART, 1).load(M).to(gl.float32) * total + added
        k = i * PART + gl.arange(0, PART, layout=gl.SliceLayout(0, M))
        of_s = S + slot * s_step + (head * c.V * c.K + v[:, None] * c.K + k[None, :])
        gl.store(of_s, full.to(S.dtype.element_ty), mask=(v < c.V)[:, None] & (k < c.K)[None, :])


@gluon.jit
def _silence(out, tile, tiles, c: gl.constexpr):
    """A null row's outputs are zeros."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, gl.num_warps()], [1, 0])
    row, head, first = _place(tile, tiles, c)
    token = gl.arange(0, c.TP, layout=gl.SliceLayout(1, L))
    v = first + gl.arange(0, c.BV, layout=gl.SliceLayout(0, L))
    of_out = out + (row * c.T * c.HV + head) * c.V + (token * (c.HV * c.V))[:, None] + v[None, :]
    zeros = gl.full([c.TP, c.BV], 0.0, out.dtype.element_ty, layout=L)
    gl.store(of_out, zeros, mask=(token < c.T)[:, None] & (v < c.V)[None, :])


@gluon.jit
def _cursor(cursors, tile, tiles, c: gl.constexpr):
    row, _, _ = _place(tile, tiles, c)
    return gl.load(cursors + row)


@gluon.jit
def window(S, s_step, W, cursors, x, x_step, out, rec, rec_step, tiles, c: gl.constexpr):
    """Answer the probes, store c (or x) and o, then fold the records if due, for every tile (row, value head, V)."""
    M: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, 8])
    STATE: gl.constexpr = S.dtype.element_ty
    ACT: gl.constexpr = x.k.dtype.element_ty
    states = gl.allocate_shared_memory(STATE, [2, c.BV, c.KP], c.swizzled(STATE == ACT and STATE != gl.float32))
    probes = gl.allocate_shared_memory(ACT, [2, c.NC, c.KP], c.swizzled(STATE == ACT and STATE != gl.float32))
    tile = gl.program_id(0)
    step = gl.num_programs(0)
    packed = _cursor(cursors, tile, tiles, c)
    _fetch(states.index(0), probes.index(0), S, s_step, x, x_step, packed, tile, tiles, c)
    loaded = _load(W, x, x_step, rec, rec_step, packed, tile, tiles, M, c)
    ahead = _cursor(cursors, tile + step, tiles, c)
    buffer = 0
    while tile < tiles:
        _fetch(states.index(1 - buffer), probes.index(1 - buffer), S, s_step, x, x_step, ahead, tile + step, tiles, c)
        upcoming = _load(W, x, x_step, rec, rec_step, ahead, tile + step, tiles, M, c)
        farther = _cursor(cursors, tile + 2 * step, tiles, c)
        async_copy.wait_group(1)
        numbers = _unpack(packed)
        if numbers[1] > 0:
            y = _see(states.index(buffer), probes.index(buffer), loaded, M, c)
            if c.MAMBA:
                y = y + product(loaded[4], loaded[3], gl.full([c.BV, c.NC], 0.0, gl.float32, layout=M))
                _store(loaded[4], y, out, rec, rec_step, packed, tile, tiles, c)
            else:
                update, o = _solve(y, loaded[3], loaded[4], M, c)
                _store(update, o, out, rec, rec_step, packed, tile, tiles, c)
            if c.HP > 0:
                if numbers[4] != 0:
                    _fold(states.index(buffer), S, s_step, W, rec, rec_step, loaded[2], packed, tile, tiles, M, c)
        else:
            _silence(out, tile, tiles, c)
        packed, loaded, ahead = ahead, upcoming, farther
        buffer = 1 - buffer
        tile += step
