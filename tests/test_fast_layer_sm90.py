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
from ssmspec.geometry import Arch, Geometry, Mode, Window
from ssmspec.kernels.base import History, Layer, LayerParams
from ssmspec.pool import StatePool
from ssmspec.step import Step

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted, not compiled")
compiled = test_fast_sm90.compiled


def zeros(*sizes: int) -> torch.Tensor:
    return torch.zeros(*sizes, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("model", "t", "rows", "paged"),
    [
        ("qwen3.5-4b", 2, 9, False),
        ("qwen3.5-4b", 4, 9, False),
        ("qwen3.5-4b", 4, 9, True),
        ("qwen3.5-4b", 8, 1, False),
        ("qwen3.5-4b", 8, 1, True),
        ("qwen3.5-4b", 8, 9, False),
        ("qwen3.5-4b", 8, 9, True),
        ("nemotron-3-super-120b-a12b", 4, 9, False),
    ],
)
def test_conv_and_couplings_are_one_launch_that_spills_two_registers_at_most(
    model: str,
    t: int,
    rows: int,
    paged: bool,
    compiled: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over rings of inputs; or over vLLM's pages, with weights as a model stores them."""
    from ssmspec.kernels import fast, fast_layer
    from ssmspec.kernels.layer_step import Projected
    from ssmspec.kernels.norm_triton import TritonNorm

    monkeypatch.setattr(fast, "_multiply", lambda *_: None)
    monkeypatch.setattr(TritonNorm, "__call__", lambda _, y, *rest: y)
    g, w = replace(presets.load(model).geometry, num_layers=1), Window(max_len=t, ring_len=16, mode=Mode.FAST)
    heads, channels, mamba = g.num_v_heads, g.conv.channels, g.arch is Arch.MAMBA2
    pool = StatePool.allocate(layout.of("checkpointing", g, w), 1, 2)
    skip = torch.zeros(heads) if mamba else None
    constants = LayerParams(index=0, A_log=torch.zeros(heads), dt_bias=torch.zeros(heads), D=skip)
    layer = Layer.of(pool, constants, pool["state"][0])
    projected = Projected(
        x=zeros(rows, t, channels),
        z=zeros(rows, t, heads, g.head_v),
        a=zeros(rows, t, heads),
        b=None if mamba else zeros(rows, t, heads),
    )
    settled, taps = in_pages(g, t) if paged else in_rings(g, t)
    assert fast_layer.merges(g, settled, projected.x, taps)
    step = Step.empty(rows, t)
    tokens = fast_layer.Unconvolved.of(
        g, projected, settled, taps, None, norm=TritonNorm.of(g), weight=zeros(g.head_v), step=step
    )
    verify = fast.make_verify(g, w, lambda *_: torch.empty(0), fast_layer.couple)
    history = History(base=pool["base"], count=pool["count"], limit=16)
    verify(layer, tokens, step.slots, step.lens, history=history)
    assert list(compiled) == ["convolve_and_couple"]
    # at T=8 eight registers more would spill none, and have fifteen programs for sixteen: 4 % slower on an H200
    assert usage(compiled["convolve_and_couple"], tmp_path)["STACK"] <= (8 if (t, rows) == (8, 9) else 0)
    assert "mma.sync" in compiled["convolve_and_couple"].asm["ptx"]


def in_rings(g: Geometry, t: int) -> tuple[Any, torch.Tensor]:
    """Settled inputs, and taps [D, W] whose channels are neighbours."""
    from ssmspec.kernels import fast_layer

    inputs = zeros(2, g.conv.history + t, g.conv.channels).mT
    at = torch.zeros(2, dtype=torch.int32)
    return fast_layer.Settled(conv=g.conv, field=inputs, at=at), zeros(g.conv.width, g.conv.channels).mT


def in_pages(g: Geometry, t: int) -> tuple[Any, torch.Tensor]:
    from ssmspec.kernels import fast_layer

    inputs = zeros(2, g.conv.history + t - 1, g.conv.channels).mT
    pages = torch.zeros(2, dtype=torch.int64)
    return fast_layer.Settled(conv=g.conv, field=inputs, pages=pages), zeros(g.conv.channels, g.conv.width)
