"""The arithmetic of one token as Triton device functions; verify, replay and fold share them.

The source fixes every bit: contraction is off at every launch and written out as ``tl.fma`` instead, and sums
over K are chains and trees of two-operand additions, so no compiler choice can tell two kernels apart. Only the
last levels, over the lanes of a warp, are left to ``tl.sum``, whose butterfly has one order.

A tile of the state is 5-D, [LK, LV, NV, NK, C] with LK * NK * C = K and LV * NV rows along V: LK lanes over K and LV
over V (across warps), NV rows and NK chunks of C neighbours per lane. Everything that meets a tile is loaded in
a shape that has both lane axes, which keeps one register layout from the load to the store.
"""

import triton
import triton.language as tl


@triton.jit
def lanes(g: tl.constexpr):
    """Where chunks start along K [LK, LV, 1, NK, 1], offsets along K [LK, LV, 1, NK, C] and along V [LK, LV, NV, 1, 1].

    Also the lane's place on both axes. Chunks are in bit-reversed order, so that adding neighbours adds the
    farthest k first.
    """
    LK: tl.constexpr = g.LK
    LV: tl.constexpr = g.LV
    NK: tl.constexpr = g.PK // (g.LK * g.C)
    lk = tl.arange(0, LK)[:, None, None, None, None] + tl.zeros([1, LV, 1, 1, 1], tl.int32)
    lv = tl.arange(0, LV)[None, :, None, None, None] + tl.zeros([LK, 1, 1, 1, 1], tl.int32)
    nth = tl.arange(0, NK)
    place = tl.zeros([NK], tl.int32)
    for i in tl.static_range(5):
        if (NK >> (i + 1)) > 0:
            place += ((nth >> i) & 1) * (NK >> (i + 1))
    chunk = (place[None, None, None, :, None] * LK + lk) * g.C
    k = chunk + tl.arange(0, g.C)[None, None, None, None, :]
    v = lv * g.NV + tl.arange(0, g.NV)[None, None, :, None, None]
    return chunk, k, v, lk, lv


@triton.jit
def _quarters(x):
    """The four entries of the last axis."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], x.shape[2], x.shape[3], 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _halves(x):
    x = tl.reshape(x, [x.shape[0], x.shape[1], x.shape[2], x.shape[3], 2, 4])
    return tl.split(tl.permute(x, (0, 1, 2, 3, 5, 4)))


@triton.jit
def _chain(p, s, k):
    """p + the four products of the last axis, one after another; the first of all is the second product."""
    s0, s1, s2, s3 = _quarters(s)
    k0, k1, k2, k3 = _quarters(k)
    if p is None:
        p = tl.fma(s0, k0, s1 * k1)
    else:
        p = tl.fma(s1, k1, tl.fma(s0, k0, p))
    return tl.fma(s3, k3, tl.fma(s2, k2, p))


@triton.jit
def dot_k(s, k):
    """sum_k s k: [LK, LV, NV, NK, C] and [LK, LV, 1, NK, C] -> [1, LV, NV, 1, 1], C = 4 or 8.

    The order is that of Triton 3.6's ``tl.sum(s * k, axis=1)`` on a coalesced [V, K] tile: a chain over C, then
    halves of K from the outside in.
    """
    NK: tl.constexpr = s.shape[3]
    if s.shape[4] == 8:
        s_low, s_high = _halves(s)
        k_low, k_high = _halves(k)
        p = _chain(_chain(None, s_low, k_low), s_high, k_high)
    else:
        p = _chain(None, s, k)
    for i in tl.static_range(5):
        if (NK >> i) > 2:
            p = tl.reshape(p, [p.shape[0], p.shape[1], p.shape[2], NK >> (i + 1), 2])
        if (NK >> i) > 1:
            p0, p1 = tl.split(p)
            p = p0 + p1
    if NK == 1:
        p = tl.reshape(p, [p.shape[0], p.shape[1], p.shape[2]])
    return tl.sum(p, 0)[None, :, :, None, None]


@triton.jit
def softplus(x):
    """log(1 + exp(x)), the identity above 20."""
    return tl.where(x <= 20.0, tl.log(1.0 + tl.exp(x)), x)


@triton.jit
def decay_of(a, rate, bias, g: tl.constexpr):
    """The factor that is multiplied, from the raw gate (Mamba2: from dt) and rate = exp(A_log).

    As kernels/recurrence.py:decay_of.
    """
    if g.ARCH == "mamba2":
        return tl.exp(-rate * a)
    elif g.BOUND is None:
        return tl.exp(-rate * softplus(a + bias))
    else:
        return tl.exp(g.BOUND * tl.sigmoid(rate * (a + bias)))


@triton.jit
def rnorm_of(x):
    """1 / norm of a key or query [LK, LV, 1, NK, C] -> [1, LV, 1, 1, 1]."""
    return tl.rsqrt(dot_k(x, x) + 1e-6)


@triton.jit
def update(decayed, c, k):
    """S <- decay * S + c k^T, from the product decay * S."""
    return tl.fma(c, k, decayed)


@triton.jit
def rounded(s, dtype: tl.constexpr, g: tl.constexpr):
    """The state as it comes back from 16-bit storage."""
    if dtype == tl.bfloat16 and g.COMPILED:
        # left alone, the assembler rounds one value at a time, several times slower
        even, odd = tl.split(
            tl.reshape(s, [s.shape[0], s.shape[1], s.shape[2], s.shape[3], s.shape[4] // 2, 2])
        )
        pair = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [even, odd], dtype=tl.uint32, is_pure=True, pack=1
        )
        even, odd = (
            (pair << 16).to(tl.float32, bitcast=True),
            (pair & 0xFFFF0000).to(tl.float32, bitcast=True),
        )
        return tl.reshape(tl.join(even, odd), s.shape)
    else:
        return s.to(dtype).to(tl.float32)
