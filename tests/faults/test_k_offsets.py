"""K: 64-bit offsets and addresses. The kernels over a pool of more than 2**31 elements are in tests/test_triton_memory.py."""

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

DEVICE = "cuda" if torch.cuda.is_available() and not triton.knobs.runtime.interpret else "cpu"


def test_an_address_with_the_top_bit_set_keeps_its_bits() -> None:
    """K2 (vllm-project/vllm#48109, #58863: XPU): 2**63 + 4096 as a row of an address table."""
    from ssmspec.kernels.fold_layers import _signed

    for address in (0, 4096, 2**63 - 1, 2**63, 2**63 + 4096, 2**64 - 1):
        entry = torch.tensor([_signed(address)], dtype=torch.int64)
        assert int.from_bytes(entry.numpy().tobytes(), "little") == address


@triton.jit
def _offset(out, slots, stride, WIDE: tl.constexpr):
    slot = tl.load(slots)
    if WIDE:
        slot = slot.to(tl.int64)  # as every kernel here does with a row that it loads
    tl.store(out, (slot * stride).to(tl.int64))


@pytest.mark.interpreter
@pytest.mark.gpu
def test_an_offset_that_is_not_widened_first_wraps() -> None:
    """K1, K4 (vllm-project/vllm#35275, microsoft/dion#103; ROCm/triton#830): 319 * 7,864,320 = 2,508,718,080."""
    slots = torch.tensor([319], dtype=torch.int32, device=DEVICE)
    found = {}
    for wide in (False, True):
        out = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        _offset[(1,)](out, slots, 7_864_320, wide)
        found[wide] = int(out)
    assert found == {True: 2_508_718_080, False: 2_508_718_080 - 2**32}
