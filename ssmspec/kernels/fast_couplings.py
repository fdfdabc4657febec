"""What the tokens of a window do to each other, without the state: the small half of the UT/WY form, for fast mode.

Every applied update c and output o of a window is linear in three things: the state's products with the window's
raw keys and queries (the probes), the updates on record, and the window's values. One program per HEADS value heads of a
key head works out the coefficients in fp32; the window kernel only multiplies. Per value head they are (fast_shape.Shape has the
offsets; column 2t is token t's key and 2t + 1 its query, or column t its query for Mamba2)

    solve   [columns, tokens]   v_t minus what token t sees of state and records in, c and the rest of o out
    scale   [columns]           what a probe sees: decays up to its token, and its norm
    fold    [records], total    a record's update, and the checkpoint, in the state behind the records

and per key head, seen [columns, records], the products of the records' raw keys with the probes,

so the unit lower triangular system of the delta rule is solved here, once, by substitution.
(Yang et al., Parallelizing Linear Transformers with the Delta Rule; Gated Delta Networks.)
"""

# Triton unpacks no tuples
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, var-annotated"

import triton
import triton.language as tl

from ssmspec.kernels.conv_math import ring_at
from ssmspec.kernels.fast_math import exp, rsqrt, sigmoid, softplus
from ssmspec.kernels.fast_rows import live_row, place_row
from ssmspec.kernels.fast_solve import substitute
from ssmspec.kernels.handed import hand_over

EPS = tl.constexpr(1e-6)  # of the l2 norm


@triton.jit
def multiply(a, b):
    return a * b


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
def _by_head(pairs, c: tl.constexpr):
    """[HEADS * TP] -> [HEADS, TP]; gathered, or the compiler works gates out anew in every layout that asks for them."""
    return tl.reshape(tl.gather(pairs, tl.arange(0, c.HEADS * c.TP), 0), [c.HEADS, c.TP])


@triton.jit
def load_tokens(x, x_step, row, h, n, c: tl.constexpr):
    """Keys and queries [TP, KP] of a key head, zeros behind the window's end."""
    channel = tl.arange(0, c.KP)
    token = tl.arange(0, c.TP)
    asked = (token < n)[:, None] & (channel < c.K)[None, :]
    of_k = x.k + row * x_step.k[0] + h * x_step.k[2] + (token * x_step.k[1])[:, None]
    of_q = x.q + row * x_step.q[0] + h * x_step.q[2] + (token * x_step.q[1])[:, None]
    keys = tl.load(of_k + channel[None, :], mask=asked, other=0.0)
    return keys, tl.load(of_q + channel[None, :], mask=asked, other=0.0)


@triton.jit
def load_channels(x, x_step, row, h, head, n, channel, c: tl.constexpr):
    """Tuples over tokens: raw keys, queries and gates of ``channel``, where gates are per channel; all are under way
    before the first is waited for."""
    TOKENS: tl.constexpr = c.T
    of_k = x.k + row * x_step.k[0] + h * x_step.k[2] + channel
    of_q = x.q + row * x_step.q[0] + h * x_step.q[2] + channel
    of_gate = x.a + row * x_step.a[0] + head * x_step.a[2] + channel
    keys, queries, gates = (), (), ()
    for t in tl.static_range(TOKENS):
        inside = (channel < c.K) & (t < n)
        gates = gates + (tl.load(of_gate + t * x_step.a[1], mask=inside, other=0.0),)
        keys = keys + (tl.load(of_k + t * x_step.k[1], mask=inside, other=0.0),)
        queries = queries + (tl.load(of_q + t * x_step.q[1], mask=inside, other=0.0),)
    return keys, queries, gates


