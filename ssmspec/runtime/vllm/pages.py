"""Our view of vLLM's pages: what the policies keep beside them, and the conv windows inside."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ssmspec.layout import Layout
from ssmspec.pool import NULL_SLOT, StatePool, storage


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
    states: Sequence[Tensor],
    rows: Sequence[Tensor],
    records: Sequence[Mapping[str, Tensor]],
    cursors: Mapping[str, Tensor],
) -> StatePool:
    """The pool that a policy works on, with states [pages, HV, V, K] at ``rows`` [slots]; by layer, since vLLM's
    tensors cannot be stacked."""
    fields: dict[str, Any] = {**cursors, "state": list(states)}
    for name in records[0] if records else ():
        fields[name] = [layer[name] for layer in records]
    return StatePool(layout, cast("dict[str, Tensor]", fields), rows)


class ConvPages:
    """The conv window [pages, D, W-1+K] of one layer: W-1 inputs before the window, then room for its K drafts.

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
