"""The conv's and the norm's kernels compile for sm_90 without a GPU: no spills, and 16 bytes to a load."""

import os
from pathlib import Path
from typing import Any

import pytest
import test_triton_sm90
import torch

from ssmspec.geometry import Conv, DType
from ssmspec.pool import StatePool
from ssmspec.step import Step

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted, not compiled")
compiled = test_triton_sm90.compiled


@pytest.mark.parametrize("t", [1, 4, 8, 16])
def test_no_spills_and_wide_loads(t: int, compiled: list[Any], tmp_path: Path) -> None:
    from ssmspec.kernels.conv_triton import ConvRing
    from ssmspec.kernels.norm_triton import TritonNorm

    conv = Conv(channels=8192)
    pool = StatePool.allocate(ConvRing.layout(conv, t, DType.BF16), 1, 10)
    pool.tensors["conv"] = pool["conv"].mT.contiguous().mT
    ring, step = ConvRing(conv, pool), Step.of(range(1, 10), [t] * 9, t, accepted=[1] * 9)
    projected = torch.zeros(9, t, 8192 + 4096, dtype=torch.bfloat16)
    z = projected[..., 8192:].view(9, t, 32, 128)
    ring.verify(0, step, projected[..., :8192], torch.zeros(4, 8192, dtype=torch.bfloat16).mT)
    TritonNorm(group=128)(torch.zeros(9, t, 32, 128, dtype=torch.bfloat16), z, torch.ones(128), step)
    ring.accept(step.close())
    assert [k.name for k in compiled] == ["convolve", "norm_and_gate", "keep", "advance"]
    for kernel in compiled:
        assert test_triton_sm90.usage(kernel, tmp_path)["STACK"] == 0, kernel.name
    inputs = 3 + t
    assert compiled[0].asm["ptx"].count("ld.global.v4.b32") == inputs + 4, "inputs and taps"
    assert compiled[1].asm["ptx"].count("ld.global.v4.b32") == 4, "y, z and, in fp32, the weights"
