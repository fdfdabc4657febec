"""What a launch does for the next one of the same layer: numbers that it hands over, and states that it fetches ahead."""

import triton
import triton.language as tl

AHEAD = 24 * 2**20  # bytes of states that are fetched ahead: a part of the L2 cache


@triton.jit
def hand_over(p, x, mask=None):
    """tl.store of what stays in the L2 cache until it is read, whatever states stream through meanwhile."""
    tl.store(p, x, mask=mask, eviction_policy="evict_last")


@triton.jit
def fetch_ahead(p, size, mask):
    """Start copying ``size`` elements each from ``p`` on into the L2 cache, whole pieces of 16 bytes: while a window is
    prepared the memory has little else to do. sm_90 and later."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred %asked;
        setp.ne.b32 %asked, $3, 0;
        @%asked cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.b32 $0, 0;
        }""",
        "=r,l,r,r",
        [p, size * (p.dtype.element_ty.primitive_bitwidth // 8), mask.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
