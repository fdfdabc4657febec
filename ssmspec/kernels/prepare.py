"""What a window needs of its tokens, once per head instead of once per tile: norms, gates, and their records."""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ssmspec.geometry import Arch, Geometry
from ssmspec.kernels.base import Layer
from ssmspec.kernels.fast_rows import live_row, pack
from ssmspec.kernels.fast_shape import Cursors
from ssmspec.kernels.handed import hand_over
from ssmspec.kernels.launch import head_tile, shape_of, strides
from ssmspec.kernels.triton_records import Records
from ssmspec.kernels.triton_recurrence import decay_of, lanes, rnorm_of, softplus
from ssmspec.kernels.window import Inputs


class Room(NamedTuple):
    """Where it is written, in fp32: pointers, or strides over (batch, token, head)."""

    decay: Any  # [B, T, HV]; KDA [B, T, HV, K]
    beta: Any  # [B, T, HV]; Mamba2 dt
    k: Any = None  # [B, T, H, K], as they are multiplied; or 1 / norm [B, T, HV], which Mamba2 has none of
    q: Any = None


@triton.jit
def prepare(
    x,
    x_step,
    A_log,
    dt_bias,
    to,
    to_step,
    packed,
    at,
    ends,
    rec,
    rec_step,
    NORMS: tl.constexpr,
    g: tl.constexpr,
):
    """x is the window's Inputs, ``at`` its Cursors. Writes ``to``; of the records all but c and x; and, where
    ``packed`` [B, 2] is wanted, what hopper_fetch.read_row reads. A program serves LV key heads of a token, or its
    scalar gates, or for KDA the gates of LV value heads.
    """
    key_blocks: tl.constexpr = (g.H + g.LV - 1) // g.LV
    t, block, b = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    row, n, first, count, flush = live_row(at, b)
    if packed is not None:
        if t + block == 0:
            tl.store(packed + 2 * b, pack(at, row, n, first, count, flush))
            if ends is not None:
                ended = tl.load(ends + row)
                tl.store(packed + 2 * b + 1, (ended >> first) | (ended << (g.R - first)))
    if t >= n:
        return
    position = (first + count + t).to(tl.int32) % g.R
    if block < key_blocks:
        _, k_at, _, lk, lv = lanes(g)
        h = block * g.LV + lv
        _keys(x, x_step, to, to_step, b, t, h, k_at, lk, rec, rec_step, row, position, NORMS, g)
    elif block == key_blocks:
        _scalars(x, x_step, A_log, dt_bias, to, to_step, b, t, rec, rec_step, row, position, g)
    elif g.ARCH == "kda":
        _, k_at, _, lk, lv = lanes(g)
        hv = (block - key_blocks - 1) * g.LV + lv
        _channels(x, x_step, A_log, dt_bias, to, to_step, b, t, hv, k_at, rec, rec_step, row, position, g)


@triton.jit
def _keys(
    x, x_step, to, to_step, b, t, h, k_at, lk, rec, rec_step, row, at, NORMS: tl.constexpr, g: tl.constexpr
):
    GROUP: tl.constexpr = g.HV // g.H
    inside = (h < g.H) & (k_at < g.K)
    of_k = b * x_step.k[0] + t * x_step.k[1] + h * x_step.k[2] + k_at
    k = tl.load(x.k + of_k, mask=inside, other=0.0)
    if rec.k is not None:
        tl.store(rec.k + row * rec_step.k + (h * g.R + at) * g.K + k_at, k, mask=inside)
    if to.q is not None:
        of_q = b * x_step.q[0] + t * x_step.q[1] + h * x_step.q[2] + k_at
        q = tl.load(x.q + of_q, mask=inside, other=0.0)
        k, q = k.to(tl.float32), q.to(tl.float32)
        if g.ARCH != "mamba2":
            one = (lk == 0) & (h < g.H)
            k_norm, q_norm = rnorm_of(k), rnorm_of(q)
            k_spread, q_spread = tl.broadcast_to(k_norm, h.shape), tl.broadcast_to(q_norm, h.shape)
            if rec.rnorm is not None:
                tl.store(rec.rnorm + row * rec_step.rnorm + h * g.R + at, k_spread, mask=one)
            if NORMS:
                for i in tl.static_range(GROUP):
                    of_norm = b * to_step.k[0] + t * to_step.k[1] + (h * GROUP + i) * to_step.k[2]
                    hand_over(to.k + of_norm, k_spread, mask=one)
                    hand_over(to.q + of_norm, q_spread, mask=one)
            else:
                k, q = k * k_norm, q * q_norm * g.SCALE
        if not NORMS:
            of_head = b * to_step.k[0] + t * to_step.k[1] + h * g.K + k_at
            hand_over(to.k + of_head, k, mask=inside)
            hand_over(to.q + of_head, q, mask=inside)


