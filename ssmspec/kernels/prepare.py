"""What a window needs of its tokens, once per head instead of once per tile: norms, gates, and their records."""

import triton
import triton.language as tl

from ssmspec.kernels.triton_recurrence import decay_of, lanes, rnorm_of, softplus


@triton.jit
def prepare(
    x,
    x_step,
    A_log,
    dt_bias,
    keys,
    queries,
    decays,
    betas,
    rows,
    lens,
    T,
    past,
    rec,
    rec_step,
    g: tl.constexpr,
):
    """x is the window's Inputs. Writes, in fp32 and packed:

    keys and queries [B, T, H, K] (none for Mamba2, which takes them as they are), decays [B, T, HV], for KDA
    [B, T, HV, K], and betas [B, T, HV], for Mamba2 dt; and of the records all but c and x. A program serves LV
    key heads or LV value heads of one token.
    """
    key_blocks: tl.constexpr = 0 if g.ARCH == "mamba2" and rec.k is None else (g.H + g.LV - 1) // g.LV
    t, block, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = tl.load(rows + b).to(tl.int64)
    if (row <= 0) | (t >= tl.load(lens + b)):
        return
    at = t
    if past.base is not None:
        at += tl.load(past.base + row) + tl.load(past.count + row)
    at = at % g.R
    _, k_at, _, lk, lv = lanes(g)
    if block < key_blocks:
        h = block * g.LV + lv
        _keys(x, x_step, keys, queries, b, t, T, h, k_at, lk, rec, rec_step, row, at, g)
    else:
        hv = (block - key_blocks) * g.LV + lv
        _gates(x, x_step, A_log, dt_bias, decays, betas, b, t, T, hv, k_at, lk, rec, rec_step, row, at, g)


@triton.jit
def _keys(x, x_step, keys, queries, b, t, T, h, k_at, lk, rec, rec_step, row, at, g: tl.constexpr):
    inside = (h < g.H) & (k_at < g.K)
    of_token = b * x_step.k[0] + t.to(tl.int64) * x_step.k[1]
    k = tl.load(x.k + of_token + h * x_step.k[2] + k_at, mask=inside, other=0.0)
    if rec.k is not None:
        tl.store(rec.k + row * rec_step.k + (h * g.R + at) * g.K + k_at, k, mask=inside)
    if g.ARCH != "mamba2":
        of_token = b * x_step.q[0] + t.to(tl.int64) * x_step.q[1]
        q = tl.load(x.q + of_token + h * x_step.q[2] + k_at, mask=inside, other=0.0).to(tl.float32)
        k = k.to(tl.float32)
        rnorm = rnorm_of(k)
        of_head = ((b * T + t) * g.H + h) * g.K + k_at
        tl.store(keys + of_head, k * rnorm, mask=inside)
        tl.store(queries + of_head, q * rnorm_of(q) * g.SCALE, mask=inside)
        if rec.rnorm is not None:
            spread = tl.broadcast_to(rnorm, h.shape)
            tl.store(rec.rnorm + row * rec_step.rnorm + h * g.R + at, spread, mask=(lk == 0) & (h < g.H))


@triton.jit
def _gates(
    x, x_step, A_log, dt_bias, decays, betas, b, t, T, hv, k_at, lk, rec, rec_step, row, at, g: tl.constexpr
):
    live = hv < g.HV
    once = live & (lk == 0)
    rate = tl.exp(tl.load(A_log + hv, mask=live, other=0.0).to(tl.float32))
    of_head = (b * T + t) * g.HV + hv
    of_record = hv * g.R + at
    of_a = x.a + b * x_step.a[0] + t.to(tl.int64) * x_step.a[1] + hv * x_step.a[2]
    if g.ARCH == "kda":
        inside = live & (k_at < g.K)
        gate = tl.load(of_a + k_at, mask=inside, other=0.0)
        bias = tl.load(dt_bias + hv * g.K + k_at, mask=inside, other=0.0).to(tl.float32)
        decay = decay_of(gate.to(tl.float32), rate, bias, g)
        tl.store(decays + of_head * g.K + k_at, decay, mask=inside)
        if rec.gate is not None:
            tl.store(rec.gate + row * rec_step.gate + of_record * g.K + k_at, gate, mask=inside)
    else:
        a = tl.load(of_a, mask=live, other=0.0).to(tl.float32)
        bias = tl.load(dt_bias + hv, mask=live, other=0.0).to(tl.float32)
        if g.ARCH == "mamba2":
            a += bias
            if g.SOFTPLUS:
                a = softplus(a)
            tl.store(betas + of_head, a, mask=once)
            if rec.dt is not None:
                tl.store(rec.dt + row * rec_step.dt + of_record, a, mask=once)
        decay = decay_of(a, rate, bias, g)
        tl.store(decays + of_head, decay, mask=once)
        if rec.decay is not None:
            tl.store(rec.decay + row * rec_step.decay + of_record, decay, mask=once)
    if g.ARCH != "mamba2":
        of_b = x.b + b * x_step.b[0] + t.to(tl.int64) * x_step.b[1] + hv * x_step.b[2]
        beta = tl.sigmoid(tl.load(of_b, mask=live, other=0.0).to(tl.float32))
        tl.store(betas + of_head, beta, mask=once)
