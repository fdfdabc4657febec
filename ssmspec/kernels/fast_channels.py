"""The couplings of a window whose decays are per channel: KDA.

As fast_couplings, but nothing can be multiplied on afterwards: probes and the keys that are folded leave with their
norms and decays in them, in fp32. Products of decays only ever shrink, because they are taken from a record to the
end of the history, from there to a token, or from token to token: nothing is divided.
"""

import triton
import triton.language as tl

from ssmspec.kernels.fast_couplings import EPS, gram, live_row, multiply, pack, ring_at, substitute
from ssmspec.kernels.fast_math import rsqrt, sigmoid
from ssmspec.kernels.triton_recurrence import decay_of


@triton.jit
def _history(of_key, of_norm, of_decay, first, records, channel, c: tl.constexpr):
    """Keys [HP, KP] with their norms and the decays behind them, zero where there is no record; all decays [KP]."""
    past = tl.arange(0, c.HP)
    in_k = (channel < c.K)[None, :]
    held, followed = (past < records)[:, None] & in_k, (past + 1 < records)[:, None] & in_k
    ring = ring_at(first + past, c)
    keys = tl.load(of_key + (ring * c.K)[:, None] + channel[None, :], mask=held, other=0.0).to(tl.float32)
    norms = tl.load(of_norm + ring, mask=past < records, other=0.0)
    later = ring_at(first + past + 1, c)
    behind = tl.load(of_decay + (later * c.K)[:, None] + channel[None, :], mask=followed, other=1.0)
    oldest = tl.load(of_decay + first * c.K + channel, mask=(channel < c.K) & (records > 0), other=1.0)
    behind = tl.associative_scan(behind, 0, multiply, reverse=True)
    total = oldest * tl.sum(tl.where((past == 0)[:, None], behind, 0.0), 0)
    return keys * norms[:, None] * behind, total


@triton.jit
def _window(of_key, of_query, of_gate, to_decay, x_step, first, n, rate, bias, channel, c: tl.constexpr):
    """The probes [NC, KP] with their norms and decays; what a unit update of token j adds to what key and query of
    token t see [TP, TP] twice; the norms of the keys [TP]. Records the decays, from ring position ``first`` on.
    """
    TOKENS: tl.constexpr = c.T
    token = tl.arange(0, c.TP)
    column = tl.arange(0, c.NC)
    probes = tl.full([c.NC, c.KP], 0.0, tl.float32)
    decayed = tl.full([c.TP, c.KP], 0.0, tl.float32)
    on_keys = tl.full([c.TP, c.TP], 0.0, tl.float32)
    on_queries = on_keys
    norms = tl.full([c.TP], 0.0, tl.float32)
    upto = tl.full([c.KP], 1.0, tl.float32)
    for i in tl.static_range(TOKENS):
        inside = (channel < c.K) & (i < n)
        key = tl.load(of_key + i * x_step.k[1] + channel, mask=inside, other=0.0).to(tl.float32)
        query = tl.load(of_query + i * x_step.q[1] + channel, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(of_gate + i * x_step.a[1] + channel, mask=inside, other=0.0).to(tl.float32)
        norm = rsqrt(tl.sum(key * key, 0) + EPS)
        key *= norm
        query *= rsqrt(tl.sum(query * query, 0) + EPS) * c.QUERY
        decay = decay_of(gate, rate, bias, c)
        tl.store(to_decay + ring_at(first + i, c) * c.K + channel, decay, mask=inside)
        upto *= decay
        probes = tl.where((column == 2 * i)[:, None], (key * upto)[None, :], probes)
        probes = tl.where((column == 2 * i + 1)[:, None], (query * upto)[None, :], probes)
        decayed *= decay[None, :]
        on_keys = tl.where((token == i)[None, :], tl.sum(decayed * key[None, :], 1)[:, None], on_keys)
        decayed = tl.where((token == i)[:, None], key[None, :], decayed)
        on_queries = tl.where((token == i)[None, :], tl.sum(decayed * query[None, :], 1)[:, None], on_queries)
        norms = tl.where(token == i, norm, norms)
    return probes, on_keys, on_queries, norms


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
        tl.store(to.cursors + row, pack(at, slot, n, first, records, flush))
    if n == 0:
        return
    channel = tl.arange(0, c.KP)
    in_k = channel < c.K
    of_k = x.k + row * x_step.k[0] + h * x_step.k[2]
    of_q = x.q + row * x_step.q[0] + h * x_step.q[2]
    of_gate = x.a + row * x_step.a[0] + head * x_step.a[2]
    rate = tl.exp(tl.load(A_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head * c.K + channel, mask=in_k, other=0.0).to(tl.float32)
    rec_k = rec.k + slot * rec_step.k + h * (c.R * c.K)
    rec_norm = rec.rnorm + slot * rec_step.rnorm + h * c.R
    rec_decay = rec.decay + slot * rec_step.decay + head * (c.R * c.K)

    token = tl.arange(0, c.TP)
    live = (token < n)[:, None] & in_k[None, :]
    ring = ring_at(first + records + token, c)
    if head % c.GROUP == 0:
        keys = tl.load(of_k + (token * x_step.k[1])[:, None] + channel[None, :], mask=live, other=0.0)
        tl.store(rec_k + (ring * c.K)[:, None] + channel[None, :], keys, mask=live)

    probes, on_keys, on_queries, norms = _window(
        of_k, of_q, of_gate, rec_decay, x_step, ring_at(first + records, c), n, rate, bias, channel, c
    )
    tl.store(rec_norm + ring, norms, mask=(token < n) & (head % c.GROUP == 0))
    of_w = to.heads + (row * c.HV + head) * c.COEFFICIENTS
    beta = tl.load(
        x.b + row * x_step.b[0] + head * x_step.b[2] + token * x_step.b[1], mask=token < n, other=0.0
    )
    beta = sigmoid(beta.to(tl.float32))[None, :]
    rows = of_w + c.SOLVE + tl.arange(0, 1)
    updates, outputs = substitute(on_keys[None, :, :], on_queries[None, :, :], beta, rows, c)
    to_solve = rows[:, None, None] + (token * (2 * c.TP))[None, None, :] + token[None, :, None]
    tl.store(to_solve, updates)
    tl.store(to_solve + c.TP, outputs)
    column = tl.arange(0, c.NC)
    tl.store(of_w + c.SCALE + column, tl.full([c.NC], 1.0, tl.float32))

    of_p = to.vectors + (row * c.HV + head) * (c.VECTORS * c.K) + channel
    if c.HP > 0:
        past = tl.arange(0, c.HP)
        old, total = _history(rec_k, rec_norm, rec_decay, first, records, channel, c)
        seen = gram(old, probes, tl.float32)
        tl.store(of_w + (column * c.HP)[None, :] + past[:, None], seen)
        tl.store(of_w + c.FOLD + past, tl.full([c.HP], 1.0, tl.float32))
        tl.store(of_w + c.TOTAL, 1.0)
        if flush:
            tl.store(of_p[None, :] + ((c.NC + past) * c.K)[:, None], old, mask=in_k[None, :])
            tl.store(of_p + (c.NC + c.HP) * c.K, total, mask=in_k)
        probes *= total[None, :]
    tl.store(of_p[None, :] + (column * c.K)[:, None], probes, mask=in_k[None, :])
