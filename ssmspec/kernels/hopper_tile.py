"""The arithmetic of a state tile in registers, in the explicit order of plain Triton, for the Gluon kernels."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ssmspec.kernels.hopper_shape import Order

CHAIN = gl.constexpr(int(Order.CHAIN))
# Triton 3.6 has these under older names
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
async_load = (
    async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
)


@gluon.jit
def hand_over(p, x, mask):
    """As handed.hand_over."""
    gl.store(p, x, mask=mask, eviction_policy="evict_last")


@gluon.constexpr_function
def dims(*shape: int) -> list[int]:
    """A shape that may be an argument of a device function."""
    return list(shape)


if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def view(memory, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
        """Shared memory in another shape."""
        return memory.reinterpret(memory.dtype, SHAPE, LAYOUT)

else:

    @gluon.jit
    def view(memory, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
        """Shared memory in another shape."""
        return memory._reinterpret(memory.dtype, SHAPE, LAYOUT)


@gluon.jit
def _neighbours(x, ROWS: gl.constexpr, CHUNKS: gl.constexpr, CHUNK: gl.constexpr):
    """x [ROWS, CHUNKS * CHUNK] -> CHUNK tensors [ROWS, CHUNKS], element i of every chunk in the i-th."""
    even, odd = gl.split(gl.reshape(x, [ROWS, CHUNKS, CHUNK // 2, 2]))
    if CHUNK == 4:
        x0, x2 = gl.split(even)
        x1, x3 = gl.split(odd)
        return x0, x1, x2, x3
    else:
        e0, e2 = gl.split(gl.reshape(even, [ROWS, CHUNKS, 2, 2]))
        o1, o3 = gl.split(gl.reshape(odd, [ROWS, CHUNKS, 2, 2]))
        x0, x4 = gl.split(e0)
        x2, x6 = gl.split(e2)
        x1, x5 = gl.split(o1)
        x3, x7 = gl.split(o3)
        return x0, x1, x2, x3, x4, x5, x6, x7


@gluon.jit
def _pair(h, x, I: gl.constexpr, J: gl.constexpr):
    LAYOUT: gl.constexpr = h[0].type.layout
    return gl.fma(h[I], gl.convert_layout(x[I], LAYOUT), h[J] * gl.convert_layout(x[J], LAYOUT))


@gluon.jit
def _chain(h, x, first, SWAP: gl.constexpr, BV: gl.constexpr, CHUNK: gl.constexpr):
    LAYOUT: gl.constexpr = h[0].type.layout
    p = _pair(h, x, 0, 1)
    if SWAP:
        LAST: gl.constexpr = 28 if CHUNK == 4 else 24
        rows = first + gl.arange(0, BV, layout=gl.SliceLayout(1, LAYOUT))
        p = gl.where(((rows & LAST) == LAST)[:, None], _pair(h, x, 1, 0), p)
    for i in gl.static_range(2, CHUNK):
        p = gl.fma(h[i], gl.convert_layout(x[i], LAYOUT), p)
    return p


@gluon.jit
def _tree(h, x, CHUNK: gl.constexpr):
    p = _pair(h, x, 0, 1) + _pair(h, x, 2, 3)
    if CHUNK == 8:
        p = p + (_pair(h, x, 4, 5) + _pair(h, x, 6, 7))
    return p


@gluon.jit
def dot(h, x, first, SWAP: gl.constexpr, c: gl.constexpr):
    """sum over K of h [BV, K] * x [1, K] -> [BV], one row a lane; the tile's first row is row ``first`` of the head.

    Chunks are added as plain Triton adds lanes, the farthest first. SWAP marks the first sum of a token, the one
    in which CHAIN has swapped rows.
    """
    CHUNKS: gl.constexpr = c.K // c.CHUNK
    hs = _neighbours(h, c.BV, CHUNKS, c.CHUNK)
    xs = _neighbours(x, 1, CHUNKS, c.CHUNK)
    if c.ORDER == CHAIN:
        p = _chain(hs, xs, first, SWAP, c.BV, c.CHUNK)
    else:
        p = _tree(hs, xs, c.CHUNK)
    for i in gl.static_range(1, 6):
        if CHUNKS >> i >= c.LANES:
            p = gl.sum(gl.reshape(p, [c.BV, 2, CHUNKS >> i]), 1)
    TURNS: gl.constexpr = c.TURNS
    for i in gl.static_range(TURNS):
        p = gl.convert_layout(p, c.turned(i))
        p = gl.sum(gl.reshape(p, [c.BV, 2, c.LANES >> (i + 1)]), 1)
    return gl.convert_layout(gl.sum(p, 1), c.spread(TURNS))


@gluon.jit
def rows_of_tile(u, c: gl.constexpr):
    """[BV], one row a lane -> every row where TILE has it."""
    TURNS: gl.constexpr = c.TURNS
    for i in gl.static_range(TURNS):
        u = gl.convert_layout(u, c.spread(TURNS - 1 - i))
    return gl.convert_layout(u, gl.SliceLayout(1, c.TILE))[:, None]
