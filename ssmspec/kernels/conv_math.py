"""What the short conv's kernels have in common: a window's inputs and outputs in registers."""

# mypy: disable-error-code="assignment,misc"

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra import libdevice


class Shape(NamedTuple):
    """What a kernel is compiled for."""

    D: int
    W: int
    DILATION: int
    HISTORY: int
    R: int  # inputs in a ring
    T: int
    PT: int  # T, to a power of 2
    BLOCK: int
    COMPILED: bool
    FAST: bool  # silu of fast mode, compiled
    PACKED: bool = False  # a channel's taps lie together, in 8 bytes


@triton.jit
def silu(y, COMPILED: tl.constexpr):
    """y / (1 + exp(-y)) in the bits of torch's CUDA kernels, which approximate neither exp nor division; of +inf NaN.

    The quotient is rounded correctly without a branch, by its exact remainder (Markstein, Computation of elementary
    functions on the IBM RISC System/6000 processor): tests/test_conv_ring.py tries all numbers. The divisor is divided
    by 4, so that its reciprocal is a normal number; an infinite one still makes a zero.
    """
    if not COMPILED:
        return y / (1 + tl.exp(-y))
    divisor = tl.fma(libdevice.exp(_negative(y)), 0.25, 0.25)
    r = _reciprocal(divisor)
    dividend = y * 0.25
    q = dividend * r
    return tl.fma(tl.fma(-tl.minimum(divisor, 1e38), q, dividend), r, q)


@triton.jit
def fast_silu(y):
    """The same to 2^-21 of y, in a third of the instructions. Rounded to 16 bits it is seldom another number."""
    return y * _reciprocal(1.0 + tl.exp2(y * -1.4426950408889634))


@triton.jit
def _negative(x):
    """As part of the instruction that uses it, where 0 - x would be one more."""
    return tl.inline_asm_elementwise("neg.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _reciprocal(x):
    asm: tl.constexpr = "rcp.approx.ftz.f32 $0, $1;"
    return tl.inline_asm_elementwise(asm, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def add_product(sum, a, b):
    """sum + a b, rounded twice, as torch does. Products of 16-bit numbers are exact, so one fma is as good."""
    if (a.dtype.primitive_bitwidth == 16) & (b.dtype.primitive_bitwidth == 16):
        return tl.fma(a.to(tl.float32), b.to(tl.float32), sum)
    else:
        return sum + a.to(tl.float32) * b.to(tl.float32)


@triton.jit
def ring_at(position, c: tl.constexpr):
    """position in 0 .. 2R - 1."""
    return tl.where(position >= c.R, position - c.R, position)


@triton.jit
def load_inputs(p_x, x_token, p_ring, ring_input, p_weight, w_tap, p_bias, first, n, inside, c: tl.constexpr):
    """Tuples of the settled inputs and the window's, zeros behind its end, and of the taps and the bias, if there is
    one. p_* point at the channels, p_weight of PACKED taps at all of a channel's; ``first`` is the position of the
    oldest settled input."""
    T: tl.constexpr = c.T
    W: tl.constexpr = c.W
    HISTORY: tl.constexpr = c.HISTORY
    inputs, taps = (), ()
    for i in tl.static_range(HISTORY):
        inputs += (tl.load(p_ring + ring_at(first + i, c) * ring_input, mask=inside, other=0.0),)
    for t in tl.static_range(T):
        inputs += (tl.load(p_x + t * x_token, mask=inside & (t < n), other=0.0),)
    if c.PACKED:
        packed = tl.load(p_weight, mask=inside, other=0)
        for tap in tl.static_range(W):
            taps += ((packed >> (16 * tap)).to(tl.int16).to(p_x.dtype.element_ty, bitcast=True),)
    else:
        for tap in tl.static_range(W):
            taps += (tl.load(p_weight + tap * w_tap, mask=inside, other=0.0),)
    if p_bias is not None:
        taps += (tl.load(p_bias, mask=inside, other=0.0),)
    return inputs, taps


@triton.jit
def store_inputs(inputs, p_ring, ring_input, first, n, inside, c: tl.constexpr):
    """The window's, behind the settled ones."""
    T: tl.constexpr = c.T
    HISTORY: tl.constexpr = c.HISTORY
    for t in tl.static_range(T):
        p = p_ring + ring_at(first + HISTORY + t, c) * ring_input
        tl.store(p, inputs[HISTORY + t], mask=inside & (t < n))


@triton.jit
def store_behind(inputs, p_page, page_input, n, inside, c: tl.constexpr):
    """All but the oldest, in order, as vLLM's causal_conv1d_update leaves them in a page."""
    T: tl.constexpr = c.T
    HISTORY: tl.constexpr = c.HISTORY
    for i in tl.static_range(1, HISTORY + T):
        tl.store(p_page + (i - 1) * page_input, inputs[i], mask=inside & (i < HISTORY + n))


@triton.jit
def output(inputs, taps, t: tl.constexpr, c: tl.constexpr):
    """Token t's, in fp32, of what ``load_inputs`` returns."""
    W: tl.constexpr = c.W
    y = inputs[t].to(tl.float32) * taps[0].to(tl.float32)
    for tap in tl.static_range(1, W):
        y = add_product(y, inputs[t + tap * c.DILATION], taps[tap])
    if len(taps) > W:
        y += taps[W].to(tl.float32)
    return fast_silu(y) if c.FAST else silu(y, c.COMPILED)