@triton.jit
def _scalars(x, x_step, A_log, dt_bias, to, to_step, b, t, rec, rec_step, row, at, g: tl.constexpr):
    """One number per value head: beta, or dt; and the decay, but for KDA."""
    hv = tl.arange(0, g.PHV)
    live = hv < g.HV
    p_beta = to.beta + b * to_step.beta[0] + t * to_step.beta[1] + hv * to_step.beta[2]
    if g.ARCH != "mamba2":
        raw = tl.load(x.b + b * x_step.b[0] + t * x_step.b[1] + hv * x_step.b[2], mask=live, other=0.0)
        hand_over(p_beta, tl.sigmoid(raw.to(tl.float32)), mask=live)
    if g.ARCH != "kda":
        a = tl.load(x.a + b * x_step.a[0] + t * x_step.a[1] + hv * x_step.a[2], mask=live, other=0.0).to(
            tl.float32
        )
        rate = tl.exp(tl.load(A_log + hv, mask=live, other=0.0).to(tl.float32))
        bias = tl.load(dt_bias + hv, mask=live, other=0.0).to(tl.float32)
        if g.ARCH == "mamba2":
            a += bias
            if g.SOFTPLUS:
                a = softplus(a)
            hand_over(p_beta, a, mask=live)
            if rec.dt is not None:
                tl.store(rec.dt + row * rec_step.dt + hv * g.R + at, a, mask=live)
        decay = decay_of(a, rate, bias, g)
        hand_over(
            to.decay + b * to_step.decay[0] + t * to_step.decay[1] + hv * to_step.decay[2], decay, mask=live
        )
        if rec.decay is not None:
            tl.store(rec.decay + row * rec_step.decay + hv * g.R + at, decay, mask=live)


@triton.jit
def _channels(
    x, x_step, A_log, dt_bias, to, to_step, b, t, hv, k_at, rec, rec_step, row, at, g: tl.constexpr
):
    """KDA's decay per channel."""
    inside = (hv < g.HV) & (k_at < g.K)
    of_a = b * x_step.a[0] + t * x_step.a[1] + hv * x_step.a[2] + k_at
    gate = tl.load(x.a + of_a, mask=inside, other=0.0)
    rate = tl.exp(tl.load(A_log + hv, mask=hv < g.HV, other=0.0).to(tl.float32))
    bias = tl.load(dt_bias + hv * g.K + k_at, mask=inside, other=0.0).to(tl.float32)
    decay = decay_of(gate.to(tl.float32), rate, bias, g)
    of_decay = b * to_step.decay[0] + t * to_step.decay[1] + hv * g.K + k_at
    hand_over(to.decay + of_decay, decay, mask=inside)
    of_record = (hv * g.R + at) * g.K + k_at
    if rec.decay is not None:
        tl.store(rec.decay + row * rec_step.decay + of_record, decay, mask=inside)


def launch(
    g: Geometry,
    layer: Layer,
    x: Inputs,
    to: Room,
    at: Cursors,
    records: tuple[Records, Records],
    packed: Tensor | None = None,
    ends: Tensor | None = None,
    *,
    norms: bool = False,
) -> None:
    """``prepare`` over x [B, T, ...], where B and T are positive; ``records`` are tensors and a slot's strides.
    ``norms``: there is room for norms instead of vectors."""
    tile, (batch, t) = head_tile(g), x.v.shape[:2]
    blocks = triton.cdiv(g.num_k_heads, tile.lanes_v) + 1
    if g.arch is Arch.KDA:
        blocks += triton.cdiv(g.num_v_heads, tile.lanes_v)
    prepare[(t, blocks, batch)](
        x,
        strides(Inputs, x),
        layer.params.A_log,
        layer.params.dt_bias,
        to,
        strides(Room, to),
        packed,
        at,
        ends,
        *records,
        norms,
        shape_of(g, tile, layer.capacity),
        **tile.options,
    )
