"""What the tokens of a window do to each other, without the state: the small half of the UT/WY form, for fast mode.

Every applied update c and output o of a window is linear in three things: the state's products with the window's
raw keys and queries (the probes), the updates on record, and the window's values. One program per key head works
out the coefficients in fp32; the window kernel only multiplies. Per value head they are (fast_shape.Shape has the
offsets; column 2t is token t's key and 2t + 1 its query, or column t its query for Mamba2)

    past    [columns, records]  a record's update, times k_j . decays . probe
    solve   [columns, tokens]   v_t minus what token t sees of state and records in, c and the rest of o out
    scale   [columns]           the state's product with a probe: decays up to its token, and its norm
    fold    [records], total    a record's update, and the checkpoint, in the state behind the records

so the unit lower triangular system of the delta rule is solved here, once, by substitution.
(Yang et al., Parallelizing Linear Transformers with the Delta Rule; Gated Delta Networks.)
"""

import triton
import triton.language as tl

from ssmspec.kernels.fast_math import exp, rsqrt, sigmoid, softplus

EPS = tl.constexpr(1e-6)  # of the l2 norm


@triton.jit
def multiply(a, b):
    return a * b


@triton.jit
def live_row(at, row):
    """(slot, tokens, first record, records, flush) of a batch row; no tokens on a null row."""
    slot = tl.load(at.rows + row).to(tl.int64)
    n = tl.where(slot > 0, tl.load(at.lens + row), 0).to(tl.int32)
    slot = tl.maximum(slot, 0)
    first = tl.full([], 0, tl.int32)
    records = first
    if at.count is not None:
        first = tl.load(at.base + slot)
        records = tl.load(at.count + slot)
    flush = (records > 0) & (records + n > at.limit)
    return slot, n, first, records, flush


@triton.jit
def pack(slot, n, first, records, flush):
    """A batch row in one number: 6 bits each, and the slot above."""
    return (slot << 24) | (flush.to(tl.int64) << 18) | (records << 12) | (first << 6) | n


@triton.jit
def _gram(x, y, OPERAND: tl.constexpr):
    """x [M, K], y [N, K] -> x y^T [M, N] fp32. Products of 16-bit activations are exact."""
    return tl.dot(x.to(OPERAND), tl.trans(y.to(OPERAND)), input_precision="tf32x3" if OPERAND == tl.float32 else "tf32")


@triton.jit
def _gates(raw, rate, bias, SOFTPLUS: tl.constexpr):
    """Raw a or dt -> (dt, decay)."""
    x = raw.to(tl.float32) + bias
    dt = softplus(x) if SOFTPLUS else x
    return dt, exp(-rate * dt)


@triton.jit
def _ring(position, c: tl.constexpr):
    """position in 0 .. 2R - 1."""
    return tl.where(position >= c.R, position - c.R, position)


@triton.jit
def _substitute(weight, beta, gain, to_rows, c: tl.constexpr):
    """Solve [HEADS, TP, NC]: update and extra output per unit of each token's residual, from weight [.., TP, NC].

    Rows are written and read back one at a time: through memory that is one load, through registers many shuffles.
    """
    TOKENS: tl.constexpr = c.T
    token = tl.arange(0, c.TP)
    column = tl.arange(0, c.NC)
    tl.store(to_rows + (token * c.NC)[None, :, None], weight * gain[:, None, :])
    tl.debug_barrier()
    seen = tl.full([c.HEADS, c.TP, c.NC], 0.0, tl.float32)
    solve = seen
    for i in tl.static_range(TOKENS):
        here = tl.sum(tl.where((column == 2 * i)[None, None, :], seen, 0.0), 2)
        update = tl.where((token == i)[None, :], beta, 0.0) - here
        seen += update[:, :, None] * tl.load(to_rows + i * c.NC)
        solve = tl.where((column == 2 * i)[None, None, :], update[:, :, None], solve)
    tl.debug_barrier()
    return tl.where((column % 2 == 1)[None, None, :], seen, solve)


