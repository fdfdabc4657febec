"""The launch of the fold kernel: a table of every layer's addresses, and the plan."""

from collections.abc import Sequence
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssmspec.geometry import Geometry
from ssmspec.kernels.base import Layer, Plan
from ssmspec.kernels.fold import Moves, Ports, fold
from ssmspec.kernels.launch import column, fold_rows, fold_span, fold_tile, row_step, shape_of

_TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int64: tl.int64,
}


class Fold:
    """Fold every layer in one launch; the table of addresses is built at the first call for a set of layers."""

    def __init__(self, g: Geometry) -> None:
        self.g, self.tile = g, fold_tile(g)
        self.layers: Sequence[Layer] | None = None
        self.table, self.align = torch.empty(0), 1

    def __call__(self, layers: Sequence[Layer], plan: Plan) -> None:
        assert plan.noise is None
        batch = plan.src.numel()
        if batch == 0 or not layers:
            return
        if self.layers is not layers:
            self.layers, (self.table, self.align) = layers, _table(layers)
        span = fold_span(self.g, len(layers), batch)
        tiles = triton.cdiv(self.g.head_v, self.tile.rows) * self.g.num_v_heads
        rows = fold_rows(tiles, batch)
        types = Ports(**{name: _TYPES[t.dtype] for name, t in _ports(layers[0]).items()})
        columns = {name: column(name, getattr(plan, name)) for name in Moves._fields if name != "ends"}
        fold[(tiles, triton.cdiv(batch, rows), triton.cdiv(len(layers), span))](
            self.table,
            len(layers),
            span,
            Moves(**columns, ends=plan.ends),
            batch,
            types,
            self.align,
            rows,
            shape_of(self.g, self.tile, layers[0].capacity),
            **self.tile.options,
        )


def _ports(layer: Layer) -> dict[str, Tensor]:
    ports = {"state": layer.state, **layer.records}
    return ports if layer.rows is None else {**ports, "rows": layer.rows}


def _table(layers: Sequence[Layer]) -> tuple[Tensor, int]:
    """[layers, ports, 2] int64: addresses, and elements per slot; and what divides all of those of vectors."""
    table = torch.zeros(len(layers), len(Ports._fields), 2, dtype=torch.int64)
    align = 16
    for i, layer in enumerate(layers):
        for name, t in _ports(layer).items():
            entry = _signed(t.data_ptr()), row_step(name, t)
            table[i, Ports._fields.index(name)] = torch.tensor(entry)
            if t.dim() == 4:  # read many elements at a time
                align = gcd(align, *entry)
    return table.to(layers[0].state.device), align


def _signed(address: int) -> int:
    """The same 64 bits as an int64."""
    return address - 2**64 if address >= 2**63 else address