@triton.jit
def load_gates(x, x_step, A_log, dt_bias, row, head, n, c: tl.constexpr):
    """Raw a or dt, the rates and biases, and raw b (a again for Mamba2), one pair of (head, token) a lane; HEADS
    heads from ``head`` on."""
    pair = tl.arange(0, c.HEADS * c.TP)
    head += pair // c.TP
    token = pair % c.TP
    of_a = x.a + row * x_step.a[0] + head * x_step.a[2]
    raw = tl.load(of_a + token * x_step.a[1], mask=token < n, other=0.0)
    beta = raw
    if not c.MAMBA:
        of_b = x.b + row * x_step.b[0] + head * x_step.b[2]
        beta = tl.load(of_b + token * x_step.b[1], mask=token < n, other=0.0)
    return raw, tl.load(A_log + head), tl.load(dt_bias + head), beta


@triton.jit
def load_history(rec, rec_step, slot, h, head, first, records, wanted, c: tl.constexpr):
    """Of the records: keys [HP, KP], where ``wanted``; decays [HEADS, HP], each the next record's, and the oldest
    one's; and what folds their updates, dt or 1 / norm [HEADS or 1, HP]."""
    channel = tl.arange(0, c.KP)
    past = tl.arange(0, c.HP)
    held = past < records
    ring = ring_at(first + past, c)
    of_keys = rec.k + slot * rec_step.k + h * (c.R * c.K) + (ring * c.K)[:, None]
    asked = (held & wanted)[:, None] & (channel < c.K)[None, :]
    old = tl.load(of_keys + channel[None, :], mask=asked, other=0.0)
    of_decay = rec.decay + slot * rec_step.decay + (head * c.R)[:, None]
    next_one = ring_at(first + past + 1, c)[None, :]
    behind = tl.load(of_decay + next_one, mask=(past + 1 < records)[None, :], other=1.0)
    oldest = tl.load(of_decay + first, mask=records > 0, other=1.0)
    if c.MAMBA:
        of_dt = rec.dt + slot * rec_step.dt + (head * c.R)[:, None]
        gains = tl.load(of_dt + ring[None, :], mask=held[None, :], other=0.0)
    else:
        of_norm = rec.rnorm + slot * rec_step.rnorm + h * c.R
        gains = tl.load(of_norm + ring, mask=held, other=0.0)[None, :]
    return old, behind, oldest, gains


