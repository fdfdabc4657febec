"""Fast mode's window in plain Triton: outputs and updates from one product of the state with the window's probes.

The state tile is multiplied in its own precision and cast nowhere. An fp32 state meets raw 16-bit keys and queries,
which tf32 holds exactly, in two tf32 products (its high 11 bits and the rest); a 16-bit state meets them in one
exact product. Norms and decays are multiplied on afterwards, in fp32. ``fast_mma`` does the same for Hopper; this
form runs wherever Triton does.
"""

import triton
import triton.language as tl

from ssmspec.kernels.conv_math import ring_at
from ssmspec.kernels.fast_rows import live_row, row_of_state


@triton.jit
def tf32_parts(x):
    """x fp32 -> (its nearest tf32, the rest); the sum is x."""
    bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    high = bits.to(tl.float32, bitcast=True)
    return high, x - high


@triton.jit
def product(x, y, OPERAND: tl.constexpr):
    """x [M, K], y [N, K] -> x y^T [M, N] at fp32 grade; 16-bit values are exact in tf32."""
    y = tl.trans(y)
    if x.dtype == y.dtype and x.dtype == OPERAND:
        z = tl.dot(x, y, input_precision="tf32x3")
    elif y.dtype == tl.float32:
        z = tl.dot(x.to(tl.float32), y, input_precision="tf32x3")
    elif x.dtype != tl.float32:
        z = tl.dot(x.to(tl.float32), y.to(tl.float32), input_precision="tf32")
    else:
        high, rest = tf32_parts(x)
        y = y.to(tl.float32)
        z = tl.dot(high, y, input_precision="tf32") + tl.dot(rest, y, input_precision="tf32")
    return z


@triton.jit
def _probes(of_w, x, x_step, row, h, pair, n, c: tl.constexpr):
    """[NC, KP], raw where decays are per head."""
    channel = tl.arange(0, c.KP)
    column = tl.arange(0, c.NC)
    of = column // c.PROBES
    inside = (of < n)[:, None] & (channel < c.K)[None, :]
    if c.CHANNELS:
        of_p = of_w.vectors + pair * (c.VECTORS * c.K) + (column * c.K)[:, None]
    else:
        of_p = (x.q + row * x_step.q[0] + h * x_step.q[2]) + (of * x_step.q[1])[:, None]
        if not c.MAMBA:
            of_k = (x.k + row * x_step.k[0] + h * x_step.k[2]) + (of * x_step.k[1])[:, None]
            of_p = tl.where((column % 2 == 1)[:, None], of_p, of_k)
    return tl.load(of_p + channel[None, :], mask=inside, other=0.0)


@triton.jit
def window(S, s_step, w, x, x_step, out, at, rec, rec_step, OPERAND: tl.constexpr, c: tl.constexpr):
    """One (row, value head, tile of V): answer the probes, store c (or x) and o, then fold the records if due.

    out [B, T, HV, V] is packed; its rows behind a window's end, and those of null rows, become zero.
    """
    pair = (tl.program_id(0) // c.BLOCKS).to(tl.int64)
    row = pair // c.HV
    head = pair % c.HV
    h = head // c.GROUP
    slot, n, first, records, flush = live_row(at, row)
    value = tl.program_id(0) % c.BLOCKS * c.BV + tl.arange(0, c.BV)
    in_v = (value < c.V)[:, None]
    column = tl.arange(0, c.NC)
    of = column // c.PROBES
    asks = column % c.PROBES == c.PROBES - 1
    starts = column % c.PROBES == 0
    to_out = out + ((row * c.T + of[None, :]) * c.HV + head) * c.V + value[:, None]
    wanted = (asks & (of < c.T))[None, :] & in_v
    if n == 0:
        tl.store(to_out, tl.full([c.BV, c.NC], 0.0, out.dtype.element_ty), mask=wanted)
        return

    channel = tl.arange(0, c.KP)
    in_k = (channel < c.K)[None, :]
    of_s = S + row_of_state(at, slot) * s_step + (head * c.V + value[:, None]) * c.K + channel[None, :]
    s = tl.load(of_s, mask=in_v & in_k, other=0.0)
    of_w = w.heads + pair * c.COEFFICIENTS
    y = product(s, _probes(w, x, x_step, row, h, pair, n, c), OPERAND)
    updates = rec.x if c.MAMBA else rec.c
    of_c = updates + slot * (rec_step.x if c.MAMBA else rec_step.c) + head * (c.R * c.V) + value[:, None]
    if c.HP > 0:
        past = tl.arange(0, c.HP)
        ring = ring_at(first + past, c)
        held = (past < records)[None, :]
        old = tl.load(of_c + ring[None, :] * c.V, mask=held & in_v, other=0.0).to(tl.float32)
        old *= tl.load(of_w + c.FOLD + past)[None, :]
        of_seen = w.seen + (row * (c.HV // c.SHARED) + head // c.SHARED) * (c.NC * c.HP)
        seen = tl.load(of_seen + column[:, None] * c.HP + past[None, :])
        y = tl.load(of_w + c.TOTAL) * y + product(old, seen, OPERAND)
    y *= tl.load(of_w + c.SCALE + column)[None, :]

    of_v = x.v + row * x_step.v[0] + head * x_step.v[2] + (of * x_step.v[1])[None, :] + value[:, None]
    v = tl.load(of_v, mask=(starts & (of < n))[None, :] & in_v, other=0.0)
    left = v.to(tl.float32)
    if not c.MAMBA:
        left = tl.where(starts[None, :], left - y, 0.0)
    of_solve = of_w + column[:, None] * c.TP + of[None, :]
    y = tl.where(asks[None, :], y, 0.0)
    y += product(left, tl.load(of_solve, mask=starts[None, :], other=0.0), OPERAND)
    tl.store(to_out, tl.where((of < n)[None, :], y, 0.0).to(out.dtype.element_ty), mask=wanted)
    to_c = of_c + ring_at(ring_at(first + records, c) + of, c)[None, :] * c.V
    tl.store(
        to_c, (v if c.MAMBA else y).to(updates.dtype.element_ty), mask=(starts & (of < n))[None, :] & in_v
    )

    if c.HP > 0:
        if flush:
            if c.CHANNELS:
                of_key = w.vectors + pair * (c.VECTORS * c.K) + ((c.NC + past) * c.K)[None, :]
                of_total = w.vectors + (pair * c.VECTORS + c.NC + c.HP) * c.K
                total = tl.load(of_total + channel, mask=channel < c.K, other=0.0)[None, :]
            else:
                of_key = rec.k + slot * rec_step.k + (h * c.R + ring[None, :]) * c.K
                total = tl.load(of_w + c.TOTAL)
            keys = tl.load(of_key + channel[:, None], mask=held & (channel < c.K)[:, None], other=0.0)
            full = s.to(tl.float32) * total + product(old, keys, OPERAND)
            tl.store(of_s, full.to(S.dtype.element_ty), mask=in_v & in_k)
