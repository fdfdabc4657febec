"""Layers of one policy on a device, and speculative steps through them with acceptance drawn beforehand."""

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from ssmspec import kernels, layout, policies
from ssmspec.acceptance import Acceptance
from ssmspec.geometry import Arch, Geometry, Mode, Window
from ssmspec.kernels.base import Kernels, LayerParams, Tokens
from ssmspec.kernels.conv import ConvWindow
from ssmspec.kernels.layer_step import LayerStep, Projected, Weights, parts
from ssmspec.pool import StatePool, storage
from ssmspec.runtime.content import layer_params
from ssmspec.runtime.rows import Rows
from ssmspec.step import Commit


class Rig:
    """``batch`` requests with full windows, their slots in random order. All of a step runs on the device.

    A layer is everything between its projections: conv, gates, verify with its flushes and records, gated norm; in as
    few launches as there are kernels for, or (not ``fused``) piece by piece.
    """

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
        fused: bool = True,
    ) -> None:
        self.g, self.w, self.steps, self.device = g, w, steps, device
        self.generator = torch.Generator(device).manual_seed(seed)
        self.params = [_on(device, p) for p in layer_params(g, seed)]
        pool = StatePool.allocate(layout.of(policy, g, w), g.num_layers, batch + 1, device)
        snapshots = (
            policy == "native" and w.mode is Mode.FAST
        )  # exact, by kernels that take what was convolved
        fused = fused and backend == "triton" and not snapshots
        made, step = _step(kernels.make(backend, g, w), g, w, fused)
        self.policy = policies.POLICIES[policy](g, w, pool, made, self.params)
        slots = torch.randperm(batch, generator=self.generator, device=device) + 1
        self.rows = _rows(backend)(batch, w.max_len, torch.device(device))
        self.step = self.rows.step(batch)
        for buffer in (self.step.slots, self.step.next_slots):
            buffer.copy_(slots)
        self.policy.start(self.step.slots, self.step.slots)
        drawn = torch.tensor([*acceptance.sample(steps * batch, seed=seed)]).view(steps, batch)
        self.accepted = drawn.to(device)
        self.weights = [self._weights() for _ in range(g.num_layers)]
        window, norm = parts(backend)
        self.conv = self._conv(window, batch)
        self.layer = step(g, self.conv, self.policy.verify, norm.of(g), self.weights)

    @cached_property
    def inputs(self) -> list[Projected]:
        """Of every layer; drawn when a step first needs them."""
        return [self._projected(len(self.step.slots)) for _ in range(self.g.num_layers)]

    def _conv(self, window: type[ConvWindow], batch: int) -> ConvWindow:
        """Channels are neighbours in memory, as in vLLM's default layout of conv states."""
        fields = window.layout(self.g.conv, self.w.max_len, self.g.act_dtype)
        pool = StatePool.allocate(fields, self.g.num_layers, batch + 1, self.device)
        pool.tensors["conv"] = pool["conv"].mT.contiguous().mT
        conv = window(self.g.conv, pool)
        conv.reset(self.step.slots)
        return conv

    def _draw(self, *shape: int) -> Tensor:
        x = torch.randn(*shape, generator=self.generator, device=self.device)
        return x.to(storage(self.g.act_dtype))

    def _projected(self, batch: int) -> Projected:
        g, t = self.g, self.w.max_len
        gates = (g.num_v_heads, g.head_k) if g.arch is Arch.KDA else (g.num_v_heads,)
        a = self._draw(batch, t, *gates)
        if not g.dt_softplus:  # a time step that nothing makes positive has to be
            a = a.abs() / 10
        return Projected(
            x=self._draw(batch, t, g.conv.channels),
            z=self._draw(batch, t, g.num_v_heads, g.head_v),
            a=a,
            b=None if g.arch is Arch.MAMBA2 else self._draw(batch, t, g.num_v_heads),
        )

    def _weights(self) -> Weights:
        """A conv's taps lie channel by channel, so that a program reads neighbours."""
        g = self.g
        values = g.num_v_heads * g.head_v if g.arch is Arch.MAMBA2 else g.head_v
        return Weights(conv=self._draw(g.conv.width, g.conv.channels).mT, norm=self._draw(values))

    def stage(self, i: int) -> None:
        """Open step ``i``: full windows."""
        self.step.lens.fill_(self.w.max_len)
        self.step.accepted.copy_(self.accepted[i % self.steps])

    def verify(self, i: int) -> list[Tensor]:
        """Step ``i``'s outputs, per layer."""
        self.stage(i)
        return [self.layer(layer, self.step, p) for layer, p in enumerate(self.inputs)]

    def recur(self, i: int) -> None:
        """Step ``i`` without conv and norm."""
        self.stage(i)
        for layer, p in enumerate(self.inputs):
            self.policy.verify(layer, self.step, Tokens.unpack(self.g, p.x, p.a, p.b))

    def accept(self) -> None:
        """Close the step in the launches of an engine."""
        self._keep(self.rows.close(len(self.step.slots), None, 0))

    def _keep(self, commit: Commit) -> None:
        self.policy.accept(commit)
        self.conv.accept(commit)

    def spread(self) -> None:
        """Bring the rows to random places of their flush cycle, as requests are that did not start together."""
        places = self.w.limit if self.policy.name == "checkpointing" else 1
        ahead = torch.randint(places, self.step.slots.shape, generator=self.generator, device=self.device)
        for i in range(places):
            self.verify(i)
            self.step.accepted.copy_(ahead > i if places > 1 else self.step.lens)
            self._keep(self.step.close())

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


def _rows(backend: str) -> type[Rows]:
    if backend != "triton":
        return Rows
    from ssmspec.runtime.launched_rows import LaunchedRows

    return LaunchedRows


def _step(made: Kernels, g: Geometry, w: Window, fused: bool) -> tuple[Kernels, type[LayerStep]]:
    """With the conv in the launch in front of verify, where there are kernels for that."""
    if fused:
        from ssmspec.kernels import fast_layer, hopper_layer

        if w.mode is Mode.FAST:
            return made, fast_layer.FastStep

        if hopper_layer.serves(g, w):
            return replace(made, verify=hopper_layer.FusedVerify(g, w, made.verify)), hopper_layer.FusedStep
    return made, LayerStep


def _on(device: str, p: LayerParams) -> LayerParams:
    skip = None if p.D is None else p.D.to(device)
    return replace(p, A_log=p.A_log.to(device), dt_bias=p.dt_bias.to(device), D=skip)
