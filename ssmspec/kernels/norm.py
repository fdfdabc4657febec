"""RMSNorm of a layer's outputs, gated by the other half of its projection."""

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from ssmspec.geometry import Arch, Geometry
from ssmspec.pool import NULL_SLOT
from ssmspec.step import Step


class Gate(StrEnum):
    SILU = "silu"  # Qwen3-Next, Qwen3.5, Mamba2
    SIGMOID = "sigmoid"  # Kimi-Linear


@dataclass(frozen=True, kw_only=True)
class GatedNorm:
    """How a model norms and gates, over ``group`` neighbouring values; vLLM 0.33.0's ``RMSNormGated``."""

    group: int  # V for the delta rules: every head has its own norm
    gate: Gate = Gate.SILU
    gate_first: bool = False  # Mamba2 norms what is gated already
    eps: float = 1e-6

    @classmethod
    def of(cls, g: Geometry) -> "GatedNorm":
        """As Qwen3-Next and Qwen3.5 have it (GDN), Kimi-Linear (KDA), and Nemotron-H (Mamba2: a norm per group)."""
        if g.arch is Arch.MAMBA2:
            return cls(group=g.group * g.head_v, gate_first=True, eps=1e-5)
        if g.arch is Arch.KDA:
            return cls(group=g.head_v, gate=Gate.SIGMOID, eps=1e-5)
        return cls(group=g.head_v)

    def __call__(self, y: Tensor, z: Tensor, weight: Tensor, step: Step) -> Tensor:
        """y, z [B, T, HV, V], weight [group] or [HV * V] -> normed and gated [B, T, HV, V] of y's dtype.

        fp32 inside; zero on null rows and behind ``lens``, whatever z holds there.
        """
        batch, t = y.shape[:2]
        gate = z.float().sigmoid() * (z.float() if self.gate is Gate.SILU else 1)
        x = y.float() * gate if self.gate_first else y.float()
        groups = x.reshape(batch, t, -1, self.group)
        normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        x = (normed * weight.float().view(-1, self.group)).view(y.shape)
        lens = torch.where(step.slots > NULL_SLOT, step.lens, 0)
        live = torch.arange(t, device=y.device) < lens[:, None]
        x = x if self.gate_first else x * gate
        return torch.where(live[..., None, None], x, 0).to(y.dtype)
