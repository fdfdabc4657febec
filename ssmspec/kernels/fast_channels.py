"""The couplings of a window whose decays are per channel: KDA.

As fast_couplings, but nothing can be multiplied on afterwards: probes and the keys that are folded leave with their
norms and decays in them, in fp32. Products of decays only ever shrink, because they are taken from a record to the
end of the history, from there to a token, or from token to token: nothing is divided.
"""

# Triton unpacks no tuples
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, var-annotated"

import triton
import triton.language as tl

from ssmspec.kernels.conv_math import ring_at
from ssmspec.kernels.fast_couplings import EPS, gram, load_channels
from ssmspec.kernels.fast_math import channel_decay, exp, rsqrt, sigmoid
from ssmspec.kernels.fast_rows import live_row, place_row
from ssmspec.kernels.handed import hand_over


@triton.jit
def _load_history(of_key, of_norm, of_decay, first, records, channel, c: tl.constexpr):
    """Tuples over records: key [KP], 1/norm, decay [KP]; all loads are under way before the first is waited for."""
    RECORDS: tl.constexpr = c.HP
    keys, norms, decays = (), (), ()
    for j in tl.static_range(RECORDS):
        ring = ring_at(first + j, c)
        held = (channel < c.K) & (j < records)
        keys = keys + (tl.load(of_key + ring * c.K + channel, mask=held, other=0.0),)
        norms = norms + (tl.load(of_norm + ring, mask=j < records, other=0.0),)
        decays = decays + (tl.load(of_decay + ring * c.K + channel, mask=held, other=1.0),)
    return keys, norms, decays


@triton.jit
def _history(loaded, c: tl.constexpr):
    """Keys [HP, KP] with their norms and the decays behind them, zero where there is no record; all decays [KP]."""
    RECORDS: tl.constexpr = c.HP
    keys, norms, decays = loaded
    past = tl.arange(0, c.HP)
    old = tl.full([c.HP, c.KP], 0.0, tl.float32)
    behind = tl.full([c.KP], 1.0, tl.float32)
    for i in tl.static_range(RECORDS):
        key = keys[RECORDS - 1 - i].to(tl.float32) * norms[RECORDS - 1 - i] * behind
        old = tl.where((past == RECORDS - 1 - i)[:, None], key[None, :], old)
        behind *= decays[RECORDS - 1 - i]
    return old, behind


@triton.jit
def _window(x, x_step, row, h, head, n, rate, bias, to_decay, first, channel, c: tl.constexpr):
    """Tuples over tokens: probes of key and query [KP], with norms and decays; 1/norm of the keys; and, over pairs
    (j, t), j first, what a unit update of token j adds to what key and query of token t see.

    Records the decays, from ring position ``first`` on. A vector lies over the lanes of one warp.
    """
    TOKENS: tl.constexpr = c.T
    upto = tl.full([c.KP], 1.0, tl.float32)
    keys, queries, gates = load_channels(x, x_step, row, h, head, n, channel, c)
    on_keys, on_queries, norms, probes, decayed = (), (), (), (), ()
    for t in tl.static_range(TOKENS):
        key, query = keys[t].to(tl.float32), queries[t].to(tl.float32)
        norm = rsqrt(tl.sum(key * key, 0) + EPS)
        key *= norm
        query *= rsqrt(tl.sum(query * query, 0) + EPS) * c.QUERY
        decay = channel_decay(gates[t].to(tl.float32), rate, bias, c.BOUND)
        tl.store(to_decay + ring_at(first + t, c) * c.K + channel, decay, mask=(channel < c.K) & (t < n))
        upto *= decay
        probes = probes + (key * upto, query * upto)
        later = ()
        for j in tl.static_range(t):
            old = decayed[j] * decay
            on_keys = on_keys + (tl.sum(old * key, 0),)
            on_queries = on_queries + (tl.sum(old * query, 0),)
            later = later + (old,)
        decayed = later + (key,)
        on_queries = on_queries + (tl.sum(key * query, 0),)
        norms = norms + (norm,)
    return probes, on_keys, on_queries, norms


