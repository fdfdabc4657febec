"""Where the tiles of fast mode's Gluon kernel lie in memory, and how they get in.

What a tile needs next is on its way while the tile before it is computed: state, probes, old updates and keys into
shared memory, coefficients and values into the fragments that use them.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ssmspec.kernels.hopper_tile import async_load


class Call(NamedTuple):
    """Arguments of the kernel."""

    state: Any
    row: Any  # elements of state per row
    w: Any  # Couplings
    x: Any
    x_step: Any
    out: Any  # [B, T, HV, V]
    rec: Any
    rec_step: Any
    gates: Any  # Gates, or None
    tiles: Any


class Shared(NamedTuple):
    """Shared memory: two of each, one of which is filled while the other is used, and a ring of cursors."""

    states: Any  # [BV, KP]
    updates: Any  # [HP, BV]
    probes: Any  # [NC, KP], of a head
    keys: Any  # [HP, KP], of a head of a row that will be folded
    cursors: Any  # [2]


CURSORS = gl.constexpr(4)


@gluon.jit
def share(a, c: gl.constexpr):
    """(how many heads a program takes, with which it starts)."""
    heads = a.tiles // c.BLOCKS
    many = (heads - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)
    return many, gl.program_id(0) * many // gl.num_programs(0)


@gluon.jit
def nth(i, mine, c: gl.constexpr):
    """A program's tiles: all of a head, one after another, then those of a head further on.

    The programs start all over the order of rows, so that some of them write states while others read.
    """
    many, start = mine
    turn = i // c.BLOCKS + start
    turn = gl.where(turn >= many, turn - many, turn)
    return (gl.program_id(0) + turn * gl.num_programs(0)) * c.BLOCKS + i % c.BLOCKS


@gluon.jit
def place(cursor, tile, a, c: gl.constexpr):
    """Batch row, value head and first row of V of a tile; behind the last tile those of the last."""
    at = gl.minimum(tile, a.tiles - 1).to(gl.uint32)
    return cursor[1], ((at // c.BLOCKS) % c.HV).to(gl.int32), ((at % c.BLOCKS) * c.BV).to(gl.int32)


@gluon.jit
def fetch_cursor(shared, i, tile, a, c: gl.constexpr):
    """Start copying a tile's cursor; through a register the whole warp would wait for it."""
    turn = (gl.minimum(tile, a.tiles - 1).to(gl.uint32) // (c.HV * c.BLOCKS)).to(gl.int32)
    both = gl.arange(0, 2, layout=gl.BlockedLayout([2], [32], [gl.num_warps()], [0]))
    async_load(shared.cursors.index(i % CURSORS), a.w.cursors + turn * 2 + both)


@gluon.jit
def cursor_of(shared, i):
    """(a row's numbers, packed; the batch row)."""
    L: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
    both = shared.cursors.index(i % CURSORS).load(L)
    first = gl.arange(0, 2, layout=L) == 0
    return gl.sum(gl.where(first, both, 0), 0), gl.sum(gl.where(first, 0, both), 0).to(gl.int32)


@gluon.jit
def tokens_of(cursor):
    return cursor[0].to(gl.int32) & 63


@gluon.jit
def flushes(cursor):
    return (cursor[0] >> 18) & 1 != 0


@gluon.jit
def unpack(cursor):
    """(slot, tokens, first record, records, flush) as fast_rows has packed them."""
    low = cursor[0].to(gl.int32)
    return (cursor[0] >> 19) & 0xFFFFF, low & 63, (low >> 6) & 63, (low >> 12) & 63, (low >> 18) & 1


@gluon.jit
def ring_at(position, c: gl.constexpr):
    """position in 0 .. 2R - 1."""
    return gl.where(position >= c.R, position - c.R, position)


@gluon.jit
def state_at(a, cursor, head, tile_v, v, k, c: gl.constexpr):
    """All that a program has in common is added first, so that a copy's address is a register and a constant."""
    of_tile = a.state + (cursor[0] >> 39) * a.row + (head * (c.V * c.K) + tile_v * c.K)
    return of_tile + (v[:, None] * c.K + k[None, :])


@gluon.jit
def updates_at(a, slot, head, c: gl.constexpr):
    """The records of c, or x for Mamba2, [R, V]."""
    updates = a.rec.x if c.MAMBA else a.rec.c
    return updates + slot * (a.rec_step.x if c.MAMBA else a.rec_step.c) + head * (c.R * c.V)


@gluon.jit
def vectors_at(a, row, head, c: gl.constexpr):
    return a.w.vectors + (row * c.HV + head) * (c.VECTORS * c.K)


@gluon.jit
def _fetch_keys(keys, cursor, tile, a, c: gl.constexpr):
    """Start copying the keys of the records."""
    slot, _, first, records, _ = unpack(cursor)
    row, head, _ = place(cursor, tile, a, c)
    L: gl.constexpr = c.lines(c.KP, keys.dtype.primitive_bitwidth, gl.num_warps())
    record = gl.arange(0, c.HP, layout=gl.SliceLayout(1, L))
    k = gl.arange(0, c.KP, layout=gl.SliceLayout(0, L))
    if c.CHANNELS:
        of_key = vectors_at(a, row, head, c) + (c.NC + record)[:, None] * c.K + k[None, :]
    else:
        of_key = a.rec.k + slot * a.rec_step.k + (head // c.GROUP) * (c.R * c.K)
        of_key = of_key + ring_at(first + record, c)[:, None] * c.K + k[None, :]
    async_load(keys, of_key, mask=(record < records)[:, None] & (k < c.K)[None, :])


@gluon.jit
def _fetch_probes(probes, cursor, tile, a, c: gl.constexpr):
    """Start copying the probes of a head."""
    row, head, _ = place(cursor, tile, a, c)
    L: gl.constexpr = c.lines(c.KP, probes.dtype.primitive_bitwidth, gl.num_warps())
    column = gl.arange(0, c.NC, layout=gl.SliceLayout(1, L))
    k = gl.arange(0, c.KP, layout=gl.SliceLayout(0, L))
    of = column // c.PROBES
    if c.CHANNELS:
        of_p = vectors_at(a, row, head, c) + column * c.K
    else:
        h = head // c.GROUP
        of_p = a.x.q + row * a.x_step.q[0] + (of * a.x_step.q[1] + h * a.x_step.q[2])
        if not c.MAMBA:
            of_k = a.x.k + row * a.x_step.k[0] + (of * a.x_step.k[1] + h * a.x_step.k[2])
            of_p = gl.where(column % 2 == 1, of_p, of_k)
    inside = (of < tokens_of(cursor))[:, None] & (k < c.K)[None, :]
    async_load(probes, of_p[:, None] + k[None, :], mask=inside)


@gluon.jit
def fetch(shared, i, cursor, tile, a, c: gl.constexpr):
    """Start copying the i-th tile's state and old updates into shared memory, with the first of a head the head's
    probes and keys too; zeros for what lies outside."""
    slot, _, first, records, flush = unpack(cursor)
    _, head, tile_v = place(cursor, tile, a, c)
    L: gl.constexpr = c.lines(c.KP, a.state.dtype.element_ty.primitive_bitwidth, gl.num_warps())
    v = gl.arange(0, c.BV, layout=gl.SliceLayout(1, L))
    k = gl.arange(0, c.KP, layout=gl.SliceLayout(0, L))
    inside = (v < c.V - tile_v)[:, None] & (k < c.K)[None, :]
    async_load(shared.states.index(i % 2), state_at(a, cursor, head, tile_v, v, k, c), mask=inside)
    if c.HP > 0:
        of_c = updates_at(a, slot, head, c)
        LC: gl.constexpr = c.lines(c.BV, of_c.dtype.element_ty.primitive_bitwidth, gl.num_warps())
        record = gl.arange(0, c.HP, layout=gl.SliceLayout(1, LC))
        v = tile_v + gl.arange(0, c.BV, layout=gl.SliceLayout(0, LC))
        held = (record < records)[:, None] & (v < c.V)[None, :]
        of_c = of_c + ring_at(first + record, c)[:, None] * c.V + v[None, :]
        async_load(shared.updates.index(i % 2), of_c, mask=held)
    if i % c.BLOCKS == 0:
        of_head = (i // c.BLOCKS) % 2
        _fetch_probes(shared.probes.index(of_head), cursor, tile, a, c)
        if c.HP > 0:
            if flush != 0:
                _fetch_keys(shared.keys.index(of_head), cursor, tile, a, c)


@gluon.jit
def load_head(cursor, tile, a, M: gl.constexpr, c: gl.constexpr):
    """A head's coefficients, in the fragments that use them: scale, seen, solve, fold and total."""
    row, head, _ = place(cursor, tile, a, c)
    of_w = a.w.heads + (row * c.HV + head) * c.COEFFICIENTS
    scale = gl.load(of_w + c.SCALE + gl.arange(0, c.NC, layout=gl.SliceLayout(0, M)))
    seen = scale
    weight = scale
    total = scale
    LW: gl.constexpr = gl.DotOperandLayout(1, M, 4)
    column = gl.arange(0, c.NC, layout=gl.SliceLayout(0, LW))
    if c.HP > 0:
        record = gl.arange(0, c.HP, layout=gl.SliceLayout(1, LW))
        of_seen = a.w.seen + (row * (c.HV // c.SHARED) + head // c.SHARED) * (c.NC * c.HP)
        seen = gl.load(of_seen + column[None, :] * c.HP + record[:, None])
        record = gl.arange(0, c.HP, layout=gl.SliceLayout(0, gl.DotOperandLayout(0, M, 4)))
        weight = gl.load(of_w + c.FOLD + record)
        total = gl.load(of_w + c.TOTAL + gl.arange(0, c.BV, layout=gl.SliceLayout(1, M)) % 4)
    if c.MAMBA:
        token = gl.arange(0, max(16, c.TP), layout=gl.SliceLayout(1, LW))
        of_solve = of_w + column[None, :] * c.TP + token[:, None]
        solve = gl.load(of_solve, mask=(token < c.TP)[:, None], other=0.0)
    else:
        LZ: gl.constexpr = gl.DotOperandLayout(1, M, 1)
        token = gl.arange(0, c.TP, layout=gl.SliceLayout(1, LZ))
        column = gl.arange(0, c.NC, layout=gl.SliceLayout(0, LZ))
        solve = gl.load(of_w + column[None, :] * c.TP + token[:, None])
    return scale, seen, solve, weight, total


@gluon.jit
def load_values(cursor, tile, a, M: gl.constexpr, c: gl.constexpr):
    """The values v (or x) of a tile, in the fragment that uses them, [BV, tokens]."""
    row, head, tile_v = place(cursor, tile, a, c)
    L: gl.constexpr = gl.DotOperandLayout(0, M, 4) if c.MAMBA else c.tokens()
    WIDE: gl.constexpr = max(16, c.TP) if c.MAMBA else c.TP
    token = gl.arange(0, WIDE, layout=gl.SliceLayout(0, L))
    v = tile_v + gl.arange(0, c.BV, layout=gl.SliceLayout(1, L))
    of_v = a.x.v + row * a.x_step.v[0] + (token * a.x_step.v[1] + head * a.x_step.v[2])[None, :] + v[:, None]
    return gl.load(of_v, mask=(token < tokens_of(cursor))[None, :] & (v < c.V)[:, None], other=0.0)
