"""One window as fast mode's kernels take it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ssmspec.kernels.base import Layer, Tokens
from ssmspec.kernels.fast_shape import Couplings, Gates, Shape
from ssmspec.kernels.fast_tile import Call
from ssmspec.kernels.hopper_fetch import MAX_ROWS, MAX_SLOTS
from ssmspec.kernels.norm import GatedNorm
from ssmspec.kernels.triton_records import Records
from ssmspec.kernels.window import Inputs
from ssmspec.step import Step


@dataclass(frozen=True, kw_only=True)
class Gated(Tokens):
    """Tokens whose outputs verify is to norm and gate too: in the window's launch where a norm is of one head's V."""

    norm: GatedNorm
    z: Tensor  # [B, T, HV, V] of any strides over neighbours of V
    weight: Tensor  # as GatedNorm has it
    step: Step
    out: Tensor | None = None  # [B, T, HV, V], contiguous, for the outputs

    def apart(self, y: Tensor) -> Tensor:
        normed = self.norm(y, self.z, self.weight, self.step)
        return normed if self.out is None else self.out.copy_(normed)


def call_of(layer: Layer, x: Tokens, c: Shape, out: Tensor) -> Call:
    """Checked, with room for what lies between the launches."""

    def new(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*sizes, dtype=dtype, device=out.device)

    batch, tokens = out.shape[0], (x.q, x.k, x.v, x.a, x.b)
    assert all(t is None or t.stride(0) * batch < 2**31 for t in tokens), "inputs need 64-bit offsets"
    assert layer.state[0].is_contiguous()
    assert len(layer.state) <= MAX_ROWS
    assert all(len(field) <= MAX_SLOTS for field in layer.records.values())
    assert all(field[0].is_contiguous() for field in layer.records.values())
    return Call(
        state=layer.state,
        row=layer.state.stride(0),
        w=Couplings(
            heads=new(batch, c.HV, c.COEFFICIENTS),
            seen=new(batch, c.HV // c.SHARED, c.NC, c.HP) if c.HP else None,
            vectors=new(batch, c.HV, c.VECTORS, c.K) if c.CHANNELS else None,
            cursors=new(batch, 2, dtype=torch.int64),
        ),
        x=Inputs(*tokens),
        x_step=Inputs(*(None if t is None else t.stride()[:3] for t in tokens)),
        out=out,
        rec=Records(**layer.records),
        rec_step=Records(**{name: field.stride(0) for name, field in layer.records.items()}),
        gates=_gates(x) if c.GATE else None,
        tiles=batch * c.HV * c.BLOCKS,
    )


def _gates(x: Tokens) -> Gates:
    assert isinstance(x, Gated)
    assert x.z.shape == x.v.shape
    assert x.z.stride(3) == 1
    assert x.weight.numel() == x.norm.group
    assert x.weight.is_contiguous()
    assert x.z.stride(0) * len(x.z) < 2**31, "z needs 64-bit offsets"
    return Gates(x.z, x.z.stride()[:3], x.weight)
