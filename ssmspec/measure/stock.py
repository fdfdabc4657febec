"""Recurrences of other projects over a rig's inputs, and layers of stock vLLM: its conv and gated norm around them."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ssmspec.kernels.base import Tokens
from ssmspec.measure.rig import Rig
from ssmspec.pool import storage

MAMBA = "vllm.model_executor.layers.mamba.ops"


def found(module: str, name: str) -> Callable[..., Any]:
    """By name at run time, since nothing here may depend on other engines. Raises ImportError."""
    try:
        call: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except Exception as error:  # an installation that does not fit this torch fails in any way
        raise ImportError(f"{module}.{name} cannot be imported: {error!r:.200}") from error
    if call is None:  # how FlashInfer says that what a kernel needs is missing
        raise ImportError(f"{module}.{name} is there in name only")
    return call


def apart(t: Tokens) -> dict[str, Tensor]:
    """Copies, each dense."""
    return {"q": t.q.contiguous(), "k": t.k.contiguous(), "v": t.v.contiguous()}


class Peer:
    """A state per token of a window; the one that the last step ended in is the next start. Conv and norm are ours."""

    normed = False  # whether ``core`` returns outputs that are normed and gated
    whole = False  # whether conv and norm are its own

    def __init__(self, rig: Rig) -> None:
        g, t = rig.g, rig.w.max_len
        batch, device, ints = rig.step.slots.shape[0], rig.device, torch.int32
        self.rig, self.g, self.t = rig, g, t
        columns = (rig.step.slots[:, None] - 1) * t + 1 + torch.arange(t, device=device)
        self.columns, self.slots = columns.int(), rig.step.slots.int()
        self.accepted = torch.ones(batch, dtype=ints, device=device)
        self.starts = torch.arange(0, batch * t + 1, t, dtype=ints, device=device)
        states = (g.num_layers, self.rows(batch), g.num_v_heads, g.head_v, g.head_k)
        self.states = torch.zeros(states, dtype=storage(g.state_dtype), device=device)
        self.setup()

    def rows(self, batch: int) -> int:
        """Of a layer's states; the first is nobody's."""
        return batch * self.t + 1

    def setup(self) -> None:
        """Find the kernels."""
        raise NotImplementedError

    def core(self, layer: int, x: Tensor) -> Tensor:
        """The recurrence over convolved tokens x [B * T, D] -> [B * T, HV, V] in any leading shape."""
        raise NotImplementedError

    def convolve(self, layer: int) -> Tensor:
        """The step's tokens [B * T, D]."""
        rig = self.rig
        x = rig.conv.verify(layer, rig.step, rig.inputs[layer].x, rig.weights[layer].conv)
        return x.flatten(0, 1)

    def norm(self, layer: int, y: Tensor, z: Tensor) -> Tensor:
        """y, z [B * T, HV, V] -> normed and gated."""
        rig, window = self.rig, self.rig.inputs[layer].z.shape
        return rig.layer.norm(y.view(window), z.view(window), rig.weights[layer].norm, rig.step)

    def stage(self, i: int) -> None:
        """Start step ``i`` where step i - 1 was accepted."""
        if i:
            self.accepted.copy_(self.rig.accepted[(i - 1) % self.rig.steps])

    def verify(self, i: int) -> list[Tensor]:
        """Step ``i``'s outputs [B, T, HV, V], per layer."""
        self.stage(i)
        return [self._layer(layer) for layer in range(self.g.num_layers)]

    def cycle(self) -> None:
        """A step behind the last of a cycle starts as the first: all that differs is where it reads."""
        for i in range(self.rig.steps):
            self.verify(i)

    def cores(self) -> None:
        """A cycle without conv and norm."""
        for i in range(self.rig.steps):
            self.stage(i)
            for layer, p in enumerate(self.rig.inputs):
                self.core(layer, p.x.flatten(0, 1))

    def stages(self) -> None:
        """A cycle without its layers."""
        for i in range(self.rig.steps):
            self.stage(i)

    def _layer(self, layer: int) -> Tensor:
        z = self.rig.inputs[layer].z
        y = self.core(layer, self.convolve(layer)).view(z.shape).flatten(0, 1)
        return (y if self.normed else self.norm(layer, y, z.flatten(0, 1))).view(z.shape)

    def gates(self, layer: int) -> dict[str, Tensor]:
        """A delta rule's, and its constants."""
        p, params = self.rig.inputs[layer], self.rig.params[layer]
        assert p.b is not None
        own = {"a": p.a.flatten(0, 1), "b": p.b.flatten(0, 1)}
        return own | {"A_log": params.A_log, "dt_bias": params.dt_bias}

    def tokens(self, layer: int, x: Tensor) -> Tokens:
        """Views of x [B * T, D] with a batch of one in front."""
        p = self.rig.inputs[layer]
        b = None if p.b is None else p.b.flatten(0, 1)[None]
        return Tokens.unpack(self.g, x[None], p.a.flatten(0, 1)[None], b)

    def by_window(self, layer: int, x: Tensor) -> Tokens:
        """Views of x [B * T, D], window by window."""
        p = self.rig.inputs[layer]
        return Tokens.unpack(self.g, x.view(p.x.shape), p.a, p.b)


class Stock(Peer):
    """A layer of vLLM's own."""

    whole = True

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig)
        g, batch = self.g, len(self.slots)
        inputs = (g.num_layers, batch + 1, g.conv.history + self.t - 1, g.conv.channels)
        self.inputs = torch.zeros(inputs, dtype=storage(g.act_dtype), device=rig.device).mT  # vLLM's default
        self.weights = [w.conv.contiguous() for w in rig.weights]
        self.conv = found(f"{MAMBA}.causal_conv1d", "causal_conv1d_update")

    def convolve(self, layer: int) -> Tensor:
        x, windows = self.rig.inputs[layer].x.flatten(0, 1), {}
        if self.t > 1:
            windows = {
                "num_accepted_tokens": self.accepted,
                "query_start_loc": self.starts,
                "max_query_len": self.t,
            }
        out: Tensor = self.conv(
            x,
            self.inputs[layer],
            self.weights[layer],
            None,
            "silu",
            conv_state_indices=self.slots,
            out=torch.empty_like(x),
            **windows,
        )
        return out
