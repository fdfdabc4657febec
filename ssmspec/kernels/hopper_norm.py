"""The gated RMSNorm of a head, behind the last of its tiles: what norm_triton gives, in the same order."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.extra import libdevice

from ssmspec.kernels.hopper_tile import revision

REVISION = revision(__file__)


class Gate(NamedTuple):
    """What a head's outputs are normed and gated by."""

    z: Any  # [B, T, HV, V]
    row: Any
    token: Any
    head: Any
    weight: Any  # [V]


@gluon.jit
def _square_sum(x, c: gl.constexpr):
    """x [WINDOW, V] -> [WINDOW, 1], neighbours first."""
    s = x * x
    for i in gl.static_range(1, 12):
        if c.V >> i > 0:
            s = gl.sum(gl.reshape(s, [c.WINDOW, c.V >> i, 2]), 2)
    return gl.convert_layout(gl.reshape(s, [c.WINDOW]), gl.SliceLayout(1, c.HEAD))[:, None]


@gluon.jit
def norm_and_gate(out, gate, b, hv, n, c: gl.constexpr):
    """A head's outputs, which the same program has stored, normed and gated in place."""
    t = gl.arange(0, c.WINDOW, layout=gl.SliceLayout(1, c.HEAD))[:, None]
    v = gl.arange(0, c.V, layout=gl.SliceLayout(0, c.HEAD))[None, :]
    at = b * (c.T * c.HV * c.V) + hv * c.V + (t * (c.HV * c.V) + v)
    x = gl.load(out + at, mask=t < n, other=0.0).to(gl.float32)
    of_z = b * gate.row + hv * gate.head + (t * gate.token + v)
    z = gl.load(gate.z + of_z, mask=t < n, other=0.0).to(gl.float32)
    w = gl.load(gate.weight + v).to(gl.float32)
    x = x * gl.rsqrt(_square_sum(x, c) / c.V + c.EPS) * w
    x = x * libdevice.fast_dividef(1.0 if c.SIGMOID else z, 1 + libdevice.fast_expf(-z))
    gl.store(out + at, x.to(out.dtype.element_ty), mask=(t < n) & (v >= 0))
