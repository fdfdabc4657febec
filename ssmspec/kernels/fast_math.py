"""Gates to the last bit or so: the GPU's own exp, log and rsqrt are wrong in the 22nd, and errors of decays add up."""

import triton
import triton.language as tl

LEAST = tl.constexpr(-87.0)  # e^x is a normal number from here on


@triton.jit
def normal_exp(x):
    """e^x = 2^n e^r of LEAST <= x <= 88, with n an integer, |r| <= ln(2) / 2, and a Taylor polynomial."""
    # behind 1.5 * 2^23 there is room for n in the last bits
    turned = x * 1.4426950408889634 + 12582912.0
    n = turned - 12582912.0
    r = (x - n * 0.693359375) + n * 2.12194440054690583e-4  # ln 2 in two parts: the first product is exact
    p = 1.0 / 720.0 + r * (1.0 / 5040.0)
    p = 1.0 / 24.0 + r * (1.0 / 120.0 + r * p)
    p = 1.0 + r * (1.0 + r * (0.5 + r * (1.0 / 6.0 + r * p)))
    exponent = turned.to(tl.int32, bitcast=True) << 23
    return (p.to(tl.int32, bitcast=True) + exponent).to(tl.float32, bitcast=True)


@triton.jit
def exp(x):
    """e^x of x <= 88, 0 below LEAST."""
    return tl.where(x < LEAST, 0.0, normal_exp(tl.maximum(x, LEAST)))


@triton.jit
def reciprocal(x):
    """Of positive numbers: one Newton step behind an approximation, as rsqrt."""
    y = tl.rsqrt(x)
    y *= y
    return y * (2.0 - x * y)


@triton.jit
def softplus(x):
    """log(1 + e^x) = max(x, 0) + 2 artanh(s) with s = e / (2 + e), e = e^-|x|, so s <= 1/3."""
    e = normal_exp(tl.maximum(-tl.abs(x), LEAST))
    s = e * reciprocal(2.0 + e)
    t = s * s
    p = 1.0 / 11.0 + t * (1.0 / 13.0 + t * (1.0 / 15.0))
    p = 1.0 / 5.0 + t * (1.0 / 7.0 + t * (1.0 / 9.0 + t * p))
    return tl.maximum(x, 0.0) + 2.0 * (s + s * t * (1.0 / 3.0 + t * p))


@triton.jit
def sigmoid(x):
    """Not below e^-80, which is 0 beside any number that it is added to."""
    return reciprocal(1.0 + normal_exp(tl.maximum(tl.minimum(-x, 80.0), LEAST)))


@triton.jit
def rsqrt(x):
    """One Newton step behind the approximation."""
    y = tl.rsqrt(x)
    return y * (1.5 - 0.5 * x * y * y)


@triton.jit
def channel_decay(gate, rate, bias, BOUND: tl.constexpr):
    """KDA's: exp(-rate softplus(x)), or with a lower bound of its log, exp(BOUND sigmoid(rate x)), of x = gate + bias."""
    x = gate + bias
    if BOUND is None:
        return exp(-rate * softplus(x))
    else:
        return exp(BOUND * sigmoid(rate * x))
