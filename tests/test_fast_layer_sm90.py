"""The merged launch of conv and couplings compiles for sm_90 without a GPU, and without spills."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_fast_sm90
import torch
from test_triton_sm90 import usage

from ssmspec import layout, presets
from ssmspec.geometry import Arch, Mode, Window
from ssmspec.kernels.base import History, Layer, LayerParams
from ssmspec.pool import StatePool
from ssmspec.step import Step

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted, not compiled")
compiled = test_fast_sm90.compiled


def zeros(*sizes: int) -> torch.Tensor:
    return torch.zeros(*sizes, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("model", "t", "rows"),
    [
        ("qwen3.5-4b", 2, 9),
        ("qwen3.5-4b", 4, 9),
        ("qwen3.5-4b", 8, 1),
        ("qwen3.5-4b", 8, 9),
        ("nemotron-3-super-120b-a12b", 4, 9),
    ],
)
def test_conv_and_couplings_are_one_launch_that_spills_two_registers_at_most(
    model: str, t: int, rows: int, compiled: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ssmspec.kernels import fast, fast_layer
    from ssmspec.kernels.conv_triton import ConvRing
    from ssmspec.kernels.layer_step import Projected, Weights
    from ssmspec.kernels.norm_triton import TritonNorm

    monkeypatch.setattr(fast, "_multiply", lambda *_: None)
    monkeypatch.setattr(TritonNorm, "__call__", lambda _, y, *rest: y)
    g, w = replace(presets.load(model).geometry, num_layers=1), Window(max_len=t, ring_len=16, mode=Mode.FAST)
    heads, channels, mamba = g.num_v_heads, g.conv.channels, g.arch is Arch.MAMBA2
    pool = StatePool.allocate(layout.of("checkpointing", g, w), 1, 2)
    skip = torch.zeros(heads) if mamba else None
    constants = LayerParams(index=0, A_log=torch.zeros(heads), dt_bias=torch.zeros(heads), D=skip)
    layer = Layer.of(pool, constants, pool["state"][0])
    history = History(base=pool["base"], count=pool["count"], limit=16)
    inputs = StatePool.allocate(ConvRing.layout(g.conv, t, g.act_dtype), 1, 2)
    inputs.tensors["conv"] = inputs["conv"].mT.contiguous().mT
    verify, step = fast.make_verify(g, w, lambda *_: torch.empty(0), fast_layer.couple), Step.empty(rows, t)
    fused = fast_layer.FastStep(
        g,
        ConvRing(g.conv, inputs),
        lambda _, step, x: verify(layer, x, step.slots, step.lens, history=history),
        TritonNorm.of(g),
        [Weights(conv=zeros(g.conv.width, channels).mT, norm=zeros(g.head_v))],
    )
    projected = Projected(
        x=zeros(rows, t, channels),
        z=zeros(rows, t, heads, g.head_v),
        a=zeros(rows, t, heads),
        b=None if mamba else zeros(rows, t, heads),
    )
    fused(0, step, projected)
    assert list(compiled) == ["convolve_and_couple"]
    # at T=8 eight registers more would spill none, and have fifteen programs for sixteen: 4 % slower on an H200
    assert usage(compiled["convolve_and_couple"], tmp_path)["STACK"] <= (8 if (t, rows) == (8, 9) else 0)
    assert "mma.sync" in compiled["convolve_and_couple"].asm["ptx"]
