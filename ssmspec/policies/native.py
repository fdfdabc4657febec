"""Native snapshots: keep the state after every draft; to accept is to remember which one won."""

import torch
from torch import Tensor

from ssmspec.kernels.base import Plan, Tokens
from ssmspec.policies.base import Policy
from ssmspec.pool import NULL_SLOT
from ssmspec.step import Commit, Step

LOST = -1  # winner of a slot whose window was dropped: its start state is overwritten


class Native(Policy):
    name = "native"

    def checkpoint(self, layer: int) -> Tensor:
        return self.pool["snapshots"][layer][:, 0]

    def verify(self, layer: int, step: Step, x: Tokens) -> Tensor:
        # the winner's column may be overwritten by this window: a program loads its tile before it stores any
        columns = torch.arange(x.v.shape[1], device=step.slots.device)
        start = self._winner(step.slots)
        snapshots = torch.where(start[:, None] > NULL_SLOT, self._at(step.slots[:, None], columns), NULL_SLOT)
        noise = self._noise(step.slots)
        return self.kernels.verify(self.layers[layer], x, start, step.lens, snapshots=snapshots, noise=noise)

    def accept(self, commit: Commit) -> None:
        winner = commit.accepted - 1  # LOST where the window was dropped
        here = torch.where(commit.lens > 0, commit.slots, NULL_SLOT)
        self.pool["winner"][here] = winner.int()
        column = winner.clamp(min=0)
        to_front = commit.settles & (commit.accepted > 0)
        front = torch.where(to_front, commit.next_slots, NULL_SLOT)
        # the boundary first: it may stay in the slot that is left, the accepted state may not overwrite its column
        self._copy(self._at(commit.slots, (commit.mark - 1).clamp(min=0)), self._at(commit.mark_slots, 0))
        self._copy(self._at(commit.slots, column), self._at(front, 0))
        self._place(commit, commit.mark, commit.accepted)
        self.reset(front)
        self.reset(commit.mark_slots)

    def settle(self, slots: Tensor) -> None:
        start = self._winner(slots)
        self._copy(start, torch.where(start > NULL_SLOT, self._at(slots, 0), NULL_SLOT))
        self.pool["winner"][slots] = self.pool["winner"][slots].clamp(max=0)  # a lost slot stays lost

    def reset(self, slots: Tensor) -> None:
        self.pool["winner"].index_fill_(0, slots, 0)  # storing a number would copy it from the host

    def _rows(self, layer: int) -> Tensor:
        snapshots = self.pool["snapshots"][layer]
        try:
            return snapshots.view(-1, *snapshots.shape[2:])  # [slots * T, HV, V, K]
        except RuntimeError:  # a copy would lose every update
            slot, close = snapshots.stride(0), snapshots.shape[1] * snapshots.stride(1)
            raise ValueError(f"snapshots has a slot stride of {slot}, and needs {close}") from None

    def _checkpoint_rows(self, slots: Tensor) -> Tensor:
        return self._at(slots, 0)

    def _at(self, slots: Tensor, column: Tensor | int) -> Tensor:
        return slots * self.w.max_len + column

    def _winner(self, slots: Tensor) -> Tensor:
        """The row a slot's state lives in; null for null and lost slots."""
        winner = self.pool["winner"][slots]
        return torch.where((slots > NULL_SLOT) & (winner > LOST), self._at(slots, winner), NULL_SLOT)

    def _copy(self, src: Tensor, dst: Tensor) -> None:
        """To copy is to fold nothing."""
        none = torch.zeros_like(src)
        self.kernels.fold(
            self.layers, Plan(src=src, base=none, count=none, dst=dst, mark=none, mark_dst=none)
        )
