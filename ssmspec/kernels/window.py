"""The verify kernel: one program runs a window over one tile of one head, for every recurrence and policy."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ssmspec.kernels.triton_records import (
    append,
    ended,
    load_fp32,
    load_state,
    load_v,
    locate,
    replay,
    state_at,
    store_state,
    store_v,
)
from ssmspec.kernels.triton_recurrence import dot_k, rounded, update


class Inputs(NamedTuple):
    """The tokens as the layer has them: pointers, or strides over (batch, token, head)."""

    q: Any
    k: Any
    v: Any
    a: Any
    b: Any


class Prepared(NamedTuple):
    """The tokens as the recurrence takes them: pointers, or strides over (batch, token, head)."""

    q: Any
    k: Any
    v: Any
    decay: Any
    beta: Any  # Mamba2: dt


class Past(NamedTuple):
    """Committed records in front of the window, as History; None where a policy has none."""

    base: Any = None
    count: Any = None
    ends: Any = None


@triton.jit
def window(
    x,
    x_step,
    D,
    state,
    state_step,
    pages,
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
    at = locate(hv, v_tile, g)
    p_out = out + (b * T * g.HV + hv) * g.V + at.v
    p_rest = p_out + n.to(tl.int64) * (g.HV * g.V)
    for _ in range(n, T):
        store_v(p_rest, at.v * 0.0, at, g)
        p_rest += g.HV * g.V
    if n == 0:
        return

    dtype: tl.constexpr = state.dtype.element_ty
    tile = state_at(at, g)
    held = row if pages is None else tl.load(pages + row)
    s = load_state(state + held * state_step + tile, at, g)
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
                store_state(state + held * state_step + tile, s, at, g)
            if dtype != tl.float32:
                if past.ends is not None:
                    if flush | ended(ends, first - 1, g):
                        s = rounded(s, dtype, g)
                elif flush:
                    s = rounded(s, dtype, g)

    p_q = x.q + b * x_step.q[0] + at.h * x_step.q[2]
    p_k = x.k + b * x_step.k[0] + at.h * x_step.k[2]
    p_v = x.v + b * x_step.v[0] + hv * x_step.v[2] + at.v
    p_decay = x.decay + b * x_step.decay[0] + hv * x_step.decay[2]
    p_beta = x.beta + b * x_step.beta[0] + hv * x_step.beta[2]
    for t in range(0, n):
        beta = tl.load(p_beta)
        raw_v = load_v(p_v, at.v_in, g)
        v = raw_v.to(tl.float32)
        if g.ARCH == "kda":
            s = s * load_fp32(p_decay, at, g)
        else:
            s = s * tl.load(p_decay)
        k, q = load_fp32(p_k, at, g), load_fp32(p_q, at, g)
        if g.ARCH == "mamba2":
            c = beta * v
        else:
            c = beta * (v - dot_k(s, k))
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
            append(rec, rec_step, row, (first + t) % g.R, c, raw_v, at, g)
        p_q += x_step.q[1]
        p_k += x_step.k[1]
        p_v += x_step.v[1]
        p_decay += x_step.decay[1]
        p_beta += x_step.beta[1]
        p_out += g.HV * g.V
