"""The verify kernel: one program runs a window over one tile of one head, for every recurrence and policy."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ssmspec.kernels.triton_records import (
    append,
    ended,
    load_k,
    load_state,
    load_v,
    locate,
    replay,
    state_at,
    store_state,
    store_v,
)
from ssmspec.kernels.triton_recurrence import decay_of, dot_k, rnorm_of, rounded, softplus, update


class Inputs(NamedTuple):
    """The tokens: pointers, or strides over (batch, time, head)."""

    q: Any
    k: Any
    v: Any
    a: Any
    b: Any


class Past(NamedTuple):
    """Committed records in front of the window, as History; None where a policy has none."""

    base: Any = None
    count: Any = None
    ends: Any = None


@triton.jit
def window(
    x,
    x_step,
    A_log,
    dt_bias,
    D,
    state,
    state_step,
    rows,
    lens,
    out,
    T,
    snapshots,
    past,
    limit,
    rec,
    rec_step,
    g: tl.constexpr,
):
    v_tile, hv, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = tl.load(rows + b).to(tl.int64)
    n = tl.minimum(tl.load(lens + b), T).to(tl.int32)
    n = tl.where(row > 0, tl.maximum(n, 0), 0)
    at = locate(hv, v_tile, A_log, dt_bias, g)
    p_out = out + (b * T * g.HV + hv) * g.V + at.v
    p_rest = p_out + n.to(tl.int64) * (g.HV * g.V)
    for _ in range(n, T):
        store_v(p_rest, at.v * 0.0, at, g)
        p_rest += g.HV * g.V
    if n == 0:
        return

    dtype: tl.constexpr = state.dtype.element_ty
    tile = state_at(at, g)
    s = load_state(state + row * state_step + tile, at, g)
    first = 0
    if past.base is not None:
        base, count = tl.load(past.base + row), tl.load(past.count + row)
        first = base + count
        if count > 0:
            flush = count + n > limit
            ends = None
            if past.ends is not None:
                ends = tl.load(past.ends + row)
            s = replay(s, rec, rec_step, row, base, 0, count, ends, dtype, at, g)
            if flush:
                store_state(state + row * state_step + tile, s, at, g)
            if dtype != tl.float32:
                if past.ends is not None:
                    if flush | ended(ends, first - 1, g):
                        s = rounded(s, dtype)
                elif flush:
                    s = rounded(s, dtype)

    p_q = x.q + b * x_step.q[0] + at.h * x_step.q[2] + at.k
    p_k = x.k + b * x_step.k[0] + at.h * x_step.k[2] + at.k
    p_v = x.v + b * x_step.v[0] + hv * x_step.v[2] + at.v
    p_a = x.a + b * x_step.a[0] + hv * x_step.a[2]
    if g.ARCH == "kda":
        p_a += at.k
    if x.b is not None:
        p_b = x.b + b * x_step.b[0] + hv * x_step.b[2]
    for t in range(0, n):
        raw_k = load_k(p_k, at.k_in, g)
        raw_v = load_v(p_v, at.v_in, g)
        k, q, v = raw_k.to(tl.float32), load_k(p_q, at.k_in, g).to(tl.float32), raw_v.to(tl.float32)
        if g.ARCH == "kda":
            gate = load_k(p_a, at.k_in, g)
        else:
            gate = tl.load(p_a)
        a, rnorm, dt = gate.to(tl.float32), None, None
        if g.ARCH == "mamba2":
            dt = a + at.bias
            if g.SOFTPLUS:
                dt = softplus(dt)
            decay = decay_of(dt, at.rate, at.bias, g)
            s = s * decay
            c = dt * v
        else:
            rnorm = rnorm_of(k)
            k = k * rnorm
            q = q * rnorm_of(q) * g.SCALE
            decay = decay_of(a, at.rate, at.bias, g)
            s = s * decay
            c = tl.sigmoid(tl.load(p_b).to(tl.float32)) * (v - dot_k(s, k))
        s = update(s, c, k)
        y = dot_k(s, q)
        if D is not None:
            y = tl.fma(tl.load(D + hv), v, y)
        store_v(p_out, y, at, g)
        if snapshots is not None:
            to = tl.load(snapshots + b * T + t).to(tl.int64)
            if to > 0:
                store_state(state + to * state_step + tile, s, at, g)
        elif rec.k is not None:
            append(
                rec, rec_step, row, (first + t) % g.R, raw_k, rnorm, c, raw_v, dt, decay, gate, v_tile, at, g
            )
        p_q += x_step.q[1]
        p_k += x_step.k[1]
        p_v += x_step.v[1]
        p_a += x_step.a[1]
        p_out += g.HV * g.V
        if x.b is not None:
            p_b += x_step.b[1]
