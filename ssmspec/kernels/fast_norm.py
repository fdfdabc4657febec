"""The gated RMSNorm behind fast mode's Gluon kernel: over the V of a head, whose tiles one program takes in a row.

Outputs are rounded to the dtype of activations first, as if they were stored and read again, and are fp32 from there
on, so that the values are those of ``norm_triton`` but for the order of sums. In the layout of the stores all of a
tile's V lies in half a warp: sums over it take shuffles, and no barrier.
"""

# ruff: noqa: RUF005 - Triton unpacks no tuples
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.extra import libdevice

from ssmspec.kernels.fast_store import store_outputs
from ssmspec.kernels.fast_tile import place, tokens_of


@gluon.jit
def load_gate(cursor, tile, a, c: gl.constexpr):
    """A tile's z [BV, TP] and weights [BV, 1], raw."""
    L: gl.constexpr = c.columns(gl.num_warps())
    row, head, tile_v = place(cursor, tile, a, c)
    token = gl.arange(0, c.TP, layout=gl.SliceLayout(0, L))
    v = tile_v + gl.arange(0, c.BV, layout=gl.SliceLayout(1, L))
    of_z = a.gates.z + row * a.gates.step[0] + head * a.gates.step[2]
    of_z = of_z + (token * a.gates.step[1])[None, :] + v[:, None]
    inside = (token < tokens_of(cursor))[None, :] & (v < c.V)[:, None]
    z = gl.load(of_z, mask=inside, other=0.0)
    return z, gl.load(a.gates.weight + v, mask=v < c.V, other=0.0)[:, None]


@gluon.jit
def gate(loaded, c: gl.constexpr):
    """What normed outputs are multiplied with [BV, TP]."""
    z, weight = loaded
    z = z.to(gl.float32)
    above = z
    if c.GATE == "sigmoid":
        above = gl.full(z.shape, 1.0, gl.float32, layout=z.type.layout)
    return weight.to(gl.float32) * libdevice.fast_dividef(above, 1 + libdevice.fast_expf(-z))


@gluon.jit
def store_normed(o, gates, i, before, waiting, cursor, tile, a, c: gl.constexpr):
    """Outputs over the root of their mean square over V, gated, once all of a head are there: ``waiting`` has its tiles.

    No branch: nothing waits for the stores, and what comes behind fills the time that they take.
    """
    BLOCKS: gl.constexpr = c.BLOCKS
    o = o.to(gl.float32)
    squares = gl.sum(o * o, 0) + gl.where(i % BLOCKS == 0, 0.0, before)
    waiting = waiting[1:] + (o * gates,)
    norm = gl.rsqrt(squares / c.V + c.EPS)[None, :]
    for j in gl.static_range(BLOCKS):
        normed = (waiting[j] * norm).to(a.out.dtype.element_ty)
        store_outputs(normed, i % BLOCKS == BLOCKS - 1, cursor, tile - (BLOCKS - 1 - j), a, c)
    return squares, waiting
