"""One worker's policy: which request sits in which slot, where its state lies this step, and the commit after sampling.

Slots 1..N are vLLM's request slots; slot N+r stands for the page that takes the boundary state of request slot r.
Everything that a layer reads lies in buffers that are refreshed in place, so that a CUDA graph of the forward pass
may hold them; a batch that was padded for its graph is padded with null rows here.
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
from ssmspec.runtime.vllm.windows import Windows
from ssmspec.step import Commit, Step


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The speculative rows of one step, as vLLM describes them."""

    rows: Tensor | slice  # of the engine's batch
    requests: Tensor  # [B] int64, vLLM's request slots
    lens: Tensor  # [B] int64
    computed: Tensor  # [B] int64, tokens of the request before this step
    settle: Tensor | None = None  # [B] bool: a prompt's tail, whose page others may read next
    dummy: bool = False  # nobody's rows: vLLM will not say what was accepted


Recorded = tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph]  # of staging, of the commit


class Session:
    """The policy object over vLLM's pages, and the one step between ``stage`` and ``commit``."""

    COUNTERS = ("rows", "tokens", "flushes", "boundaries")

    def __init__(
        self, serve: ServeConfig, g: Geometry, w: Window, num_requests: int, device: torch.device
    ) -> None:
        self.serve, self.g, self.w, self.num_requests, self.device = serve, g, w, num_requests, device
        self.layout = layout.of(serve.policy, g, w)
        self.cursors = pages.allocate_cursors(self.layout, self.num_slots, device)
        self.counters = torch.zeros(len(self.COUNTERS), dtype=torch.int64, device=device)
        self.steps = 0
        self.policy: Policy
        self.windows: Windows
        self.staged: Batch | None = None
        self.recorded: dict[int, Recorded] = {}  # by number of rows, in ascending order
        self.tables: tuple[Tensor, ...] = ()
        # per row: request, length, tokens before
        self._inputs = torch.zeros(3, num_requests, dtype=torch.int64, device=device)
        self._numbers = torch.zeros(6, num_requests, dtype=torch.int64, device=device)
        self._flags = torch.zeros(num_requests, dtype=torch.bool, device=device)
        self._slots = torch.arange(self.num_slots, device=device)
        self._pages = torch.zeros(0, self.num_slots, dtype=torch.int64, device=device)  # per group of layers

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
        tables: Sequence[Tensor],
        states: Sequence[Tensor],
        convs: Sequence[pages.ConvPages],
        records: Sequence[Mapping[str, Tensor]],
        params: Sequence[LayerParams],
    ) -> None:
        """Put the policy over the pages that vLLM has (again) allocated; nothing of an earlier binding is kept.

        ``groups``: the layers that share each of ``tables``, [requests, columns] pages by request slot.
        """
        self.tables = tuple(tables)
        self._pages = self._pages.new_zeros(len(groups), self.num_slots)
        group_of = {layer: i for i, layers in enumerate(groups) for layer in layers}
        rows = [self._pages[group_of[i]] for i in range(len(states))]
        pool = pages.pool(self.layout, states, rows, records, self.cursors)
        for cursor in self.cursors.values():
            cursor.zero_()
        self.windows = Windows(convs, rows)
        backend = self.serve.kernels(self.device.type)
        self.policy = policies.make(self.serve.policy, self.g, self.w, pool, params, backend)
        self.staged = None

    def release(self) -> None:
        """Let go of the pages, until the next ``bind``."""
        self.__dict__.pop("policy", None)
        self.__dict__.pop("windows", None)
        self.tables = ()
        self.recorded.clear()
        self.staged = None

    def capture(self) -> None:
        """Record staging and commit of 1, 2, 4, ... rows in CUDA graphs, since they are dozens of small kernels."""
        pool = torch.cuda.graph_pool_handle()
        self._inputs.fill_(-1)  # null rows: nothing moves while this is recorded
        for n in sorted({*(1 << i for i in range(self.num_requests.bit_length())), self.num_requests}):
            graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            for work, graph in zip((self._place, self._apply), graphs, strict=True):
                work(n)  # compiles what is not yet
                torch.cuda.synchronize()
                with torch.cuda.graph(graph, pool=pool):
                    work(n)
            self.recorded[n] = graphs

    def admit(self, request: int) -> None:
        """A request starts, or starts again, in this slot: its page is exact and nothing is pending."""
        self.policy.reset(self._slots[request + 1 : request + 2])

    def stage(self, batch: Batch | None) -> None:
        """Take over where every row's state lies in this step, before the first layer runs.

        Raises RuntimeError where the step before was verified and never committed: its windows are lost, and with
        them the pages they have moved.
        """
        if self.staged is not None and not self.staged.dummy:
            raise RuntimeError(
                "ssmspec: the last step was verified but not committed, since the model failed in between;"
                " the states of its requests are lost: restart the engine"
            )
        self.staged = batch
        if batch is None:
            return
        n = len(batch.requests)
        self._inputs.fill_(-1)
        self._numbers.zero_()
        if not batch.dummy:
            self._inputs[0, :n] = batch.requests
            self._inputs[1, :n] = batch.lens
            self._inputs[2, :n] = batch.computed
        if batch.settle is None:
            self._flags.zero_()
        else:
            self._flags[:n] = batch.settle
        recorded = self._recorded(n)
        if recorded is None:
            self._place(self.num_requests)
        else:
            recorded[0].replay()

    def _place(self, n: int) -> None:
        """From the first ``n`` inputs, fill the step and point its slots to their pages."""
        requests, lens, computed = self._inputs[:, :n]
        live, slots, align = requests >= 0, requests + 1, self.w.align
        lens = lens.clamp(min=0)
        none = torch.zeros_like(slots)
        if not align:
            pages = torch.stack([table[requests.clamp(min=0), 0] for table in self.tables])
            self._pages[:, slots] = torch.where(live, pages.long(), NULL_SLOT)
            self._numbers[:, :n] = torch.stack([slots, lens, none, slots, none, none])
            return
        running, column = (
            (computed + lens - 1) // align,
            computed // align,
        )  # of the window's end, of the next boundary
        mark = (column + 1) * align - computed
        marked = live & (mark <= lens)
        beside = torch.where(marked, slots + self.num_requests, NULL_SLOT)
        at = requests.clamp(min=0).repeat(2), torch.cat([running, column]).clamp(min=0)
        index = torch.cat([slots, beside])
        # null slots repeat, and all say null
        self._pages[:, index] = torch.where(
            index > NULL_SLOT, torch.stack([table[at] for table in self.tables]).long(), NULL_SLOT
        )
        mark_slots = torch.where(marked & (column == running), slots, beside)
        self._numbers[:, :n] = torch.stack(
            [slots, lens, none, slots, torch.where(marked, mark, 0), mark_slots]
        )

    def verify(self, layer: int, mixed: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """One layer's window: conv outputs [B, T, D] and gates [B, T, HV] -> outputs [B, T, HV, V]."""
        if self.staged is None or len(self.staged.requests) != len(mixed):
            raise RuntimeError("ssmspec: a speculative row reached a layer before its step was staged")
        return self.policy.verify(layer, self._step(len(mixed)), Tokens.unpack(self.g, mixed, a, b))

    def commit(self, num_sampled: Tensor) -> None:
        """Keep what was accepted of every row of the engine's batch, bonus included.

        The engine reports 0 for a prompt chunk that samples nothing; its one token is accepted all the same.
        """
        batch, self.staged = self.staged, None
        if batch is None:
            return
        n = len(batch.requests)
        self._step(n).accepted.copy_(num_sampled[batch.rows].clamp(min=1))
        self.steps += 1
        recorded = self._recorded(n)
        if recorded is None:
            self._apply(n)
        else:
            recorded[1].replay()

    def _recorded(self, n: int) -> Recorded | None:
        return next((graphs for size, graphs in self.recorded.items() if size >= n), None)

    def _apply(self, n: int) -> None:
        """Commit the first ``n`` rows of the static buffers."""
        commit = self._step(n).close()
        self._count(commit)
        self.windows.keep(commit)
        self.policy.accept(commit)

    def describe(self, num_layers: int) -> str:
        """What runs, in one line, with what it takes beside vLLM's pages."""
        fields = [f for f in self.layout if f.name.startswith("rec_")]
        mib = num_layers * (self.num_requests + 1) * sum(f.nbytes for f in fields) / 2**20
        return (
            f"policy={self.serve.policy} mode={self.serve.mode} align={self.w.align or 'off'}, {num_layers} GDN layers,"
            f" state {self.g.state_dtype}, T={self.w.max_len}, records {mib:.1f} MiB for {self.num_requests} requests,"
            f" kernels {self.serve.kernels(self.device.type)}"
        )

    def report(self) -> dict[str, Any]:
        """What runs, and how often what has happened so far. Reads the device."""
        counts = dict(zip(self.COUNTERS, self.counters.tolist(), strict=True))
        return {**self.serve.to_dict(), "align": self.w.align, "steps": self.steps, **counts}

    def _step(self, n: int) -> Step:
        """The first ``n`` rows of the static buffers."""
        slots, lens, accepted, next_slots, mark, mark_slots = self._numbers[:, :n].unbind()
        return Step(
            slots, lens, accepted, next_slots, mark, mark_slots, self._flags[:n], max_len=self.w.max_len
        )

    def _count(self, commit: Commit) -> None:
        live = commit.lens > 0
        flushed = torch.zeros_like(live)
        if "count" in self.cursors:
            count = self.cursors["count"][commit.slots]
            limit = layout.ring(self.serve.policy, self.w).limit
            flushed = live & (count > 0) & (count + commit.lens > limit)
        amounts = [live.long(), commit.accepted, flushed.long(), (commit.mark > 0).long()]
        self.counters += torch.stack(amounts).sum(1)
