"""The conv's and the norm's kernels compile for sm_90 without a GPU: no spills, and 16 or 8 bytes to a load."""

import os
from pathlib import Path
from typing import Any

import pytest
import test_triton_sm90
import torch

from ssmspec import layout, presets
from ssmspec.geometry import Conv, DType, Window
from ssmspec.kernels.base import Layer, LayerParams
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
    wide = "v4" if t <= 4 else "v2"  # longer windows are spread over more threads
    assert compiled[0].asm["ptx"].count(f"ld.global.{wide}.b32") == inputs + 4, "inputs and taps"
    assert compiled[1].asm["ptx"].count("ld.global.v4.b32") == 4, "y, z and, in fp32, the weights"


@pytest.mark.parametrize(("t", "rows"), [(2, 1), (4, 9), (8, 9), (16, 9), (16, 1)])
def test_the_fused_launch_has_no_spills_and_no_shared_memory(
    t: int, rows: int, compiled: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ssmspec.kernels import hopper_layer
    from ssmspec.kernels.conv_triton import ConvRing
    from ssmspec.kernels.hopper_shape import Order
    from ssmspec.kernels.layer_step import Projected, Weights

    monkeypatch.setattr(hopper_layer.selftest, "order_of", lambda g: Order.CHAIN)
    monkeypatch.setattr(hopper_layer.Call, "verify", lambda *_: None)
    g, w = presets.load("qwen3.5-4b").geometry, Window(max_len=t)
    pool = StatePool.allocate(layout.of("checkpointing", g, w), 1, 2)
    layer = Layer.of(
        pool, LayerParams(index=0, A_log=torch.zeros(32), dt_bias=torch.zeros(32)), pool["state"][0]
    )
    inputs = StatePool.allocate(ConvRing.layout(g.conv, t, g.act_dtype), 1, 2)
    inputs.tensors["conv"] = inputs["conv"].mT.contiguous().mT
    verify, step = hopper_layer.FusedVerify(g, w, lambda *_: torch.empty(0)), Step.empty(rows, t)

    def zeros(*sizes: int) -> torch.Tensor:
        return torch.zeros(*sizes, dtype=torch.bfloat16)

    projected = Projected(
        x=zeros(rows, t, 8192), z=zeros(rows, t, 32, 128), a=zeros(rows, t, 32), b=zeros(rows, t, 32)
    )
    fused = hopper_layer.FusedStep(
        g,
        ConvRing(g.conv, inputs),
        lambda _, step, x: verify(layer, x, step.slots, step.lens),
        lambda y, *_: y,
        [Weights(conv=zeros(4, 8192).mT, norm=zeros(128))],
    )
    fused(0, step, projected)
    (kernel,) = compiled
    assert kernel.name == "convolve_window"
    assert test_triton_sm90.usage(kernel, tmp_path)["STACK"] == 0
    assert kernel.metadata.shared == 0
