"""One worker's policy: the rows of a step before its layers, the layers' windows, and the commit after sampling.

Everything that a layer reads lies in buffers that are refreshed in place, so that a CUDA graph of the forward pass
may hold them; a batch that was padded for its graph is padded with null rows here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ssmspec import layout, policies
from ssmspec.geometry import Geometry, Window
from ssmspec.kernels.base import LayerParams, Tokens
from ssmspec.policies.base import Policy
from ssmspec.runtime.launched_rows import LaunchedRows
from ssmspec.runtime.rows import Batch, Rows
from ssmspec.runtime.vllm import pages
from ssmspec.runtime.vllm.config import ServeConfig
from ssmspec.runtime.vllm.windows import Windows
from ssmspec.step import Step


class Session:
    """The policy object over vLLM's pages, and the one step between ``stage`` and ``commit``."""

    def __init__(
        self, serve: ServeConfig, g: Geometry, w: Window, num_requests: int, device: torch.device
    ) -> None:
        self.serve, self.g, self.w, self.num_requests, self.device = serve, g, w, num_requests, device
        self.layout = layout.of(serve.policy, g, w)
        self.rows = (Rows if device.type == "cpu" else LaunchedRows)(num_requests, w.max_len, device)
        self.cursors = pages.allocate_cursors(self.layout, self.rows.num_slots, device)
        self.steps = 0
        self.policy: Policy
        self.windows: Windows
        self.staged: Batch | None = None
        self.recorded: dict[int, torch.cuda.CUDAGraph] = {}  # commits, by number of rows, in ascending order
        self._slots = torch.arange(self.rows.num_slots, device=device)

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
        self.rows.bind(tables, self.w.align)
        group_of = {layer: i for i, layers in enumerate(groups) for layer in layers}
        rows = [self.rows.pages[group_of[i]] for i in range(len(states))]
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
        self.rows.tables = ()
        self.recorded.clear()
        self.staged = None

    def capture(self) -> None:
        """Record the commit of 1, 2, 4, ... rows in CUDA graphs: four launches, or more where no kernel of ours serves."""
        pool = torch.cuda.graph_pool_handle()
        self.rows.numbers.zero_()  # null rows: nothing moves while this is recorded
        for n in sorted({*(1 << i for i in range(self.num_requests.bit_length())), self.num_requests}):
            graph = torch.cuda.CUDAGraph()
            self._apply(n)  # compiles what is not yet
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, pool=pool):
                self._apply(n)
            self.recorded[n] = graph

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
        if batch is not None:
            self.rows.stage(batch)

    def step(self, rows: int) -> Step:
        """The step that was staged, of as many rows."""
        if self.staged is None or self.staged.count != rows:
            raise RuntimeError("ssmspec: a speculative row reached a layer before its step was staged")
        return self.rows.step(rows)

    def verify(self, layer: int, x: Tokens) -> Tensor:
        """One layer's windows -> outputs [B, T, HV, V]."""
        return self.policy.verify(layer, self.step(len(x.v)), x)

    def commit(self, num_sampled: Tensor) -> None:
        """Keep what was accepted of every row of the engine's batch, bonus included.

        The engine reports 0 for a prompt chunk that samples nothing; its one token is accepted all the same.
        """
        batch, self.staged = self.staged, None
        if batch is None:
            return
        n = batch.count
        self.rows.accept(num_sampled[batch.rows])
        self.steps += 1
        recorded = next((graph for size, graph in self.recorded.items() if size >= n), None)
        if recorded is None:
            self._apply(n)
        else:
            recorded.replay()

    def _apply(self, n: int) -> None:
        """Commit the first ``n`` rows of the static buffers."""
        count = self.cursors.get("count")
        commit = self.rows.close(n, count, layout.ring(self.serve.policy, self.w).limit)
        self.windows.keep(commit)
        self.policy.accept(commit)

    def describe(self, num_layers: int) -> str:
        """What runs, in one line, with what it takes beside vLLM's pages."""
        fields = [f for f in self.layout if f.name.startswith("rec_")]
        mib = num_layers * (self.num_requests + 1) * sum(f.nbytes for f in fields) / 2**20
        ring = f" L={self.w.limit}," if self.serve.policy == "checkpointing" else ""
        return (
            f"policy={self.serve.policy} mode={self.serve.mode} align={self.w.align or 'off'},"
            f" {num_layers} {self.g.arch.upper()} layers, state {self.g.state_dtype}, T={self.w.max_len},{ring}"
            f" records {mib:.1f} MiB for {self.num_requests} requests,"
            f" kernels {self.serve.kernels(self.device.type)}"
        )

    def report(self) -> dict[str, Any]:
        """What runs, and how often what has happened so far. Reads the device."""
        counts = dict(zip(self.rows.COUNTERS, self.rows.counters.tolist(), strict=True))
        return {**self.serve.to_dict(), "align": self.w.align, "steps": self.steps, **counts}
