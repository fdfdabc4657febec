"""The short-conv window: settled inputs, then this step's T. The same for every policy."""

import torch
from torch import Tensor

from ssmspec import layout
from ssmspec.geometry import Conv, DType
from ssmspec.pool import NULL_SLOT, StatePool
from ssmspec.step import Commit, Step


class ConvWindow:
    """Keeps the last (W-1)*dilation accepted inputs of each slot in a pool field [layers, slots, D, history + T].

    An output's bits do not depend on the batch around it: torch's reductions and its silu differ with the shape.
    Verify never touches the settled part, so rolling back is accepting fewer tokens. Between steps it is settled.
    """

    def __init__(self, conv: Conv, pool: StatePool, name: str = "conv") -> None:
        self.conv, self.field = conv, pool[name]

    @staticmethod
    def layout(conv: Conv, max_len: int, act_dtype: DType, name: str = "conv") -> layout.Layout:
        """What a slot holds."""
        return (layout.conv(conv, max_len, act_dtype, name),)

    def verify(self, layer: int, step: Step, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [B, T, D], weight [D, W], bias [D] -> silu(conv(x)) [B, T, D]; writes x behind the settled inputs."""
        rows, history = self.field[layer], self.conv.history
        slots = torch.where(step.lens > 0, step.slots.clamp(min=NULL_SLOT), NULL_SLOT)
        rows[slots, :, history : history + x.shape[1]] = x.mT
        return self._convolve(torch.cat([rows[slots][..., :history], x.mT], -1), weight, bias)

    def accept(self, commit: Commit) -> None:
        """Move the inputs that end at the last accepted token, and at a crossed boundary, to the front."""
        source = self.field[:, commit.slots]
        self._store(source, commit.mark, commit.mark_slots)
        self._store(source, commit.accepted, commit.next_slots)

    def settle(self, slots: Tensor) -> None:
        """Nothing to do: between steps the inputs are settled."""

    def prefill(
        self, layer: int, slots: Tensor, lens: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """A prompt chunk x [B, N, D] of any length: its outputs [B, N, D]; settles the inputs it ends with."""
        rows, history = self.field[layer], self.conv.history
        full = torch.cat([rows[slots][..., :history], x.mT], -1)
        rows[slots, :, :history] = self._ending_at(full[None], lens)[0]
        return self._convolve(full, weight, bias)

    def reset(self, slots: Tensor) -> None:
        """Before the first token the inputs are zeros."""
        self.field[:, slots] = 0

    def _store(self, source: Tensor, n: Tensor, dst: Tensor) -> None:
        self.field[:, dst, :, : self.conv.history] = self._ending_at(source, n)

    def _ending_at(self, source: Tensor, n: Tensor) -> Tensor:
        """source [layers, B, D, .] -> the settled inputs after ``n`` [B] more tokens."""
        index = n[:, None] + torch.arange(self.conv.history, device=n.device)
        return source.gather(-1, index[None, :, None, :].expand(*source.shape[:3], -1))

    def _convolve(self, full: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """full [B, D, history + N] -> [B, N, D]."""
        n = full.shape[-1] - self.conv.history
        y = full.new_zeros(*full.shape[:2], n, dtype=torch.float32)
        for tap in range(self.conv.width):
            at = tap * self.conv.dilation
            y = y + full[..., at : at + n].float() * weight[:, tap, None].float()
        y = y if bias is None else y + bias[:, None].float()
        return (y / (1 + torch.exp(-y))).to(full.dtype).mT.contiguous()
