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
        self._fold(commit, self.ring)

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
        for name in ("base", "count"):
            self.pool[name].index_fill_(0, slots, 0)
