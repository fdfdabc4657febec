"""The layers of a made-up model under one policy: all that is stored and computed on its device, by slot number."""

import os
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ssmspec import kernels, layout, policies
from ssmspec.kernels.base import Tokens
from ssmspec.kernels.conv import ConvWindow
from ssmspec.pool import StatePool
from ssmspec.runtime.content import Content, layer_params
from ssmspec.runtime.setup import Device, Setup
from ssmspec.step import Commit, Step

T = TypeVar("T", Step, Commit)


class Layers:
    """Pool, policy and conv window. What comes back is on the host, in one copy per call."""

    def __init__(self, policy: str, setup: Setup) -> None:
        """Raises ValueError where the backend cannot compute on the device."""
        _check(setup)
        g, w, device = setup.geometry, setup.window, setup.device
        held = (*layout.of(policy, g, w), layout.conv(g.conv, w.max_len, g.act_dtype))
        self.g, self.w, self.device, self._poison = g, w, device, setup.poison
        self.pool = StatePool.allocate(held, g.num_layers, setup.slots, device)
        if setup.poison is not None:
            self.pool.poison(setup.poison)
        params = layer_params(g, setup.seed, device)
        self.policy = policies.make(policy, g, w, self.pool, params, setup.backend)
        self.conv, self.content = ConvWindow(g.conv, self.pool), Content(g, setup.seed, device)

    def start(self, slot: int, seed: int) -> None:
        """A request without a past enters a slot."""
        at = self._index(slot)
        self.policy.start(at, self._index(seed))
        self.conv.reset(at)

    def start_from(self, prefix: int, slot: int, seed: int, tokens: int) -> None:
        """A request enters a slot with the state of a cached prefix of that many tokens."""
        self.copy(prefix, slot)
        self.policy.identify(self._index(slot), self._index(seed), self._index(tokens))

    def prefill(self, slot: int, ids: Sequence[int]) -> Sequence[Tensor]:
        """A prompt chunk behind a settled state -> per layer [N, HV, V]."""
        at, n, outs = self._index(slot), self._index(len(ids)), []
        for layer, (x, a, b) in enumerate(self.content.inputs([ids], len(ids))):
            packed = self.conv.prefill(layer, at, n, x, self.content.conv_weight[layer])
            outs.append(self.policy.prefill(layer, at, n, Tokens.unpack(self.g, packed, a, b))[0])
        self.policy.advance(at, n)
        return _on_host(outs)

    def verify(self, step: Step, ids: Sequence[Sequence[int]]) -> Sequence[Tensor]:
        """A staged step's windows, token ids per row -> per layer [B, T, HV, V]."""
        step, outs = self._moved(step), []
        for layer, (x, a, b) in enumerate(self.content.inputs(ids, self.w.max_len)):
            packed = self.conv.verify(layer, step, x, self.content.conv_weight[layer])
            outs.append(self.policy.verify(layer, step, Tokens.unpack(self.g, packed, a, b)))
        return _on_host(outs)

    def accept(self, commit: Commit) -> None:
        commit = self._moved(commit)
        self.conv.accept(commit)
        self.policy.accept(commit)

    def settle(self, slot: int) -> None:
        self.policy.settle(self._index(slot))

    def look(self, slot: int) -> Sequence[tuple[Tensor, Tensor]]:
        """Of a settled slot, per layer: the state [HV, V, K], and the conv inputs [D, (W-1)*dilation]."""
        states = _on_host([self.policy.checkpoint(layer)[slot] for layer in range(self.g.num_layers)])
        inputs = self.conv.field[:, slot, :, : self.g.conv.history].clone().cpu()
        return [*zip(states, inputs, strict=True)]

    def copy(self, src: int, dst: int) -> None:
        self.pool.copy(self._index(src), self._index(dst))

    def wipe(self, slot: int) -> None:
        """Fill a slot that nobody holds."""
        if self._poison is not None:
            self.pool.poison(self._poison, self._index(slot))

    def _index(self, value: int) -> Tensor:
        return torch.tensor([value], dtype=torch.int64).to(self.device, non_blocking=True)

    def _moved(self, what: T) -> T:
        held: dict[str, Any] = {f.name: getattr(what, f.name) for f in fields(what)}
        moved = {n: v.to(self.device, non_blocking=True) for n, v in held.items() if isinstance(v, Tensor)}
        return replace(what, **(held | moved))


def _on_host(layers: Sequence[Tensor]) -> Sequence[Tensor]:
    return torch.stack([*layers]).cpu().unbind() if layers else ()


def _check(setup: Setup) -> None:
    if setup.device is Device.CUDA and not torch.cuda.is_available():
        why = "device=cuda: PyTorch finds no CUDA device; device=cpu needs none"
        if setup.backend == "triton":
            why = kernels.NEEDS_GPU
        raise ValueError(why)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if setup.backend == "triton" and setup.device is Device.CPU and not interpreted:
        raise ValueError(
            "device=cpu: backend=triton computes there with TRITON_INTERPRET=1 set before Python starts only;"
            " take device=cuda, or backend=torch"
        )
