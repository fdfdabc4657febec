"""The rows of one step in buffers that CUDA graphs may hold: staged from the engine's batch, closed after sampling.

Slots 1..N are the engine's request slots; slot N+r stands for the page that takes the boundary state of request slot r.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ssmspec.pool import NULL_SLOT
from ssmspec.step import Commit, Step


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The speculative rows of one step, as vLLM describes them: those at ``rows`` of its batch."""

    rows: Tensor | slice  # a slice starts at 0
    count: int  # of them
    requests: Tensor  # [batch], vLLM's request slots
    starts: Tensor  # [batch + 1], offsets of their tokens
    ends: Tensor  # [batch], tokens of the request with this step's
    settle: Tensor | None = None  # [count] bool: a prompt's tail, whose page others may read next
    dummy: bool = False  # nobody's rows: vLLM will not say what was accepted


class Rows:
    """In plain torch. ``pages`` [groups, 2N + 1] says where the state of a slot lies this step, per group of layers."""

    COUNTERS = ("rows", "tokens", "flushes", "boundaries")

    def __init__(self, num_requests: int, max_len: int, device: torch.device) -> None:
        self.num_requests, self.max_len, self.device = num_requests, max_len, device
        self.align = 0
        self.tables: tuple[Tensor, ...] = ()  # per group [requests, columns]
        self.counters = torch.zeros(len(self.COUNTERS), dtype=torch.int64, device=device)
        self.pages = torch.zeros(0, self.num_slots, dtype=torch.int64, device=device)
        self.numbers = torch.zeros(6, num_requests, dtype=torch.int64, device=device)
        self.flags = torch.zeros(num_requests, dtype=torch.bool, device=device)

    @property
    def num_slots(self) -> int:
        return 2 * self.num_requests + 1

    def bind(self, tables: Sequence[Tensor], align: int) -> None:
        """Find pages in these block tables; ``align`` tokens are a block, 0: a request has one page."""
        self.tables, self.align = tuple(tables), align
        self.pages = self.pages.new_zeros(len(tables), self.num_slots)

    def step(self, n: int) -> Step:
        """The first ``n`` rows."""
        slots, lens, accepted, next_slots, mark, mark_slots = self.numbers[:, :n].unbind()
        return Step(slots, lens, accepted, next_slots, mark, mark_slots, self.flags[:n], max_len=self.max_len)

    def stage(self, batch: Batch) -> None:
        """Fill every row, and point the slots to their pages; rows behind the batch become null rows."""
        self.numbers.zero_()
        self.flags.zero_()
        n = 0 if batch.dummy else batch.count
        if n == 0:
            return
        if batch.settle is not None:
            self.flags[:n] = batch.settle
        requests, lens = batch.requests[batch.rows].long(), batch.starts.diff()[batch.rows].long()
        computed, slots = batch.ends[batch.rows].long() - lens, requests + 1
        running, mark = torch.zeros_like(slots), torch.zeros_like(slots)
        mark_slots = mark
        if self.align:
            running, column = (computed + lens - 1) // self.align, computed // self.align
            mark = (column + 1) * self.align - computed
            mark = torch.where(mark <= lens, mark, 0)
            beside = torch.where(mark > 0, slots + self.num_requests, NULL_SLOT)
            self._point(beside, requests, column)
            mark_slots = torch.where((mark > 0) & (column == running), slots, beside)
        self._point(slots, requests, running)
        self.numbers[:, :n] = torch.stack([slots, lens, torch.zeros_like(lens), slots, mark, mark_slots])

    def _point(self, slots: Tensor, requests: Tensor, columns: Tensor) -> None:
        found = torch.stack([table[requests, columns] for table in self.tables]).long()
        self.pages[:, slots] = torch.where(slots > NULL_SLOT, found, NULL_SLOT)

    def accept(self, counts: Tensor) -> None:
        """What the engine says of the first rows [n]; 0 of a prompt chunk that samples nothing."""
        self.numbers[2, : len(counts)] = counts

    def close(self, n: int, count: Tensor | None, limit: int) -> Commit:
        """What the first ``n`` rows decided, counted; a live row accepts one token at least. They are empty afterwards.

        ``count``: records of every slot, where they outlive a step; a row with more than ``limit`` flushes.
        """
        step = self.step(n)
        step.accepted.clamp_(min=1)
        commit = step.close()
        live = commit.lens > 0
        flushed = torch.zeros_like(live)
        if count is not None:
            held = count[commit.slots]
            flushed = live & (held > 0) & (held + commit.lens > limit)
        self.counters += torch.stack(
            [live.long(), commit.accepted, flushed.long(), (commit.mark > 0).long()]
        ).sum(1)
        return commit