@triton.jit
def couple(W, cursors, x, x_step, A_log, dt_bias, D, at, rec, rec_step, OPERAND: tl.constexpr, c: tl.constexpr):
    """Coefficients W [B, HV, COEFFICIENTS], and the records of keys, norms and decays, for GDN and Mamba2.

    One program per (row, HEADS value heads of one key head).
    """
    parts: tl.constexpr = c.GROUP // c.HEADS
    row = (tl.program_id(0) // (c.H * parts)).to(tl.int64)
    h = tl.program_id(0) // parts % c.H
    part = tl.program_id(0) % parts
    slot, n, first, records, flush = live_row(at, row)
    if h + part == 0:
        tl.store(cursors + row, pack(slot, n, first, records, flush))
    if n == 0:
        return
    channel = tl.arange(0, c.KP)
    token = tl.arange(0, c.TP)
    column = tl.arange(0, c.NC)
    of = column // c.PROBES
    asks = column % c.PROBES == c.PROBES - 1
    starts = column % c.PROBES == 0
    head = (h * parts + part) * c.HEADS + tl.arange(0, c.HEADS)
    in_k = (channel < c.K)[None, :]

    # all loads first: a program is short, and mostly waits
    of_p = x.q + row * x_step.q[0] + h * x_step.q[2]
    of_k = x.k + row * x_step.k[0] + h * x_step.k[2]
    of_a = x.a + row * x_step.a[0] + (head * x_step.a[2])[:, None]
    if c.MAMBA:
        of_p = of_p + (of * x_step.q[1])[:, None]
        keys = tl.load(of_k + (token * x_step.k[1])[:, None] + channel[None, :], mask=(token < n)[:, None] & in_k, other=0.0)
    else:
        of_p = tl.where(asks, of_p + of * x_step.q[1], of_k + of * x_step.k[1])[:, None]
        of_b = x.b + row * x_step.b[0] + (head * x_step.b[2])[:, None]
        beta = tl.load(of_b + (token * x_step.b[1])[None, :], mask=(token < n)[None, :], other=0.0)
        gain = tl.load(of_b + (of * x_step.b[1])[None, :], mask=(starts & (of < n))[None, :], other=0.0)
    probes = tl.load(of_p + channel[None, :], mask=(of < n)[:, None] & in_k, other=0.0)
    raw = tl.load(of_a + (of * x_step.a[1])[None, :], mask=(of < n)[None, :], other=0.0)
    rate = tl.load(A_log + head)
    bias = tl.load(dt_bias + head)
    of_keys = rec.k + slot * rec_step.k + h * (c.R * c.K)
    of_decay = rec.decay + slot * rec_step.decay + (head * c.R)[:, None]
    if c.MAMBA:
        of_dt = rec.dt + slot * rec_step.dt + (head * c.R)[:, None]
    else:
        of_norm = rec.rnorm + slot * rec_step.rnorm + h * c.R
    if c.HP > 0:
        past = tl.arange(0, c.HP)
        ring = _ring(first + past, c)
        old = tl.load(of_keys + (ring * c.K)[:, None] + channel[None, :], mask=(past < records)[:, None] & in_k, other=0.0)
        behind = tl.load(of_decay + _ring(first + past + 1, c)[None, :], mask=(past + 1 < records)[None, :], other=1.0)
        oldest = tl.load(of_decay + first, mask=records > 0, other=1.0)
        if c.MAMBA:
            gains = tl.load(of_dt + ring[None, :], mask=(past < records)[None, :], other=0.0)
        else:
            gains = tl.load(of_norm + ring, mask=past < records, other=0.0)[None, :]

    inner = _gram(keys if c.MAMBA else probes, probes, OPERAND)
    if c.HP > 0:
        outer = _gram(old, probes, OPERAND)
    rate = exp(rate.to(tl.float32))[:, None]
    bias = bias.to(tl.float32)[:, None]
    dt, decay = _gates(raw, rate, bias, c.SOFTPLUS)
    ring = _ring(first + records + of, c)
    tl.store(of_decay + ring[None, :], decay, mask=(starts & (of < n))[None, :])
    upto = tl.associative_scan(tl.where(starts[None, :], decay, 1.0), 1, multiply)
    later = starts[None, :] & (of[None, :] > token[:, None])
    between = tl.associative_scan(tl.where(later[None, :, :], decay[:, None, :], 1.0), 2, multiply)
    reaches = tl.where(asks[None, :], of[None, :] >= token[:, None], of[None, :] > token[:, None])

    to = W + (row * c.HV + head) * c.COEFFICIENTS
    to_solve = to[:, None, None] + (c.SOLVE + column * c.TP)[None, None, :] + token[None, :, None]
    scale = upto
    if c.MAMBA:
        tl.store(of_dt + ring[None, :], dt, mask=(starts & (of < n))[None, :])
        ring = _ring(first + records + token, c)
        tl.store(of_keys + (ring * c.K)[:, None] + channel[None, :], keys, mask=((token < n) & (part == 0))[:, None] & in_k)
        weight = tl.where(reaches[None, :, :], inner[None, :, :] * between, 0.0)
        raw = tl.load(of_a + (token * x_step.a[1])[None, :], mask=(token < n)[None, :], other=0.0)
        dt, _ = _gates(raw, rate, bias, c.SOFTPLUS)
        solve = dt[:, :, None] * weight
        if D is not None:
            skip = tl.load(D + head).to(tl.float32)[:, None, None]
            solve += tl.where((of[None, :] == token[:, None])[None, :, :], skip, 0.0)
    else:
        tl.store(of_keys + (ring * c.K)[:, None] + channel[None, :], probes, mask=(starts & (of < n) & (part == 0))[:, None] & in_k)
        wide = probes.to(tl.float32)
        norm = rsqrt(tl.sum(wide * wide, 1) + EPS)
        tl.store(of_norm + ring, norm, mask=starts & (of < n) & (part == 0))
        key_norm, _ = tl.split(tl.reshape(norm, [c.TP, 2]))
        norm *= tl.where(asks, c.QUERY, 1.0)
        scale *= norm[None, :]
        inner, _ = tl.split(tl.permute(tl.reshape(inner, [c.TP, 2, c.NC]), (0, 2, 1)))
        inner *= key_norm[:, None] * norm[None, :]
        weight = tl.where(reaches[None, :, :], inner[None, :, :] * between, 0.0)
        gain = tl.where(starts[None, :], sigmoid(gain.to(tl.float32)), 1.0)
        to_rows = to[:, None, None] + c.SOLVE + column[None, None, :]
        solve = _substitute(weight, sigmoid(beta.to(tl.float32)), gain, to_rows, c)
    tl.store(to_solve, solve)

    total = tl.full([c.HEADS, 1], 1.0, tl.float32)
    if c.HP > 0:
        # products of the decays behind each record: a decay of 0 must stay 0, so no logs are subtracted
        behind = tl.associative_scan(behind, 1, multiply, reverse=True)
        total = oldest * tl.sum(tl.where((past == 0)[None, :], behind, 0.0), 1)[:, None]
        behind *= gains
        to_past = to[:, None, None] + (column * c.HP)[None, None, :] + past[None, :, None]
        tl.store(to_past, outer[None, :, :] * behind[:, :, None] * scale[:, None, :])
        tl.store(to[:, None] + (c.FOLD + past)[None, :], behind)
        tl.store(to[:, None] + c.TOTAL, total)
    tl.store(to[:, None] + (c.SCALE + column)[None, :], total * scale)
