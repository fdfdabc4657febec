"""One worker's policy: which request sits in which slot, where its state lies this step, and the commit after sampling.

Slots 1..N are vLLM's request slots; slot N+r stands for the page that takes the boundary state of request slot r.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ssmspec import layout, policies
from ssmspec.geometry import Geometry, Window
from ssmspec.kernels.base import LayerParams, Tokens
from ssmspec.policies.base import Policy
from ssmspec.pool import NULL_SLOT
from ssmspec.runtime.vllm import pages
from ssmspec.runtime.vllm.config import ServeConfig
from ssmspec.step import Commit, Step


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The speculative rows of one step, as vLLM describes them."""

    rows: Tensor  # [B] int64, of the engine's batch
    requests: Tensor  # [B] int64, vLLM's request slots
    lens: Tensor  # [B] int64
    computed: Tensor  # [B] int64, tokens of the request before this step
    settle: Tensor  # [B] bool: a prompt's tail, whose page others may read next
    blocks: Sequence[Tensor]  # per group of layers: [B] page of the running state
    tables: Sequence[Tensor]  # per group of layers: [B, columns] pages of the request


@dataclass(frozen=True)
class Group:
    """Layers that share a block table."""

    layers: tuple[int, ...]
    blocks: Tensor  # [2N+1] int64, the page of each slot


