"""Layers of one policy on a device, and speculative steps through them with acceptance drawn beforehand."""

from dataclasses import replace

import torch
from torch import Tensor

from ssmspec import layout, policies
from ssmspec.acceptance import Acceptance
from ssmspec.geometry import Arch, Geometry, Window
from ssmspec.kernels.base import Tokens
from ssmspec.pool import StatePool, storage
from ssmspec.runtime.content import layer_params
from ssmspec.step import Step


class Rig:
    """``batch`` requests with full windows, their slots in random order. All of a step runs on the device."""

    def __init__(
        self,
        policy: str,
        g: Geometry,
        w: Window,
        batch: int,
        acceptance: Acceptance,
        *,
        steps: int,
        seed: int,
        device: str,
        backend: str,
    ) -> None:
        self.g, self.w, self.steps = g, w, steps
        generator = torch.Generator().manual_seed(seed)
        pool = StatePool.allocate(layout.of(policy, g, w), g.num_layers, batch + 1, device)
        params = [
            replace(
                p,
                A_log=p.A_log.to(device),
                dt_bias=p.dt_bias.to(device),
                D=None if p.D is None else p.D.to(device),
            )
            for p in layer_params(g, seed)
        ]
        self.policy = policies.make(policy, g, w, pool, params, backend)
        slots = torch.randperm(batch, generator=generator) + 1
        self.step = Step.empty(batch, w.max_len, device)
        for buffer in (self.step.slots, self.step.next_slots):
            buffer.copy_(slots)
        self.policy.start(self.step.slots, self.step.slots)
        drawn = torch.tensor([*acceptance.sample(steps * batch, seed=seed)]).view(steps, batch)
        self.accepted = drawn.to(device)
        self.inputs = [self._tokens(generator, batch, device) for _ in range(g.num_layers)]

    def _tokens(self, generator: torch.Generator, batch: int, device: str) -> Tokens:
        g = self.g
        keys, values = 2 * g.num_k_heads * g.head_k, g.num_v_heads * g.head_v
        gates = (g.num_v_heads, g.head_k) if g.arch is Arch.KDA else (g.num_v_heads,)

        def draw(*shape: int) -> Tensor:
            x = torch.randn(batch, self.w.max_len, *shape, generator=generator)
            return x.to(storage(g.act_dtype)).to(device)

        a, b = draw(*gates), None if g.arch is Arch.MAMBA2 else draw(g.num_v_heads)
        if not g.dt_softplus:  # a time step that nothing makes positive has to be
            a = a.abs() / 10
        return Tokens.unpack(g, draw(keys + values), a, b)

    def verify(self, i: int) -> list[Tensor]:
        """Step ``i``'s outputs, per layer."""
        self.step.lens.fill_(self.w.max_len)
        self.step.accepted.copy_(self.accepted[i % self.steps])
        return [self.policy.verify(layer, self.step, x) for layer, x in enumerate(self.inputs)]

    def accept(self) -> None:
        self.policy.accept(self.step.close())

    def cycle(self) -> None:
        """All steps, one after another."""
        for i in range(self.steps):
            self.verify(i)
            self.accept()

    def settled(self) -> Tensor:
        """The states of all requests, in the order of the batch."""
        self.policy.settle(self.step.slots)
        return torch.stack(
            [self.policy.checkpoint(i)[self.step.slots].float() for i in range(self.g.num_layers)]
        )
