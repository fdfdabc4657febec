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
        first = tl.load(at.base + slot, mask=n > 0, other=0)
        records = tl.load(at.count + slot, mask=n > 0, other=0)
    flush = (records > 0) & (records + n > at.limit)
    return slot, n, first, records, flush


@triton.jit
def row_of_state(at, slot):
    return slot if at.pages is None else tl.load(at.pages + slot)


@triton.jit
def pack(at, slot, n, first, records, flush):
    """A batch row in one number: 6 bits each, the flush's one, the slot's 20, and the state's row above."""
    numbers = (flush.to(tl.int64) << 18) | (records << 12) | (first << 6) | n
    return (row_of_state(at, slot) << 39) | ((slot & 0xFFFFF) << 19) | numbers


@triton.jit
def gram(x, y, OPERAND: tl.constexpr):
    """x [M, K], y [N, K] -> x y^T [M, N] fp32. Products of 16-bit activations are exact."""
    return tl.dot(
        x.to(OPERAND), tl.trans(y.to(OPERAND)), input_precision="tf32x3" if OPERAND == tl.float32 else "tf32"
    )


@triton.jit
def _gates(raw, rate, bias, SOFTPLUS: tl.constexpr):
    """Raw a or dt -> (dt, decay)."""
    x = raw.to(tl.float32) + bias
    dt = softplus(x) if SOFTPLUS else x
    return dt, exp(-rate * dt)


@triton.jit
def ring_at(position, c: tl.constexpr):
    """position in 0 .. 2R - 1."""
    return tl.where(position >= c.R, position - c.R, position)


@triton.jit
def substitute(on_keys, on_queries, beta, rows, c: tl.constexpr):
    """Solve for one unit of each token's residual: (updates, outputs) of the tokens behind it, [HEADS, TP, TP] each.

    on_keys and on_queries [HEADS, TP, TP]: what a unit update of token j adds to what token t sees. Their rows are
    written and read back one at a time: through memory that is one load, through registers many shuffles.
    """
    TOKENS: tl.constexpr = c.T
    token = tl.arange(0, c.TP)
    of_rows = rows[:, None, None] + token[None, None, :]
    tl.store(of_rows + (token * c.NC)[None, :, None], on_keys * beta[:, None, :])
    tl.store(of_rows + (token * c.NC + c.TP)[None, :, None], on_queries)
    tl.debug_barrier()
    seen = tl.full([c.HEADS, c.TP, c.TP], 0.0, tl.float32)
    updates = seen
    outputs = seen
    for i in tl.static_range(TOKENS):
        here = tl.sum(tl.where((token == i)[None, None, :], seen, 0.0), 2)
        update = tl.where((token == i)[None, :], beta, 0.0) - here
        seen += update[:, :, None] * tl.load(of_rows + i * c.NC)
        outputs += update[:, :, None] * tl.load(of_rows + (i * c.NC + c.TP))
        updates = tl.where((token == i)[None, None, :], update[:, :, None], updates)
    tl.debug_barrier()
    return updates, outputs


