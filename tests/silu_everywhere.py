"""The conv's silu, launched by itself."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssmspec.kernels.conv_math import fast_silu, silu


@triton.jit
def _each(x, out, FAST: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(x + i)
    tl.store(out + i, fast_silu(y) if FAST else silu(y, True))


def silu_of(x: Tensor, *, fast: bool = False) -> Tensor:
    """Of a multiple of 1024 numbers."""
    out = torch.empty_like(x)
    _each[(x.numel() // 1024,)](x, out, fast, 1024, enable_fp_fusion=fast)
    return out
