"""A whole layer between its projections: conv, gates and recurrence, gated norm."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ssmspec.geometry import Geometry
from ssmspec.kernels.base import Tokens
from ssmspec.kernels.conv import ConvWindow
from ssmspec.kernels.norm import GatedNorm
from ssmspec.step import Step

Verify = Callable[[int, Step, Tokens], Tensor]


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What a layer multiplies by outside of its recurrence."""

    conv: Tensor  # [D, W]
    norm: Tensor  # [V]; Mamba2 [HV * V]
    conv_bias: Tensor | None = None  # [D]


@dataclass(frozen=True, kw_only=True)
class Projected:
    """A layer's projections of a window, views of any strides over the last dimension's neighbours."""

    x: Tensor  # [B, T, D], packed as Tokens.unpack has it
    z: Tensor  # [B, T, HV, V], the output gate
    a: Tensor  # as in Tokens
    b: Tensor | None = None


def parts(backend: str) -> tuple[type[ConvWindow], type[GatedNorm]]:
    """How a backend keeps the conv's window, and how it norms."""
    if backend == "torch":
        return ConvWindow, GatedNorm
    from ssmspec.kernels.conv_triton import ConvRing
    from ssmspec.kernels.norm_triton import TritonNorm

    return ConvRing, TritonNorm


class LayerStep:
    """The pieces in a row. ``verify`` is a policy's, and so is the order of a step: every layer, then ``accept``."""

    def __init__(
        self, g: Geometry, conv: ConvWindow, verify: Verify, norm: GatedNorm, weights: Sequence[Weights]
    ) -> None:
        self.g, self.conv, self.verify, self.norm = g, conv, verify, norm
        self.weights = tuple(weights)

    def __call__(self, layer: int, step: Step, p: Projected) -> Tensor:
        """[B, T, HV, V], normed and gated; zero on null rows and behind ``lens``. Captured; moves no cursor."""
        w = self.weights[layer]
        x = self.conv.verify(layer, step, p.x, w.conv, w.conv_bias)
        y = self.verify(layer, step, Tokens.unpack(self.g, x, p.a, p.b))
        return self.norm(y, p.z, w.norm, step)