@triton.jit
def _substitute(on_keys, on_queries, of_beta, b_step, n, to_solve, c: tl.constexpr):
    """As fast_couplings.substitute, of numbers that every lane has."""
    TOKENS: tl.constexpr = c.T
    PADDED: tl.constexpr = c.TP
    for j in tl.static_range(TOKENS):
        updates = ()
        for t in tl.static_range(PADDED):
            update, output = 0.0, 0.0
            if (t >= j) & (t < TOKENS):
                beta = sigmoid(tl.load(of_beta + t * b_step, mask=t < n, other=0.0).to(tl.float32))
                update = beta if t == j else 0.0
                for m in tl.static_range(j, t):
                    update -= beta * on_keys[t * (t - 1) // 2 + m] * updates[m - j]
                output = update * on_queries[t * (t + 1) // 2 + t]
                for m in tl.static_range(j, t):
                    output += updates[m - j] * on_queries[t * (t + 1) // 2 + m]
                updates = updates + (update,)
            hand_over(to_solve + t * c.NC + j, update)
            hand_over(to_solve + t * c.NC + c.TP + j, output)
    for j in tl.static_range(TOKENS, PADDED):
        for t in tl.static_range(2 * PADDED):
            hand_over(to_solve + t * c.TP + j, 0.0)


@triton.jit
def couple(to, x, x_step, A_log, dt_bias, D, at, rec, rec_step, OPERAND: tl.constexpr, c: tl.constexpr):
    """Coefficients to.heads, probes and folded keys to.vectors, and the records of keys, norms and decays.

    One program per (row, value head).
    """
    row = (tl.program_id(0) // c.HV).to(tl.int64)
    head = tl.program_id(0) % c.HV
    h = head // c.GROUP
    slot, n, first, records, flush = live_row(at, row)
    if head == 0:
        place_row(to, at, row, slot, n, first, records, flush)
    if n == 0:
        return
    channel = tl.arange(0, c.KP)
    in_k = channel < c.K
    rate = exp(tl.load(A_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head * c.K + channel, mask=in_k, other=0.0).to(tl.float32)
    rec_k = rec.k + slot * rec_step.k + h * (c.R * c.K)
    rec_norm = rec.rnorm + slot * rec_step.rnorm + h * c.R
    rec_decay = rec.decay + slot * rec_step.decay + head * (c.R * c.K)
    if c.HP > 0:
        loaded = _load_history(rec_k, rec_norm, rec_decay, first, records, channel, c)

    TOKENS: tl.constexpr = c.T
    behind = ring_at(first + records, c)
    probes, on_keys, on_queries, norms = _window(
        x, x_step, row, h, head, n, rate, bias, rec_decay, behind, channel, c
    )
    if head % c.GROUP == 0:
        for t in tl.static_range(TOKENS):
            ring = ring_at(behind + t, c)
            key = tl.load(x.k + row * x_step.k[0] + h * x_step.k[2] + t * x_step.k[1] + channel, mask=in_k)
            tl.store(rec_k + ring * c.K + channel, key, mask=in_k & (t < n))
            tl.store(rec_norm + ring, norms[t], mask=t < n)
    of_w = to.heads + (row * c.HV + head) * c.COEFFICIENTS
    of_beta = x.b + row * x_step.b[0] + head * x_step.b[2]
    _substitute(on_keys, on_queries, of_beta, x_step.b[1], n, of_w, c)
    column = tl.arange(0, c.NC)
    hand_over(of_w + c.SCALE + column, tl.full([c.NC], 1.0, tl.float32))

    of_p = to.vectors + (row * c.HV + head) * (c.VECTORS * c.K) + channel
    if c.HP > 0:
        old, total = _history(loaded, c)
        past = tl.arange(0, c.HP)
        beside = tl.full([c.NC, c.KP], 0.0, tl.float32)
        for i in tl.static_range(2 * TOKENS):
            beside = tl.where((column == i)[:, None], probes[i][None, :], beside)
        of_seen = to.seen + (row * c.HV + head) * (c.NC * c.HP)
        hand_over(of_seen + (column * c.HP)[None, :] + past[:, None], gram(old, beside, tl.float32))
        hand_over(of_w + c.FOLD + past, tl.full([c.HP], 1.0, tl.float32))
        hand_over(of_w + c.TOTAL + tl.arange(0, 4), tl.full([4], 1.0, tl.float32))
        if flush:
            hand_over(of_p[None, :] + ((c.NC + past) * c.K)[:, None], old, mask=in_k[None, :])
            hand_over(of_p + (c.NC + c.HP) * c.K, total, mask=in_k)
    for i in tl.static_range(2 * TOKENS):
        probe = probes[i]
        if c.HP > 0:
            probe *= total
        hand_over(of_p + i * c.K, probe, mask=in_k)