@triton.jit
def couple(to, x, x_step, A_log, dt_bias, D, at, rec, rec_step, OPERAND: tl.constexpr, c: tl.constexpr):
    """Coefficients to.heads, and the records of keys, norms and decays, for GDN and Mamba2.

    One program per (row, HEADS value heads of one key head).
    """
    parts: tl.constexpr = c.GROUP // c.HEADS
    row = (tl.program_id(0) // (c.H * parts)).to(tl.int64)
    h = tl.program_id(0) // parts % c.H
    part = tl.program_id(0) % parts
    slot, n, first, records, flush = live_row(at, row)
    if h + part == 0:
        tl.store(to.cursors + row, pack(at, slot, n, first, records, flush))
    if n == 0:
        return
    channel = tl.arange(0, c.KP)
    token = tl.arange(0, c.TP)
    head = (h * parts + part) * c.HEADS + tl.arange(0, c.HEADS)
    in_k = (channel < c.K)[None, :]
    live = token < n

    # all loads first: a program is short, and mostly waits
    of_k = x.k + row * x_step.k[0] + h * x_step.k[2] + (token * x_step.k[1])[:, None]
    of_q = x.q + row * x_step.q[0] + h * x_step.q[2] + (token * x_step.q[1])[:, None]
    keys = tl.load(of_k + channel[None, :], mask=live[:, None] & in_k, other=0.0)
    queries = tl.load(of_q + channel[None, :], mask=live[:, None] & in_k, other=0.0)
    of_a = x.a + row * x_step.a[0] + (head * x_step.a[2])[:, None]
    raw = tl.load(of_a + (token * x_step.a[1])[None, :], mask=live[None, :], other=0.0)
    rate = tl.load(A_log + head)
    bias = tl.load(dt_bias + head)
    if not c.MAMBA:
        of_b = x.b + row * x_step.b[0] + (head * x_step.b[2])[:, None]
        beta = tl.load(of_b + (token * x_step.b[1])[None, :], mask=live[None, :], other=0.0)
    of_keys = rec.k + slot * rec_step.k + h * (c.R * c.K)
    of_decay = rec.decay + slot * rec_step.decay + (head * c.R)[:, None]
    if c.MAMBA:
        of_dt = rec.dt + slot * rec_step.dt + (head * c.R)[:, None]
    else:
        of_norm = rec.rnorm + slot * rec_step.rnorm + h * c.R
    if c.HP > 0:
        past = tl.arange(0, c.HP)
        held = past < records
        ring = ring_at(first + past, c)
        old = tl.load(
            of_keys + (ring * c.K)[:, None] + channel[None, :], mask=held[:, None] & in_k, other=0.0
        )
        behind = tl.load(
            of_decay + ring_at(first + past + 1, c)[None, :], mask=(past + 1 < records)[None, :], other=1.0
        )
        oldest = tl.load(of_decay + first, mask=records > 0, other=1.0)
        if c.MAMBA:
            gains = tl.load(of_dt + ring[None, :], mask=held[None, :], other=0.0)
        else:
            gains = tl.load(of_norm + ring, mask=held, other=0.0)[None, :]

    on_queries = gram(keys, queries, OPERAND)
    if c.HP > 0:
        old_on_queries = gram(old, queries, OPERAND)
    if not c.MAMBA:
        on_keys = gram(keys, keys, OPERAND)
        if c.HP > 0:
            old_on_keys = gram(old, keys, OPERAND)
        wide = keys.to(tl.float32)
        k_norm = rsqrt(tl.sum(wide * wide, 1) + EPS)
        wide = queries.to(tl.float32)
        q_norm = rsqrt(tl.sum(wide * wide, 1) + EPS) * c.QUERY
    ring = ring_at(first + records + token, c)
    tl.store(
        of_keys + (ring * c.K)[:, None] + channel[None, :], keys, mask=(live & (part == 0))[:, None] & in_k
    )
    dt, decay = _gates(raw, exp(rate.to(tl.float32))[:, None], bias.to(tl.float32)[:, None], c.SOFTPLUS)
    tl.store(of_decay + ring[None, :], decay, mask=live[None, :])
    upto = tl.associative_scan(decay, 1, multiply)
    later = token[None, :] > token[:, None]
    between = tl.associative_scan(tl.where(later[None, :, :], decay[:, None, :], 1.0), 2, multiply)

    on_queries = tl.where(token[None, :] >= token[:, None], on_queries, 0.0)
    of_w = to.heads + (row * c.HV + head) * c.COEFFICIENTS
    solve = of_w[:, None, None] + c.SOLVE + (token * (c.PROBES * c.TP))[None, None, :] + token[None, :, None]
    if c.MAMBA:
        tl.store(of_dt + ring[None, :], dt, mask=live[None, :])
        outputs = dt[:, :, None] * (on_queries[None, :, :] * between)
        if D is not None:
            skip = tl.load(D + head).to(tl.float32)[:, None, None]
            outputs += tl.where((token[None, :] == token[:, None])[None, :, :], skip, 0.0)
        tl.store(solve, outputs)
    else:
        tl.store(of_norm + ring, k_norm, mask=live & (part == 0))
        on_keys = tl.where(later, on_keys, 0.0) * (k_norm[:, None] * k_norm[None, :])
        on_queries *= k_norm[:, None] * q_norm[None, :]
        beta = sigmoid(beta.to(tl.float32))
        on_keys = on_keys[None, :, :] * between
        on_queries = on_queries[None, :, :] * between
        updates, outputs = substitute(on_keys, on_queries, beta, of_w + c.SOLVE, c)
        tl.store(solve, updates)
        tl.store(solve + c.TP, outputs)

    total = tl.full([c.HEADS, 1], 1.0, tl.float32)
    if c.HP > 0:
        # products of the decays behind each record: a decay of 0 must stay 0, so no logs are subtracted
        behind = tl.associative_scan(behind, 1, multiply, reverse=True)
        total = oldest * tl.sum(tl.where((past == 0)[None, :], behind, 0.0), 1)[:, None]
        behind *= gains
        tl.store(of_w[:, None] + (c.FOLD + past)[None, :], behind)
        tl.store(of_w[:, None] + c.TOTAL, total)
    to_scale = of_w[:, None] + (c.SCALE + token * c.PROBES)[None, :]
    for probe in tl.static_range(2 if not c.MAMBA else 1):
        scale = upto
        if not c.MAMBA:
            scale = upto * (q_norm if probe == 1 else k_norm)[None, :]
        tl.store(to_scale + probe, total * scale)
        if c.HP > 0:
            seen = old_on_queries if c.MAMBA or probe == 1 else old_on_keys
            to_past = (
                of_w[:, None, None] + ((token * c.PROBES + probe) * c.HP)[None, None, :] + past[None, :, None]
            )
            tl.store(to_past, seen[None, :, :] * behind[:, :, None] * scale[:, None, :])
