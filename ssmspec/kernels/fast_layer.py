"""A layer's step in fast mode: its norm in the window's launch, and its conv in the launch of the couplings."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from ssmspec.geometry import Arch, Conv, Geometry
from ssmspec.kernels import fast, fast_convolve
from ssmspec.kernels.base import Layer, Tokens
from ssmspec.kernels.conv_triton import FEW, SHORT, ConvRing, shape_of
from ssmspec.kernels.fast_call import Gated
from ssmspec.kernels.fast_shape import Cursors, Shape
from ssmspec.kernels.fast_tile import Call
from ssmspec.kernels.hopper_layer import aligned
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
class Settled:
    """A layer's conv, and its inputs in front of the window: in rings, or in pages, where they lie in front, in order."""

    conv: Conv
    field: Tensor  # [rows, D, inputs]
    at: Tensor | None = None  # [slots], a ring's position behind them; None: pages
    pages: Tensor | None = None  # [slots], the row of each; None: its number


@dataclass(frozen=True, kw_only=True)
class Unconvolved(Gated):
    """Tokens whose q, k and v are room for what the conv makes of ``x``."""

    settled: Settled
    packed: Tensor  # the room as one, [B, T, D]
    x: Tensor  # [B, T, D]
    taps: Tensor  # [D, W], or [W, D].mT
    bias: Tensor | None

    @classmethod
    def of(
        cls, g: Geometry, p: Projected, settled: Settled, taps: Tensor, bias: Tensor | None, **gated: Any
    ) -> "Unconvolved":
        """With room of its own; ``gated``: what is left of Gated."""
        room = torch.empty(p.x.shape, dtype=p.x.dtype, device=p.x.device)
        t = vars(Tokens.unpack(g, room, p.a, p.b))
        return cls(**t, z=p.z, settled=settled, packed=room, x=p.x, taps=taps, bias=bias, **gated)


class FastStep(LayerStep):
    """A LayerStep whose ``verify`` is of a policy over fast.make_verify with ``couple`` of this module."""

    def __call__(self, layer: int, step: Step, p: Projected) -> Tensor:
        w, conv = self.weights[layer], self.conv
        gated: dict[str, Any] = {"norm": self.norm, "weight": w.norm, "step": step}
        if isinstance(conv, ConvRing):
            settled = Settled(conv=conv.conv, field=conv.field[layer], at=conv.at)
            if merges(self.g, settled, p.x, w.conv):
                x = Unconvolved.of(self.g, p, settled, w.conv, w.conv_bias, **gated)
                return self.verify(layer, step, x)
            mixed = conv.verify(layer, step, p.x, w.conv, w.conv_bias, fast=True)
        else:
            mixed = conv.verify(layer, step, p.x, w.conv, w.conv_bias)
        t = Tokens.unpack(self.g, mixed, p.a, p.b)
        return self.verify(layer, step, Gated(**vars(t), z=p.z, **gated))


def merges(g: Geometry, settled: Settled, x: Tensor, taps: Tensor) -> bool:
    """Whether the merged kernel serves, and is faster: longer windows are convolved faster by many small programs.

    In pages inputs are moved by the program that reads them, which must be the only one.
    """
    batch, tokens = x.shape[:2]
    return (
        g.arch is not Arch.KDA
        and (tokens <= (LONGEST if g.arch is Arch.GDN else SHORT) or batch <= FEW)
        and (settled.at is not None or fast.together(g) == g.group)
        and (taps.mT.is_contiguous() or _packed(taps, x.dtype))
        and aligned(x, settled.field.mT)
    )


def _packed(taps: Tensor, dtype: torch.dtype) -> bool:
    """Whether a channel's are one load of 8 bytes, and of the inputs' type."""
    four = taps.shape[1] == 4 and taps.element_size() == 2
    return four and taps.dtype == dtype and taps.is_contiguous() and taps.data_ptr() % 16 == 0


def couple(g: Geometry, layer: Layer, x: Tokens, call: Call, at: Cursors, c: Shape) -> None:
    """As fast.couple, with the conv in the same launch for Unconvolved tokens."""
    if not isinstance(x, Unconvolved):
        return fast.couple(g, layer, x, call, at, c)
    p, inputs, field, batch = layer.params, x.settled, x.settled.field, call.out.shape[0]
    how, packed = cut(batch), not x.taps.mT.is_contiguous()
    w = shape_of(inputs.conv, field, c.T, how.block, fast=True, packed=packed)
    programs = c.HV // c.HEADS + triton.cdiv(c.HV * c.V, w.BLOCK) + 1
    fast_convolve.convolve_and_couple[(programs, batch)](
        call.w,
        fast_convolve.Conv(
            x.x, x.x.stride(0), x.x.stride(1), field, field.stride(0), field.stride(2), inputs.at, inputs.pages,
            x.step.slots, x.taps.view(torch.int64) if packed else x.taps, x.bias, x.packed,
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