class Session:
    """The policy object over vLLM's pages, and the one step between ``stage`` and ``commit``."""

    COUNTERS = ("steps", "rows", "tokens", "flushes", "boundaries")

    def __init__(
        self, serve: ServeConfig, g: Geometry, w: Window, num_requests: int, device: torch.device
    ) -> None:
        self.serve, self.g, self.w, self.num_requests, self.device = serve, g, w, num_requests, device
        self.layout = layout.of(serve.policy, g, w)
        self.cursors = pages.allocate_cursors(self.layout, self.num_slots, device)
        self.counters = torch.zeros(len(self.COUNTERS), dtype=torch.int64, device=device)
        self.policy: Policy
        self.groups: tuple[Group, ...] = ()
        self.convs: tuple[pages.ConvPages, ...] = ()
        self.step: Step | None = None
        self._rows: Tensor | None = None

    @property
    def num_slots(self) -> int:
        return 2 * self.num_requests + 1

    @property
    def lags(self) -> bool:
        """Whether a page may be behind its request, with records that make up for it."""
        return "count" in self.cursors

    def bind(
        self,
        groups: Sequence[Sequence[int]],
        states: Sequence[Tensor],
        convs: Sequence[pages.ConvPages],
        records: Sequence[Mapping[str, Tensor]],
        params: Sequence[LayerParams],
    ) -> None:
        """Put the policy over the pages that vLLM has (again) allocated; nothing of an earlier binding is kept."""
        self.groups = tuple(
            Group(tuple(layers), torch.zeros(self.num_slots, dtype=torch.int64, device=self.device))
            for layers in groups
        )
        table = {layer: group.blocks for group in self.groups for layer in group.layers}
        paged = [pages.PagedState(state, table[i]) for i, state in enumerate(states)]
        pool = pages.pool(self.layout, paged, [dict(r) for r in records], self.cursors)
        self.convs = tuple(convs)
        for cursor in self.cursors.values():
            cursor.zero_()
        self.policy = policies.make(self.serve.policy, self.g, self.w, pool, params, "torch")
        self.step = None

    def admit(self, request: int) -> None:
        """A request starts, or starts again, in this slot: its page is exact and nothing is pending."""
        self.policy.reset(torch.tensor([request + 1], device=self.device))

    def stage(self, batch: Batch | None) -> None:
        """Take over where every row's state lies in this step, before the first layer runs."""
        self.step = None
        if batch is None:
            return
        live = batch.blocks[0] > NULL_SLOT
        slots = torch.where(live, batch.requests + 1, NULL_SLOT)
        mark, column = self._boundary(batch)
        running = (batch.computed + batch.lens - 1) // max(1, self.w.align)
        elsewhere = torch.where(column == running, slots, slots + self.num_requests)
        marked = live & (mark > 0)
        for group, blocks, table in zip(self.groups, batch.blocks, batch.tables, strict=True):
            group.blocks[slots] = torch.where(live, blocks.long(), NULL_SLOT)
            if self.w.align:
                boundary = table.gather(1, column[:, None].clamp(min=0)).long()[:, 0]
                group.blocks[torch.where(marked, slots + self.num_requests, NULL_SLOT)] = boundary
                group.blocks[NULL_SLOT] = NULL_SLOT
        self.step = Step(
            slots=slots,
            lens=torch.where(live, batch.lens, 0),
            accepted=torch.zeros_like(slots),
            next_slots=slots,
            mark=torch.where(marked, mark, 0),
            mark_slots=torch.where(marked, elsewhere, NULL_SLOT),
            force_flush=batch.settle & live,
            max_len=self.w.max_len,
        )
        self._rows = batch.rows

    def verify(self, layer: int, packed: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """One layer's window: raw conv inputs [B, T, D] and gates [B, T, HV] -> outputs [B, T, HV, V]."""
        step = self._staged()
        blocks = next(g.blocks for g in self.groups if layer in g.layers)[step.slots]
        mixed = self.convs[layer].verify(blocks, torch.zeros_like(blocks), packed)
        return self.policy.verify(layer, step, Tokens.unpack(self.g, mixed, a, b))

    def commit(self, num_sampled: Tensor) -> None:
        """Keep what was accepted of every row of the engine's batch, bonus included.

        The engine reports 0 for a prompt chunk that samples nothing; its one token is accepted all the same.
        """
        if self.step is None:
            return
        step, rows = self._staged(), self._rows
        assert rows is not None
        step.accepted.copy_(num_sampled[rows].clamp(min=1))
        commit = step.close()
        self.step = None
        self._count(commit)
        self._keep_conv(commit)
        self.policy.accept(commit)

    def describe(self, num_layers: int) -> str:
        """What runs, in one line, with what it takes beside vLLM's pages."""
        fields = [f for f in self.layout if f.name.startswith("rec_")]
        mib = num_layers * (self.num_requests + 1) * sum(f.nbytes for f in fields) / 2**20
        return (
            f"policy={self.serve.policy} mode={self.serve.mode} align={self.w.align or 'off'}, {num_layers} GDN layers,"
            f" state {self.g.state_dtype}, T={self.w.max_len}, records {mib:.1f} MiB for {self.num_requests} requests"
        )

    def report(self) -> dict[str, Any]:
        """What runs, and how often what has happened so far. Reads the device."""
        counts = dict(zip(self.COUNTERS, self.counters.tolist(), strict=True))
        return {**self.serve.to_dict(), "align": self.w.align, **counts}

    def _staged(self) -> Step:
        if self.step is None:
            raise RuntimeError("ssmspec: a speculative row reached a layer before its step was staged")
        return self.step

    def _boundary(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Tokens of each window before the next block boundary (0: out of reach), and the column that ends there."""
        align = self.w.align
        if not align:
            zero = torch.zeros_like(batch.lens)
            return zero, zero - 1
        column = batch.computed // align
        mark = (column + 1) * align - batch.computed
        return torch.where(mark <= batch.lens, mark, 0), column

    def _keep_conv(self, commit: Commit) -> None:
        for group in self.groups:
            blocks, boundary = group.blocks[commit.slots], group.blocks[commit.mark_slots]
            for layer in group.layers:
                conv = self.convs[layer]
                window = conv.pages[blocks]
                conv.keep(window, commit.mark, boundary)
                conv.keep(window, commit.accepted, blocks)

    def _count(self, commit: Commit) -> None:
        live = commit.lens > 0
        flushed = torch.zeros_like(live)
        if "count" in self.cursors:
            count = self.cursors["count"][commit.slots]
            limit = layout.ring(self.serve.policy, self.w).limit
            flushed = live & (count > 0) & (count + commit.lens > limit)
        amounts = (live.any(), live.sum(), commit.accepted.sum(), flushed.sum(), (commit.mark > 0).sum())
        self.counters += torch.stack([n.long() for n in amounts])
