"""How updates and outputs of fast mode's Gluon kernel get out: neighbours of V in a thread, rows of V in a warp."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ssmspec.kernels.fast_tile import place, ring_at, tokens_of, unpack, updates_at


@gluon.jit
def side_by_side(update, o, c: gl.constexpr):
    """Updates and outputs [BV, tokens] with neighbours of V in a thread; through shared memory at once where they can."""
    L: gl.constexpr = c.columns(gl.num_warps())
    if c.MAMBA:
        update = gl.convert_layout(update, L)
        o = gl.convert_layout(o, L)
    else:
        both = gl.convert_layout(gl.join(update, o), c.pairs(gl.num_warps()))
        update, o = gl.split(both)
        update = gl.convert_layout(update, L, assert_trivial=True)
        o = gl.convert_layout(o, L, assert_trivial=True)
    return update, o


@gluon.jit
def store_updates(update, cursor, tile, a, c: gl.constexpr):
    """[BV, tokens], behind the records."""
    slot, n, first, records, _ = unpack(cursor)
    _, head, tile_v = place(cursor, tile, a, c)
    L: gl.constexpr = c.columns(gl.num_warps())
    v = tile_v + gl.arange(0, c.BV, layout=gl.SliceLayout(1, L))
    token = gl.arange(0, update.shape[1], layout=gl.SliceLayout(0, L))
    of_c = updates_at(a, slot, head, c)
    update = update.to(of_c.dtype.element_ty)
    of_c = of_c + (ring_at(ring_at(first + records, c) + token, c) * c.V)[None, :] + v[:, None]
    gl.store(of_c, update, mask=(token < n)[None, :] & (v < c.V)[:, None])


@gluon.jit
def store_outputs(o, due, cursor, tile, a, c: gl.constexpr):
    """[BV, tokens], up to the window's padded end, if ``due``."""
    L: gl.constexpr = c.columns(gl.num_warps())
    row, head, tile_v = place(cursor, tile, a, c)
    token = gl.arange(0, o.shape[1], layout=gl.SliceLayout(0, L))
    v = tile_v + gl.arange(0, c.BV, layout=gl.SliceLayout(1, L))
    of_out = a.out + (row * c.T * c.HV + head) * c.V + (token * (c.HV * c.V))[None, :] + v[:, None]
    gl.store(of_out, o, mask=(token < c.T)[None, :] & (v < c.V)[:, None] & due)


@gluon.jit
def rounded(o, cursor, a, c: gl.constexpr):
    """Outputs as they are stored: of the dtype of activations, zeros behind a window's end."""
    token = gl.arange(0, o.shape[1], layout=gl.SliceLayout(0, c.columns(gl.num_warps())))
    return gl.where((token < tokens_of(cursor))[None, :], o.to(a.out.dtype.element_ty), 0.0)


@gluon.jit
def silence(cursor, tile, a, c: gl.constexpr):
    """A null row's outputs are zeros."""
    L: gl.constexpr = c.columns(gl.num_warps())
    store_outputs(gl.full([c.BV, c.TP], 0.0, a.out.dtype.element_ty, layout=L), True, cursor, tile, a, c)
