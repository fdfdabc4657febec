"""Gated RMSNorm as a Triton kernel."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from ssmspec.kernels.heads import power_of_2
from ssmspec.kernels.norm import Gate, GatedNorm
from ssmspec.step import Step

TILE, WARPS = 1024, 4  # values and warps of a program


class Shape(NamedTuple):
    """What the kernel is compiled for."""

    HV: int
    V: int
    GROUP: int
    PG: int  # GROUP, to a power of 2
    GROUPS: int  # of a program
    SHARED: bool  # all groups have the same weights
    SIGMOID: bool
    GATE_FIRST: bool
    EPS: float
    COMPILED: bool


@triton.jit
def _gate(z, c: tl.constexpr):
    above = 1.0 if c.SIGMOID else z
    if c.COMPILED:  # within some fp32 ulp, at a quarter of the instructions
        return libdevice.fast_dividef(above, 1 + libdevice.fast_expf(-z))
    else:
        return above / (1 + tl.exp(-z))


@triton.jit
def norm_and_gate(y, z, z_row, z_token, z_head, weight, slots, lens, out, T, c: tl.constexpr):
    """GROUPS groups of one token. A program reads its tile before it writes, so ``out`` may be ``y``."""
    b, t = tl.program_id(2).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, c.PG)[None, :]
    value = (tl.program_id(0) * c.GROUPS + tl.arange(0, c.GROUPS)[:, None]) * c.GROUP + i
    inside = (value < (c.HV * c.V)) & (i < c.GROUP)
    live = (tl.load(slots + b) > 0) & (t < tl.load(lens + b))
    at = (b * T + t) * (c.HV * c.V) + value
    x = tl.load(y + at, mask=inside & live, other=0.0).to(tl.float32)
    of_z = b * z_row + t.to(tl.int64) * z_token + (value // c.V) * z_head + value % c.V
    g = _gate(tl.load(z + of_z, mask=inside & live, other=0.0).to(tl.float32), c)
    w = tl.load(weight + (i if c.SHARED else value), mask=inside, other=0.0).to(tl.float32)
    if c.GATE_FIRST:
        x = x * g
    x = x * tl.rsqrt(tl.sum(x * x, 1) / c.GROUP + c.EPS)[:, None] * w
    if not c.GATE_FIRST:
        x = x * g
    tl.store(out + at, x.to(out.dtype.element_ty), mask=inside)


class TritonNorm(GatedNorm):
    """A GatedNorm in one launch, in place."""

    def __call__(self, y: Tensor, z: Tensor, weight: Tensor, step: Step) -> Tensor:
        """As GatedNorm's; ``y`` is contiguous, and holds the result."""
        batch, t, hv, v = y.shape
        assert y.is_contiguous()
        assert z.shape == y.shape
        assert z.stride(3) == 1
        assert weight.numel() in (self.group, hv * v)
        assert weight.is_contiguous()
        if batch:
            width = power_of_2(self.group)
            c = Shape(
                HV=hv,
                V=v,
                GROUP=self.group,
                PG=width,
                GROUPS=max(1, TILE // width),
                SHARED=weight.numel() == self.group,
                SIGMOID=self.gate is Gate.SIGMOID,
                GATE_FIRST=self.gate_first,
                EPS=self.eps,
                COMPILED=not triton.knobs.runtime.interpret,
            )
            grid = (triton.cdiv(hv * v, self.group * c.GROUPS), t, batch)
            norm_and_gate[grid](
                y, z, *z.stride()[:3], weight, step.slots, step.lens, y, t, c,
                num_warps=WARPS, enable_fp_fusion=False,
            )  # fmt: skip
        return y
