"""The policy interface: who writes the recurrent state, and when."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from ssmspec import layout
from ssmspec.geometry import Geometry, Window
from ssmspec.kernels.base import Kernels, Layer, LayerParams, Noise, Tokens
from ssmspec.layout import Ring
from ssmspec.pool import NULL_SLOT, StatePool, indexable
from ssmspec.step import Commit, Step


class Policy(ABC):
    """A slot goes reset -> (prefill) -> [verify per layer -> accept once]* -> settle -> checkpoint read.

    No method may read a device value on the host, allocate a tensor that a captured graph keeps, or index by
    batch row across steps. Rows on NULL_SLOT change nothing.
    """

    name: ClassVar[str]

    def __init__(
        self, g: Geometry, w: Window, pool: StatePool, kernels: Kernels, params: Sequence[LayerParams]
    ) -> None:
        self.g, self.w, self.pool, self.kernels = g, w, pool, kernels
        self.layers = tuple(Layer.of(pool, p, self._rows(p.index)) for p in params)

    @classmethod
    def layout(cls, g: Geometry, w: Window) -> layout.Layout:
        """What a slot holds. Pure: capacity, traffic and the vLLM page size are computed from it."""
        return layout.of(cls.name, g, w)

    @abstractmethod
    def verify(self, layer: int, step: Step, x: Tokens) -> Tensor:
        """The window's outputs [B, T, HV, V]. Captured; once per layer; moves no cursor."""

    @abstractmethod
    def accept(self, commit: Commit) -> None:
        """Keep the first ``accepted`` tokens of each window and forget the rest; all layers, after sampling.

        Afterwards the state lives in ``next_slots``; a crossed boundary's state is exact and settled in
        ``mark_slots``, and the checkpoint of a ``force_flush`` row is exact in place.
        """

    @abstractmethod
    def settle(self, slots: Tensor) -> None:
        """Make ``checkpoint(layer)[slots]`` the state after the last accepted token. Idempotent."""

    @abstractmethod
    def reset(self, slots: Tensor) -> None:
        """Declare ``checkpoint(layer)[slots]`` to be the state: nothing is pending. For admit, prefill, restore, free."""

    def checkpoint(self, layer: int) -> Tensor:
        """[slots, HV, V, K] view that prefill, prefix hits and offload read and write; only of settled slots."""
        return self.pool["state"][layer]

    def start(self, slots: Tensor, seeds: Tensor) -> None:
        """Slots of requests without a past: a zero state, whatever the slots held before."""
        for layer in self.layers:
            self.checkpoint(layer.params.index)[slots] = 0
            if layer.read is not None:
                indexable(layer.read)[slots] = 0
        self.reset(slots)
        self.identify(slots, seeds, torch.zeros_like(slots))

    def prefill(self, layer: int, slots: Tensor, lens: Tensor, x: Tokens) -> Tensor:
        """Run a prompt chunk [B, N, ...] from the checkpoints of settled slots and store where it ends -> [B, N, HV, V].

        After the last layer call ``advance``.
        """
        last = torch.arange(1, x.v.shape[1] + 1, device=slots.device) == lens[:, None]
        rows = self._checkpoint_rows(slots)
        return self.kernels.verify(
            self.layers[layer],
            x,
            rows,
            lens,
            snapshots=torch.where(last, rows[:, None], NULL_SLOT),
            noise=self._noise(slots),
        )

    def advance(self, slots: Tensor, lens: Tensor) -> None:
        """The checkpoints of ``slots`` now cover ``lens`` more tokens, and nothing is pending."""
        self._shift(slots, lens)
        self.reset(slots)

    def identify(self, slots: Tensor, seeds: Tensor, positions: Tensor) -> None:
        """Say whose state a slot holds and how many tokens it covers; stochastic rounding draws from both."""
        if "seed" in self.pool:
            self.pool["seed"][slots] = seeds.int()
            self.pool["position"][slots] = positions.int()

    def _rows(self, layer: int) -> Tensor:
        """The rows that the kernels index."""
        return self.pool["state"][layer]

    def _checkpoint_rows(self, slots: Tensor) -> Tensor:
        return slots

    def _noise(self, slots: Tensor) -> Noise | None:
        if "seed" not in self.pool:
            return None
        return Noise(seed=self.pool["seed"][slots], position=self.pool["position"][slots])

    def _shift(self, slots: Tensor, by: Tensor) -> None:
        if "seed" in self.pool:
            self.pool["position"][slots] += by.int()

    def _place(self, commit: Commit, boundary: Tensor, final: Tensor) -> None:
        """Tell the boundary and the next slot whose state they hold, and how many tokens past the checkpoint."""
        if "seed" in self.pool:
            seed, position = self.pool["seed"][commit.slots], self.pool["position"][commit.slots]
            for slots, ahead in ((commit.mark_slots, boundary), (commit.next_slots, final)):
                self.pool["seed"][slots] = seed
                self.pool["position"][slots] = position + ahead.int()

    def _fold(self, commit: Commit, ring: Ring) -> None:
        """Move the cursors; store a crossed boundary's state, and where it is due the accepted one, in one pass."""
        plan = self.kernels.advance(self.pool, commit, ring)
        self.kernels.fold(self.layers, replace(plan, noise=self._noise(commit.slots)))
        self._place(commit, plan.mark, plan.count)
