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

    keys and queries [B, T, H, K], as they are multiplied; decays [B, T, HV], for KDA [B, T, HV, K]; and betas
    [B, T, HV], for Mamba2 dt; and of the records all but c and x. A program serves LV key heads of a token, or its
    scalar gates, or for KDA the gates of LV value heads.
    """
    key_blocks: tl.constexpr = (g.H + g.LV - 1) // g.LV
    t, block, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = tl.load(rows + b).to(tl.int64)
    if (row <= 0) | (t >= tl.load(lens + b)):
        return
    at = t
    if past.base is not None:
        at += tl.load(past.base + row) + tl.load(past.count + row)
    at = at % g.R
    of_token = b * T + t
    if block < key_blocks:
        _, k_at, _, lk, lv = lanes(g)
        h = block * g.LV + lv
        _keys(x, x_step, keys, queries, b, t, of_token, h, k_at, lk, rec, rec_step, row, at, g)
    elif block == key_blocks:
        _scalars(x, x_step, A_log, dt_bias, decays, betas, b, t, of_token, rec, rec_step, row, at, g)
    else:
        _, k_at, _, lk, lv = lanes(g)
        hv = (block - key_blocks - 1) * g.LV + lv
        _channels(x, x_step, A_log, dt_bias, decays, b, t, of_token, hv, k_at, rec, rec_step, row, at, g)


@triton.jit
def _keys(x, x_step, keys, queries, b, t, of_token, h, k_at, lk, rec, rec_step, row, at, g: tl.constexpr):
    inside = (h < g.H) & (k_at < g.K)
    of_k = b * x_step.k[0] + t.to(tl.int64) * x_step.k[1] + h * x_step.k[2] + k_at
    of_q = b * x_step.q[0] + t.to(tl.int64) * x_step.q[1] + h * x_step.q[2] + k_at
    k, q = tl.load(x.k + of_k, mask=inside, other=0.0), tl.load(x.q + of_q, mask=inside, other=0.0)
    if rec.k is not None:
        tl.store(rec.k + row * rec_step.k + (h * g.R + at) * g.K + k_at, k, mask=inside)
    k, q = k.to(tl.float32), q.to(tl.float32)
    if g.ARCH != "mamba2":
        rnorm = rnorm_of(k)
        k, q = k * rnorm, q * rnorm_of(q) * g.SCALE
        if rec.rnorm is not None:
            spread = tl.broadcast_to(rnorm, h.shape)
            tl.store(rec.rnorm + row * rec_step.rnorm + h * g.R + at, spread, mask=(lk == 0) & (h < g.H))
    of_head = (of_token * g.H + h) * g.K + k_at
    tl.store(keys + of_head, k, mask=inside)
    tl.store(queries + of_head, q, mask=inside)


@triton.jit
def _scalars(
    x, x_step, A_log, dt_bias, decays, betas, b, t, of_token, rec, rec_step, row, at, g: tl.constexpr
):
    """One number per value head: beta, or dt; and the decay, but for KDA."""
    hv = tl.arange(0, g.PHV)
    live = hv < g.HV
    of_head = of_token * g.HV + hv
    if g.ARCH != "mamba2":
        of_b = b * x_step.b[0] + t.to(tl.int64) * x_step.b[1] + hv * x_step.b[2]
        beta = tl.sigmoid(tl.load(x.b + of_b, mask=live, other=0.0).to(tl.float32))
        tl.store(betas + of_head, beta, mask=live)
    if g.ARCH != "kda":
        of_a = b * x_step.a[0] + t.to(tl.int64) * x_step.a[1] + hv * x_step.a[2]
        a = tl.load(x.a + of_a, mask=live, other=0.0).to(tl.float32)
        rate = tl.exp(tl.load(A_log + hv, mask=live, other=0.0).to(tl.float32))
        bias = tl.load(dt_bias + hv, mask=live, other=0.0).to(tl.float32)
        if g.ARCH == "mamba2":
            a += bias
            if g.SOFTPLUS:
                a = softplus(a)
            tl.store(betas + of_head, a, mask=live)
            if rec.dt is not None:
                tl.store(rec.dt + row * rec_step.dt + hv * g.R + at, a, mask=live)
        decay = decay_of(a, rate, bias, g)
        tl.store(decays + of_head, decay, mask=live)
        if rec.decay is not None:
            tl.store(rec.decay + row * rec_step.decay + hv * g.R + at, decay, mask=live)


@triton.jit
def _channels(
    x, x_step, A_log, dt_bias, decays, b, t, of_token, hv, k_at, rec, rec_step, row, at, g: tl.constexpr
):
    """KDA's decay per channel."""
    inside = (hv < g.HV) & (k_at < g.K)
    of_a = b * x_step.a[0] + t.to(tl.int64) * x_step.a[1] + hv * x_step.a[2] + k_at
    gate = tl.load(x.a + of_a, mask=inside, other=0.0)
    rate = tl.exp(tl.load(A_log + hv, mask=hv < g.HV, other=0.0).to(tl.float32))
    bias = tl.load(dt_bias + hv * g.K + k_at, mask=inside, other=0.0).to(tl.float32)
    decay = decay_of(gate.to(tl.float32), rate, bias, g)
    tl.store(decays + (of_token * g.HV + hv) * g.K + k_at, decay, mask=inside)
    of_record = (hv * g.R + at) * g.K + k_at
    if rec.decay is not None:
        tl.store(rec.decay + row * rec_step.decay + of_record, decay, mask=inside)
