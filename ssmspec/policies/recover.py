"""Recover: verify from a read-only checkpoint, then replay the accepted tokens and write the state once."""

from torch import Tensor

from ssmspec import layout
from ssmspec.kernels.base import Tokens
from ssmspec.policies.base import Policy
from ssmspec.step import Commit, Step


class Recover(Policy):
    name = "recover"

    def verify(self, layer: int, step: Step, x: Tokens) -> Tensor:
        return self.kernels.verify(self.layers[layer], x, step.slots, step.lens)

    def accept(self, commit: Commit) -> None:
        self._fold(commit, layout.ring(self.name, self.w))

    def settle(self, slots: Tensor) -> None:
        """Nothing to do: the checkpoint is the state between steps."""

    def reset(self, slots: Tensor) -> None:
        """Nothing to do: records never outlive a step."""
