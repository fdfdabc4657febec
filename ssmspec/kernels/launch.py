"""Launch shapes of the Triton kernels: constants per geometry and batch size, never tuned while state is carried.

Any tile gives the same bits (kernels/triton_recurrence.py), so these numbers are about speed alone.
"""

from dataclasses import dataclass

from ssmspec.geometry import DType, Geometry


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A program's share of a head: ``rows`` of V times all of K. A lane has four rows at most.

    More would not fit into one 16-byte load of fp32 values along V, and the tile's register layout would break.
    """

    rows: int
    lanes_k: int  # lanes of a warp along K
    chunk: (
        int  # neighbouring k per lane; it decides the order of sums, so it depends on the state dtype alone
    )
    warps: int

    @property
    def lanes_v(self) -> int:
        return self.warps * (32 // self.lanes_k)


def _power(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()


def _tile(g: Geometry, rows: int, lanes_k: int, warps: int) -> Tile:
    """The wanted tile, made smaller where the head is."""
    chunk = 4 if g.state_dtype is DType.FP32 else 8
    lanes_k = min(lanes_k, _power(g.head_k) // chunk)
    while rows > 8 and g.head_v % rows:
        rows //= 2
    warps = max(1, min(warps, rows * lanes_k // 32))
    return Tile(rows=max(rows, 32 // lanes_k), lanes_k=lanes_k, chunk=chunk, warps=warps)


def window_tile(g: Geometry, batch: int) -> Tile:
    if g.head_k > 128:
        return _tile(g, rows=32, lanes_k=8, warps=4)
    return _tile(g, rows=64, lanes_k=8, warps=4)


def head_tile(g: Geometry) -> Tile:
    """Heads instead of rows; sums over K go by fours whatever the state's dtype."""
    lanes_k = min(8, _power(g.head_k) // 4)
    return Tile(rows=32 // lanes_k, lanes_k=lanes_k, chunk=4, warps=1)


def fold_tile(g: Geometry) -> Tile:
    """Lanes along K as far as it goes: nothing is summed, and long rows are stored fastest."""
    lanes_k = 32 if g.state_dtype is DType.FP32 else 16
    return _tile(g, rows=1024 // lanes_k, lanes_k=lanes_k, warps=8)


def fold_span(g: Geometry, layers: int, batch: int) -> int:
    """Layers per program: all of them once rows and heads alone fill the GPU, since most rows have nothing to do."""
    return layers if batch * g.num_v_heads >= 1024 else 1
