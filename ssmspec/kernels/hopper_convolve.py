"""The conv and ``prepare_window`` in one launch: what the pieces give apart, without reading keys and queries again."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disable-error-code="assignment,misc"

from dataclasses import dataclass
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ssmspec.kernels.conv_math import silu
from ssmspec.kernels.heads import Heads, power_of_2, revision
from ssmspec.kernels.hopper_prepare import EPS, _cursors, _gates, _pack
from ssmspec.kernels.hopper_tile import hand_over

REVISION = revision(__file__)


class Unpacked(NamedTuple):
    """The layer's inputs in front of the conv."""

    x: Any  # [B, T, D]
    row: Any
    token: Any


class Ring(NamedTuple):
    """A layer's conv: its inputs, whose channels are neighbours, and its taps [W, D]."""

    field: Any
    slot: Any
    input: Any
    at: Any
    slots: Any
    weight: Any
    bias: Any


@dataclass(frozen=True, kw_only=True)
class LayerShape(Heads):
    """What the kernel is compiled for. A program serves HEADS heads of q, k or v in all tokens, or a row's gates."""

    W: int  # taps
    DILATION: int
    INPUTS: int  # in a ring of conv inputs
    R: int = 0  # records in a ring; 0: nothing is recorded
    HISTORY: bool = False
    ENDS: bool = False
    HEADS: int = 8
    WARPS: int = 4
    REVISION: str = REVISION

    @property
    def VALUES(self) -> int:
        return power_of_2(self.HV)

    @property
    def SETTLED(self) -> int:
        return (self.W - 1) * self.DILATION

    @property
    def BLOCK(self) -> int:
        return self.HEADS * self.K

    @property
    def BLOCKS(self) -> int:
        return (2 * self.H + self.HV) // self.HEADS

    @property
    def CHANNELS(self) -> gl.BlockedLayout:
        """[BLOCK]: a thread has 8 neighbours, 16 bytes of bf16, or as many as there are for it."""
        return gl.BlockedLayout([max(1, min(8, self.BLOCK // (32 * self.WARPS)))], [32], [self.WARPS], [0])


@gluon.jit
def _pairs(x, AXIS: gl.constexpr):
    """A sum over two entries: one addition, whichever threads hold them."""
    return gl.sum(x, AXIS)


@gluon.jit
def _rnorm(x, c: gl.constexpr):
    """x [HEADS * 128] -> 1 / norm [HEADS], adding pairs that are 16, 8, 4, 2, 1, 64 and 32 apart, as prepare_window."""
    s = gl.reshape(x * x, [c.HEADS, 2, 2, 2, 2, 2, 2, 2])
    s = _pairs(_pairs(_pairs(_pairs(_pairs(s, 3), 3), 3), 3), 3)
    return gl.rsqrt(_pairs(_pairs(s, 1), 1) + EPS)


@gluon.jit
def _norms(y, h0, which, p_factors, slot, position, records, record_strides, live, c: gl.constexpr):
    """1 / norm of a token's HEADS heads of keys (which = 0) or queries (1); of keys also into the record."""
    GROUP: gl.constexpr = c.GROUP
    rnorm = _rnorm(y.to(gl.float32), c)
    h = h0 + gl.arange(0, c.HEADS, layout=rnorm.type.layout)
    for i in gl.static_range(GROUP):
        hand_over(
            p_factors + (h * GROUP + i) * (4 * c.WINDOW) + which * c.WINDOW, rnorm, mask=live & (h >= 0)
        )
    if c.R > 0:
        if which == 0:
            d = gl.arange(0, c.BLOCK, layout=c.CHANNELS)
            at = (h0 + d // c.K) * c.R + position
            gl.store(records.k + slot * record_strides.k + at * c.K + d % c.K, y, mask=live & (d >= 0))
            to = records.rnorm + slot * record_strides.rnorm + h * c.R + position
            gl.store(to, rnorm, mask=live & (h >= 0))


@gluon.jit
def _position(base, count, t, c: gl.constexpr):
    position = (base + count + t).to(gl.int32)
    return gl.where(position >= c.R, position - c.R, position) if c.R > 0 else position


@gluon.jit
def _convolve(x, ring, out, b, slot, n, base, count, p_factors, records, record_strides, c: gl.constexpr):
    """HEADS heads of the packed q | k | v, all tokens; of q and k also the norms."""
    T: gl.constexpr = c.T
    W: gl.constexpr = c.W
    SETTLED: gl.constexpr = c.SETTLED
    D: gl.constexpr = (2 * c.H + c.HV) * c.K
    block = gl.program_id(0)
    d = block * c.BLOCK + gl.arange(0, c.BLOCK, layout=c.CHANNELS)
    own = gl.load(ring.slots + b).to(gl.int64)
    first = gl.load(ring.at + own) + (c.INPUTS - SETTLED)
    p_ring = ring.field + own * ring.slot + d
    p_x = x.x + b * x.row + d
    inputs, scales = (), ()
    for i in gl.static_range(SETTLED):
        inputs += (gl.load(p_ring + (first + i) % c.INPUTS * ring.input),)
    for t in gl.static_range(T):
        inputs += (gl.load(p_x + t * x.token, mask=(t < n) & (d >= 0), other=0.0),)
    for tap in gl.static_range(W):
        scales += (gl.load(ring.weight + tap * D + d).to(gl.float32),)
    for t in gl.static_range(T):
        to = p_ring + (first + SETTLED + t) % c.INPUTS * ring.input
        gl.store(to, inputs[SETTLED + t], mask=(t < n) & (d >= 0))
    for t in gl.static_range(T):
        y = inputs[t].to(gl.float32) * scales[0]
        for tap in gl.static_range(1, W):
            y += inputs[t + tap * c.DILATION].to(gl.float32) * scales[tap]
        if ring.bias is not None:
            y += gl.load(ring.bias + d).to(gl.float32)
        value = silu(y, True).to(out.dtype.element_ty)
        hand_over(out + (b * T + t) * D + d, value, mask=(t < n) & (d >= 0))
        if block * c.HEADS < c.H:
            _norms(value, block * c.HEADS, 1, p_factors + t, slot, 0, records, record_strides, t < n, c)
        elif block * c.HEADS < 2 * c.H:
            position = _position(base, count, t, c)
            h0 = block * c.HEADS - c.H
            _norms(value, h0, 0, p_factors + t, slot, position, records, record_strides, t < n, c)


@gluon.jit
def convolve_window(
    x, ring, gates, gate_strides, A_log, dt_bias, slots, pages, lens, history, records, record_strides, prepared, out,
    c: gl.constexpr,
):  # fmt: skip
    """Grid (BLOCKS + T, B). Writes what conv_triton.convolve and prepare_window write."""
    b = gl.program_id(1).to(gl.int64)
    slot, n, base, count = _cursors(slots, lens, history, b, c)
    p_factors = prepared.factors + b * (c.HV * 4 * c.WINDOW)
    if gl.program_id(0) < c.BLOCKS:
        if n > 0:
            _convolve(x, ring, out, b, slot, n, base, count, p_factors, records, record_strides, c)
    else:
        t = gl.program_id(0) - c.BLOCKS
        if t == 0:
            held = slot
            if pages is not None:
                held = gl.load(pages + slot)
            _pack(prepared.rows, slot, held, n, base, count, history, b, c)
        if t < n:
            hv = gl.arange(0, c.VALUES, layout=gl.BlockedLayout([1], [32], [c.WARPS], [0]))
            decay, beta = _gates(gates, gate_strides, A_log, dt_bias, b, t, hv, hv < c.HV)
            p = p_factors + hv * (4 * c.WINDOW) + t
            hand_over(p + 2 * c.WINDOW, decay, mask=hv < c.HV)
            hand_over(p + 3 * c.WINDOW, beta, mask=hv < c.HV)
            if c.R > 0:
                at = hv * c.R + _position(base, count, t, c)
                gl.store(records.decay + slot * record_strides.decay + at, decay, mask=hv < c.HV)
