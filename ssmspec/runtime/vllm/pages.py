"""Our view of vLLM's pages: states by slot, whatever block they lie in, and the conv window."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ssmspec.layout import Layout
from ssmspec.pool import NULL_SLOT, StatePool, storage


@dataclass(frozen=True)
class PagedState:
    """The states [slots, HV, V, K] of one layer, each in the page that ``blocks`` [slots] names.

    vLLM gives a request another page when it crosses a block, and another one per group of layers, while records
    and cursors stay with the request. Kernels that take a pool's state take this in its place.
    """

    pages: Tensor  # [blocks, HV, V, K]
    blocks: Tensor  # [slots] int64

    def __getitem__(self, slots: Any) -> Tensor:
        return self.pages[self.blocks[slots]]

    def __setitem__(self, slots: Any, value: Tensor) -> None:
        self.pages[self.blocks[slots]] = value


def allocate_records(layout: Layout, num_slots: int, device: torch.device) -> dict[str, Tensor]:
    """One layer's records, [slots, *shape] each, by field name."""
    return {
        f.name: torch.zeros(num_slots, *f.shape, dtype=storage(f.dtype), device=device)
        for f in layout
        if f.name.startswith("rec_")
    }


def allocate_cursors(layout: Layout, num_slots: int, device: torch.device) -> dict[str, Tensor]:
    """The fields that all layers share, [slots] each."""
    return {f.name: torch.zeros(num_slots, dtype=storage(f.dtype), device=device) for f in layout if f.shared}


def pool(
    layout: Layout,
    states: list[PagedState],
    records: list[dict[str, Tensor]],
    cursors: Mapping[str, Tensor],
) -> StatePool:
    """The pool that a policy works on; what it indexes by layer is a list with one entry per layer."""
    fields: dict[str, Any] = {**cursors, "state": states}
    for name in records[0] if records else ():
        fields[name] = [layer[name] for layer in records]
    return StatePool(layout, cast("dict[str, Tensor]", fields))


class ConvPages:
    """The conv window [blocks, D, W-1+K] of one layer: W-1 inputs before the window, then room for its K drafts.

    A window of T inputs leaves the last W-2 before it and its own T at the front, as vLLM's causal_conv1d_update
    does; the inputs that end with the a-th accepted one then start at a-1.
    """

    def __init__(self, pages: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.pages, self.weight, self.bias = pages, weight, bias
        self.history = weight.shape[1] - 1

    def verify(self, blocks: Tensor, offsets: Tensor, x: Tensor) -> Tensor:
        """x [B, T, D], read behind the inputs at ``offsets`` [B] -> silu(conv(x)) [B, T, D]; null blocks are kept."""
        window = self.pages[blocks]
        full = torch.cat([self._from(window, offsets), x.mT.to(window.dtype)], -1)
        live = (blocks > NULL_SLOT).nonzero()[:, 0]
        self.pages[blocks[live], :, : full.shape[-1] - 1] = full[live, :, 1:]
        taps = full.float().unfold(-1, self.history + 1, 1)
        y = (taps * self.weight.float()[None, :, None]).sum(-1)
        y = y if self.bias is None else y + self.bias.float()[None, :, None]
        return torch.nn.functional.silu(y).to(x.dtype).mT

    def keep(self, source: Tensor, counts: Tensor, blocks: Tensor) -> None:
        """Of windows ``source`` [B, D, .], put the inputs that end with the ``counts``-th one [B] to the front of ``blocks``."""
        live = ((blocks > NULL_SLOT) & (counts > 0)).nonzero()[:, 0]
        self.pages[blocks[live], :, : self.history] = self._from(source[live], counts[live] - 1)

    def _from(self, window: Tensor, offsets: Tensor) -> Tensor:
        index = offsets[:, None] + torch.arange(self.history, device=offsets.device)
        return window.gather(-1, index[:, None, :].expand(-1, window.shape[1], -1))