@triton.jit
def couple_tokens(
    to, keys, queries, gates, history, D, rec, rec_step, row, slot, h, part, n, behind_at, OPERAND: tl.constexpr,
    c: tl.constexpr,
):  # fmt: skip
    """Coefficients to.heads and to.seen of keys and queries [TP, KP], and their records from position ``behind_at``
    on; for HEADS value heads, the ``part``-th of key head ``h``."""
    channel = tl.arange(0, c.KP)
    token = tl.arange(0, c.TP)
    ring = ring_at(behind_at + token, c)
    first_head = h * c.GROUP + part * c.HEADS
    head = first_head + tl.arange(0, c.HEADS)
    live = token < n
    on_queries = gram(keys, queries, OPERAND)
    if c.HP > 0:
        old, behind, oldest, gains = history
        past = tl.arange(0, c.HP)
        old_on_queries = gram(old, queries, OPERAND)
    if not c.MAMBA:
        on_keys = gram(keys, keys, OPERAND)
        if c.HP > 0:
            old_on_keys = gram(old, keys, OPERAND)
        wide = keys.to(tl.float32)
        k_norm = rsqrt(tl.sum(wide * wide, 1) + EPS)
        wide = queries.to(tl.float32)
        q_norm = rsqrt(tl.sum(wide * wide, 1) + EPS) * c.QUERY
    to_keys = rec.k + slot * rec_step.k + h * (c.R * c.K) + (ring * c.K)[:, None] + channel[None, :]
    tl.store(to_keys, keys, mask=(live & (part == 0))[:, None] & (channel < c.K)[None, :])

    # kept in registers: what is read back from half-written sectors comes from DRAM
    raw, rate, bias, beta = gates
    dt, decay = _gates(raw, exp(rate.to(tl.float32)), bias.to(tl.float32), c.SOFTPLUS)
    pair = tl.arange(0, c.HEADS * c.TP)
    to_pair = (first_head + pair // c.TP) * c.R + ring_at(behind_at + pair % c.TP, c)
    tl.store(rec.decay + slot * rec_step.decay + to_pair, decay, mask=pair % c.TP < n)
    decay = _by_head(decay, c)
    upto = tl.associative_scan(decay, 1, multiply)
    later = token[None, :] > token[:, None]
    between = tl.associative_scan(tl.where(later[None, :, :], decay[:, None, :], 1.0), 2, multiply)

    of_w = to.heads + (row * c.HV + head) * c.COEFFICIENTS
    on_queries = tl.where(token[None, :] >= token[:, None], on_queries, 0.0)
    if c.MAMBA:
        tl.store(rec.dt + slot * rec_step.dt + to_pair, dt, mask=pair % c.TP < n)
        outputs = _by_head(dt, c)[:, :, None] * (on_queries[None, :, :] * between)
        if D is not None:
            skip = tl.load(D + head).to(tl.float32)[:, None, None]
            outputs += tl.where((token[None, :] == token[:, None])[None, :, :], skip, 0.0)
        solve = of_w[:, None, None] + (token * (c.PROBES * c.TP))[None, None, :] + token[None, :, None]
        hand_over(solve, outputs)
    else:
        tl.store(rec.rnorm + slot * rec_step.rnorm + h * c.R + ring, k_norm, mask=live & (part == 0))
        on_keys = tl.where(later, on_keys, 0.0) * (k_norm[:, None] * k_norm[None, :])
        on_queries *= k_norm[:, None] * q_norm[None, :]
        beta = _by_head(sigmoid(beta.to(tl.float32)), c)
        on_keys = on_keys[None, :, :] * between
        on_queries = on_queries[None, :, :] * between
        substitute(on_keys, on_queries, beta, of_w, c)

    to_scale = of_w[:, None] + (c.SCALE + token * c.PROBES)[None, :]
    if c.MAMBA:
        hand_over(to_scale, upto)
    else:
        hand_over(to_scale, upto * k_norm[None, :])
        hand_over(to_scale + 1, upto * q_norm[None, :])
    if c.HP > 0:
        # products of the decays behind each record: a decay of 0 must stay 0, so no logs are subtracted
        behind = tl.associative_scan(behind, 1, multiply, reverse=True)
        total = oldest * tl.sum(tl.where((past == 0)[None, :], behind, 0.0), 1)[:, None]
        hand_over(of_w[:, None] + (c.FOLD + past)[None, :], behind * gains)
        hand_over(of_w[:, None] + (c.TOTAL + tl.arange(0, 4))[None, :], total)
        if part == 0:
            of_seen = to.seen + (row * c.H + h) * (c.NC * c.HP) + past[:, None]
            of_seen += (token * (c.PROBES * c.HP))[None, :]
            if not c.MAMBA:
                hand_over(of_seen, old_on_keys)
                of_seen += c.HP
            hand_over(of_seen, old_on_queries)


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
        place_row(to, at, row, slot, n, first, records, flush)
    if n == 0:
        return
    # all loads first: a program is short, and mostly waits
    keys, queries = load_tokens(x, x_step, row, h, n, c)
    first_head = h * c.GROUP + part * c.HEADS
    gates = load_gates(x, x_step, A_log, dt_bias, row, first_head, n, c)
    history = ()
    if c.HP > 0:
        heads = first_head + tl.arange(0, c.HEADS)
        history = load_history(rec, rec_step, slot, h, heads, first, records, part == 0, c)
    couple_tokens(
        to, keys, queries, gates, history, D, rec, rec_step, row, slot, h, part, n, ring_at(first + records, c),
        OPERAND, c,
    )  # fmt: skip
