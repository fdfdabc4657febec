"""A layer's step with the conv and ``prepare_window`` in one launch, where the Hopper kernels serve."""

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from ssmspec.geometry import Arch, Geometry, Window
from ssmspec.kernels import hopper, selftest
from ssmspec.kernels.base import History, Layer, Noise, Tokens, Verify
from ssmspec.kernels.conv_triton import FEW, SHORT, ConvRing
from ssmspec.kernels.hopper_call import Call
from ssmspec.kernels.hopper_convolve import LayerShape, Ring, Unpacked, convolve_window
from ssmspec.kernels.hopper_shape import Shape
from ssmspec.kernels.layer_step import LayerStep, Projected
from ssmspec.step import Step


@dataclass(frozen=True, kw_only=True)
class Unconvolved(Tokens):
    """Tokens whose q, k and v are room for what the conv makes of ``x``."""

    ring: ConvRing
    index: int  # of the layer in the ring
    slots: Tensor  # [B] of the ring; native's verify has rows of its snapshots
    packed: Tensor  # the room as one, [B, T, D]
    x: Tensor  # [B, T, D]
    taps: Tensor  # [W, D]
    bias: Tensor | None


def serves(g: Geometry, w: Window) -> bool:
    return g.arch is Arch.GDN and hopper.runs_here() and hopper.unsupported(g, w) is None


class FusedStep(LayerStep):
    """A LayerStep whose ``verify`` is of a policy over FusedVerify; the bits are the same."""

    def __call__(self, layer: int, step: Step, p: Projected) -> Tensor:
        w, conv = self.weights[layer], self.conv
        taps = w.conv.mT
        if not (isinstance(conv, ConvRing) and taps.is_contiguous() and aligned(p.x, conv.field[layer].mT)):
            return super().__call__(layer, step, p)
        room = torch.empty(p.x.shape, dtype=p.x.dtype, device=p.x.device)
        t = Tokens.unpack(self.g, room, p.a, p.b)
        tokens = Unconvolved(
            q=t.q, k=t.k, v=t.v, a=t.a, b=t.b,
            ring=conv, index=layer, slots=step.slots, packed=room, x=p.x, taps=taps, bias=w.conv_bias,
        )  # fmt: skip
        return self.norm(self.verify(layer, step, tokens), p.z, w.norm, step)


def aligned(*tensors: Tensor) -> bool:
    """Whether neighbours along the last dimension can be loaded 16 bytes at a time."""
    return all(
        t.stride(-1) == 1
        and all(n * t.element_size() % 16 == 0 for n in t.stride()[:-1])
        and t.data_ptr() % 16 == 0
        for t in tensors
    )


class FusedVerify:
    """A verify that also takes Unconvolved tokens; ``inner`` has all others."""

    def __init__(self, g: Geometry, w: Window, inner: Verify) -> None:
        self.g, self.w, self.inner, self.order = g, w, inner, selftest.order_of(g)
        self.programs: dict[tuple[Shape, int], int] = {}

    def __call__(
        self,
        layer: Layer,
        x: Tokens,
        rows: Tensor,
        lens: Tensor,
        *,
        history: History | None = None,
        snapshots: Tensor | None = None,
        noise: Noise | None = None,
    ) -> Tensor:
        if not isinstance(x, Unconvolved):
            return self.inner(layer, x, rows, lens, history=history, snapshots=snapshots, noise=noise)
        how, shape = hopper.shape_of(self.g, self.w, self.order, layer, x, history, snapshots)
        call = Call.of(layer, x, shape, history, snapshots)
        if len(rows):
            _convolve(call, layer, x, rows.contiguous(), lens.contiguous(), shape)
            call.verify(layer, shape, how.registers, self.programs)
        return call.out


def _convolve(call: Call, layer: Layer, x: Unconvolved, slots: Tensor, lens: Tensor, shape: Shape) -> None:
    """In place of ``call.prepare``."""
    conv, field, batch = x.ring.conv, x.ring.field[x.index], len(slots)
    few = batch <= FEW
    heads = gcd(shape.H, 2 if few else 4)
    c = LayerShape(
        H=shape.H,
        HV=shape.HV,
        K=shape.K,
        T=shape.T,
        W=conv.width,
        DILATION=conv.dilation,
        INPUTS=field.shape[-1],
        R=shape.R,
        HISTORY=shape.HISTORY > 0,
        ENDS=shape.ENDS,
        HEADS=heads,
        WARPS=max(1, heads // 2) if shape.T <= SHORT and not few else heads,  # one or two heads in a warp
    )
    convolve_window[(c.BLOCKS + c.T, batch)](
        Unpacked(x.x, x.x.stride(0), x.x.stride(1)),
        Ring(field, field.stride(0), field.stride(2), x.ring.at, x.slots, x.taps, x.bias),
        call.x,
        call.strides,
        layer.params.A_log,
        layer.params.dt_bias,
        slots,
        layer.rows,
        lens,
        call.history,
        call.records,
        call.record_strides,
        call.prepared,
        x.packed,
        c,
        num_warps=c.WARPS,
        enable_fp_fusion=False,
    )
