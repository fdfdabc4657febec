"""A layer's step in fast mode: its norm in the window's launch, and its conv in the launch of the couplings."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ssmspec.geometry import Arch, Geometry
from ssmspec.kernels import fast
from ssmspec.kernels.base import Layer, Tokens
from ssmspec.kernels.conv_triton import FEW, SHORT, ConvRing
from ssmspec.kernels.fast_call import Gated
from ssmspec.kernels.fast_convolve import Conv, convolve_and_couple
from ssmspec.kernels.fast_shape import Cursors, Shape
from ssmspec.kernels.fast_tile import Call
from ssmspec.kernels.hopper_layer import _aligned
from ssmspec.kernels.layer_step import LayerStep, Projected
from ssmspec.step import Step

LONGEST = 8  # tokens of GDN's merged windows, where rows are many


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How the merged launch is cut up among programs of one warp."""

    block: int = 256  # channels of values of a program, 8 in a lane
    registers: int | None = 128  # of a thread, at most


def cut(batch: int) -> Cut:
    """Few rows are spread over more programs, and a program may have all registers then."""
    if batch <= FEW:
        return Cut(block=64, registers=None)
    return Cut()


@dataclass(frozen=True, kw_only=True)
class Unconvolved(Gated):
    """Tokens whose q, k and v are room for what the conv makes of ``x``."""

    ring: ConvRing
    index: int  # of the layer in the ring
    packed: Tensor  # the room as one, [B, T, D]
    x: Tensor  # [B, T, D]
    taps: Tensor  # [W, D]
    bias: Tensor | None


class FastStep(LayerStep):
    """A LayerStep whose ``verify`` is of a policy over fast.make_verify with ``couple`` of this module."""

    def __call__(self, layer: int, step: Step, p: Projected) -> Tensor:
        w, conv = self.weights[layer], self.conv
        ring = conv if isinstance(conv, ConvRing) and _fits(self.g, conv, layer, p, w.conv) else None
        if ring:
            x = torch.empty(p.x.shape, dtype=p.x.dtype, device=p.x.device)
        elif isinstance(conv, ConvRing):
            x = conv.verify(layer, step, p.x, w.conv, w.conv_bias, fast=True)
        else:
            x = conv.verify(layer, step, p.x, w.conv, w.conv_bias)
        t = Tokens.unpack(self.g, x, p.a, p.b)
        tokens = Gated(**vars(t), norm=self.norm, z=p.z, weight=w.norm, step=step)
        if ring:
            tokens = Unconvolved(
                **vars(tokens), ring=ring, index=layer, packed=x, x=p.x, taps=w.conv.mT, bias=w.conv_bias
            )
        return self.verify(layer, step, tokens)


def _fits(g: Geometry, conv: ConvRing, layer: int, p: Projected, weight: Tensor) -> bool:
    """Whether the merged kernel serves, and is faster: longer windows are convolved faster by many small programs."""
    taps = weight.mT
    batch, tokens = p.x.shape[:2]
    return (
        g.arch is not Arch.KDA
        and (tokens <= (LONGEST if g.arch is Arch.GDN else SHORT) or batch <= FEW)
        and taps.is_contiguous()
        and _aligned(p.x, conv.field[layer].mT)
    )


def couple(g: Geometry, layer: Layer, x: Tokens, call: Call, at: Cursors, c: Shape) -> None:
    """As fast.couple, with the conv in the same launch for Unconvolved tokens."""
    if not isinstance(x, Unconvolved):
        return fast.couple(g, layer, x, call, at, c)
    p, field, batch = layer.params, x.ring.field[x.index], call.out.shape[0]
    how = cut(batch)
    w = x.ring.shape(c.T, how.block, fast=True)
    programs = c.HV // c.HEADS + triton.cdiv(c.HV * c.V, w.BLOCK) + 1
    convolve_and_couple[(programs, batch)](
        call.w,
        Conv(
            x.x, x.x.stride(0), x.x.stride(1), field, field.stride(0), field.stride(2), x.ring.at, x.step.slots,
            x.taps, x.bias, x.packed,
        ),
        call.x,
        call.x_step,
        p.A_log,
        p.dt_bias,
        p.D,
        at,
        call.rec,
        call.rec_step,
        fast._operand(g),
        w,
        c,
        num_warps=1,
        maxnreg=how.registers,
        enable_fp_fusion=x.x.element_size() == x.taps.element_size() == 2,  # else an fma would round once, not twice
    )  # fmt: skip
