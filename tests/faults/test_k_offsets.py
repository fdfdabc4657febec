"""K: 64-bit offsets and addresses. Offsets beyond 32 bits on a GPU are in tests/test_triton.py."""

import pytest
import torch

pytest.importorskip("triton")


def test_an_address_with_the_top_bit_set_keeps_its_bits() -> None:
    """K2 (vllm-project/vllm#48109, #58863: XPU): 2**63 + 4096 as a row of an address table."""
    from ssmspec.kernels.fold_layers import _signed

    for address in (0, 4096, 2**63 - 1, 2**63, 2**63 + 4096, 2**64 - 1):
        entry = torch.tensor([_signed(address)], dtype=torch.int64)
        assert int.from_bytes(entry.numpy().tobytes(), "little") == address
