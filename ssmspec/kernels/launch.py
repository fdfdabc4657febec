"""Launch shapes of the Triton kernels: constants per geometry and batch size, never tuned while state is carried.

Any tile gives the same bits (kernels/triton_recurrence.py), so these numbers are about speed alone.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from ssmspec.geometry import DType, Geometry
from ssmspec.kernels import choices
from ssmspec.kernels.choices import Kernel
from ssmspec.kernels.heads import power_of_2
from ssmspec.kernels.triton_records import Shape

REGISTERS_A_PROCESSOR, REGISTERS_A_PIECE = 65536, 8  # given out in pieces, so many to a warp's lane
SHARED_A_PROCESSOR, SHARED_RESERVED = 228 * 1024, 1024  # bytes; the latter per program
MOST_REGISTERS = 255  # of a thread


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A program's share of a head: ``rows`` of V times all of K."""

    lanes_k: int  # lanes of a warp along K
    lane_rows: (
        int  # rows of V per lane; four fp32 values along V are one 16-byte load, more would break the layout
    )
    chunk: (
        int  # neighbouring k per lane; it decides the order of sums, so it depends on the state dtype alone
    )
    warps: int = 1
    registers: int | None = None  # per thread, at most

    @property
    def lanes_v(self) -> int:
        return self.warps * (32 // self.lanes_k)

    @property
    def rows(self) -> int:
        return self.lanes_v * self.lane_rows

    @property
    def options(self) -> dict[str, int | bool | None]:
        """Of a launch. Contraction is off everywhere: see kernels/triton_recurrence.py."""
        return {"num_warps": self.warps, "maxnreg": self.registers, "enable_fp_fusion": False}


def _tile(g: Geometry, lanes_k: int, **rest: int) -> Tile:
    """As many rows per lane as 64 values allow, fewer where they do not divide V."""
    chunk = 4 if g.state_dtype is DType.FP32 else 8
    lanes_k = min(lanes_k, power_of_2(g.head_k) // chunk)
    lane_rows = max(1, min(4, 64 * lanes_k // power_of_2(g.head_k)))
    tile = Tile(lanes_k=lanes_k, lane_rows=lane_rows, chunk=chunk, **rest)
    while tile.lane_rows > 1 and g.head_v % tile.rows:
        tile = Tile(lanes_k=lanes_k, lane_rows=tile.lane_rows // 2, chunk=chunk, **rest)
    return tile


def window_tile(g: Geometry, tokens: int, batch: int, replays: bool) -> Tile:
    found = choices.here().launch(Kernel.WINDOW, g, tokens, batch, replays)
    if found is None:
        return _tile(g, lanes_k=8, registers=128)
    return replace(_tile(g, lanes_k=found.lanes or 8, warps=found.warps), registers=found.registers)


def head_tile(g: Geometry) -> Tile:
    """Heads instead of rows; sums over K go by fours whatever the state's dtype."""
    return Tile(lanes_k=min(8, power_of_2(g.head_k) // 4), lane_rows=1, chunk=4)


def fold_tile(g: Geometry) -> Tile:
    """Lanes along K as far as it goes: nothing is summed, and long rows are stored fastest."""
    return _tile(g, lanes_k=32 if g.state_dtype is DType.FP32 else 16, warps=8)


def fold_rows(tiles: int, batch: int) -> int:
    """Rows per program, a power of 2: no more programs than run at once about twice, since most plans are nearly
    empty, and looking at a row takes a program a microsecond."""
    return power_of_2(max(1, tiles * batch // 2048))


def fold_span(g: Geometry, layers: int, batch: int) -> int:
    """Layers per program: all of them once rows and heads alone fill the GPU, since most rows have nothing to do."""
    return layers if batch * g.num_v_heads >= 1024 else 1


def shape_of(g: Geometry, tile: Tile, ring: int) -> Shape:
    return Shape(
        ARCH=str(g.arch),
        BOUND=g.gate_lower_bound,
        SOFTPLUS=g.dt_softplus,
        SCALE=g.head_k**-0.5,
        H=g.num_k_heads,
        HV=g.num_v_heads,
        PHV=power_of_2(g.num_v_heads),
        K=g.head_k,
        V=g.head_v,
        R=ring,
        PK=power_of_2(g.head_k),
        LK=tile.lanes_k,
        LV=tile.lanes_v,
        NV=tile.lane_rows,
        C=tile.chunk,
        COMPILED=not triton.knobs.runtime.interpret,
    )


def strides(kind: Callable[..., Any], tensors: Iterable[Tensor | None]) -> Any:
    """Over (batch, token, head), in the same places."""
    return kind(*(None if t is None else t.stride()[:3] for t in tensors))


def row_step(name: str, t: Tensor) -> int:
    """Elements from row to row; a row itself must be packed, the rows may lie apart."""
    if not t[0].is_contiguous():
        raise ValueError(f"{name} has strides {t.stride()}: only the first may skip elements")
    return t.stride(0)


def column(name: str, t: Tensor) -> Tensor:
    """One number per batch row; a strided column of a table is copied, since the kernels read neighbours."""
    assert t.dim() == 1, name
    return t.contiguous()


def at_once(shared: int, warps: int, registers: int | None, device: torch.device) -> int:
    """Programs with so much shared memory that run at once on a whole Hopper device."""
    lane = -(-(registers or MOST_REGISTERS) // REGISTERS_A_PIECE) * REGISTERS_A_PIECE
    each = min(REGISTERS_A_PROCESSOR // (lane * 32 * warps), SHARED_A_PROCESSOR // (shared + SHARED_RESERVED))
    return max(1, each) * torch.cuda.get_device_properties(device).multi_processor_count
