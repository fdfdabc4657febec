"""The two replay policies: a checkpoint and, behind it, a ring of committed records per slot."""

import torch
from torch import Tensor

from ssmspec import layout
from ssmspec.kernels.base import History, Plan, Tokens
from ssmspec.policies.base import Policy
from ssmspec.pool import NULL_SLOT
from ssmspec.step import Commit, Step


class RingPolicy(Policy):
    """To accept is to move a cursor; the verify that would overfill the ring first folds it into the checkpoint.

    Records of a window go behind the committed ones, at (base + count + t) mod R with R >= L + T, so no program
    of a launch writes what another reads.
    """

    @property
    def ring(self) -> layout.Ring:
        return layout.ring(self.name, self.w)

    def verify(self, layer: int, step: Step, x: Tokens) -> Tensor:
        pool = self.pool
        ends = pool.tensors.get("ends")
        history = History(base=pool["base"], count=pool["count"], limit=self.ring.limit, ends=ends)
        noise = self._noise(step.slots)
        return self.kernels.verify(self.layers[layer], x, step.slots, step.lens, history=history, noise=noise)

    def accept(self, commit: Commit) -> None:
        base, count = self.pool["base"][commit.slots], self.pool["count"][commit.slots]
        flushed = (commit.lens > 0) & (count + commit.lens > self.ring.limit)
        folded = torch.where(flushed, count, 0)  # by this step's verify
        base, count = base + folded, count - folded
        total = count + commit.accepted
        self._shift(commit.slots, folded)
        ends = self._mark_end(commit, base + count)
        keep = commit.settles & (total > 0)
        self._fold(commit, base, count, keep, ends)
        self._place(commit, count + commit.mark, torch.where(keep, total, 0))
        self.reset(torch.where(commit.moved, commit.slots, NULL_SLOT))
        self.reset(commit.mark_slots)
        self._set(commit.next_slots, base, torch.where(keep, 0, total))
        if ends is not None:
            self.pool["ends"][commit.next_slots] = ends

    def settle(self, slots: Tensor) -> None:
        zero, count = torch.zeros_like(slots), self.pool["count"][slots]
        self.kernels.fold(
            self.layers,
            Plan(
                src=slots,
                base=self.pool["base"][slots],
                count=count,
                dst=torch.where(count > 0, slots, NULL_SLOT),
                mark=zero,
                mark_dst=zero,
                ends=self.pool["ends"][slots] if "ends" in self.pool else None,
                noise=self._noise(slots),
            ),
        )
        self.advance(slots, count)

    def reset(self, slots: Tensor) -> None:
        self._set(slots, torch.zeros_like(slots), torch.zeros_like(slots))

    def _set(self, slots: Tensor, base: Tensor, count: Tensor) -> None:
        self.pool["base"][slots] = (base % self.ring.capacity).int()
        self.pool["count"][slots] = count.int()

    def _mark_end(self, commit: Commit, first: Tensor) -> Tensor | None:
        """Forget the ends that the window's ring positions had, and set one at its last accepted token."""
        if "ends" not in self.pool:
            return None
        ends = self.pool["ends"][commit.slots]
        for t in range(self.w.max_len):
            bit = torch.ones_like(ends) << ((first + t) % self.ring.capacity).long()
            ends = torch.where(commit.lens > t, ends & ~bit, ends)
            ends = torch.where(commit.accepted == t + 1, ends | bit, ends)
        return ends
