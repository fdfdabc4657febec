"""RMSNorm, then the gate, of a layer's outputs: the bits of vLLM's kernel, with the gate read where the projection left it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssmspec.kernels.heads import power_of_2

ROWS, PROGRAMS = 4, 2  # rows of a program, at most; programs per multiprocessor below which they are fewer


@triton.jit
def norm_then_gate(
    x,
    gate,
    gate_token,
    gate_head,
    weight,
    out,
    rows,
    eps,
    HEADS: tl.constexpr,
    N: tl.constexpr,
    PN: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A row is a head of a token. Tile, warps and order are those of ``layer_norm_fwd_kernel`` of vLLM 0.33.0
    (third_party/flash_linear_attention/ops/layernorm_guard.py), since the sum's order follows from them."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, PN)
    inside = (row[:, None] < rows) & (i[None, :] < N)
    at = row[:, None] * N + i[None, :]
    y = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.where(inside, y, 0.0)
    scale = tl.rsqrt(tl.sum(y * y, 1) / N + eps)
    y = y * scale[:, None] * tl.load(weight + i, mask=i < N, other=0.0).to(tl.float32)[None, :]
    of_gate = (row // HEADS) * gate_token + (row % HEADS) * gate_head
    z = tl.load(gate + of_gate[:, None] + i[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, y * (z * tl.sigmoid(z)), mask=inside)


def rows_of_a_program(rows: int, multiprocessors: int) -> int:
    """As vLLM's ``calc_rows_per_block``: 1, 2 or 4."""
    return min(ROWS, power_of_2(-(-rows // (PROGRAMS * multiprocessors))))


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """x, gate, out [tokens, HV, V] and weight [V]: out = silu(gate) * weight * x / rms(x); the gate may have any strides
    over tokens and heads."""
    tokens, heads, n = x.shape
    assert x.is_contiguous()
    assert out.is_contiguous()
    assert gate.shape == out.shape == x.shape
    assert gate.stride(2) == 1
    assert weight.shape == (n,)
    rows = tokens * heads
    if rows == 0:
        return
    multiprocessors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
    each, width = rows_of_a_program(rows, multiprocessors), power_of_2(n)
    norm_then_gate[(triton.cdiv(rows, each),)](
        x, gate, *gate.stride()[:2], weight, out, rows, eps, heads, n, width, each,
        num_warps=min(max(width // 256, 1), 8),
    )  # fmt: skip
