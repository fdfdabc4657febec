"""The Hopper windows compile for sm_90 without a GPU: no spills, and no more registers than sixteen warps have."""

import os
from pathlib import Path
from typing import Any

import pytest
import test_fast_sm90
import torch
from test_triton_sm90 import usage

from ssmspec import layout
from ssmspec.geometry import Arch, DType, Window
from ssmspec.kernels.base import History

pytest.importorskip("triton.experimental.gluon")
from hopper_draws import Draw, of_arch

from ssmspec.kernels import hopper, hopper_call
from ssmspec.kernels.hopper_shape import Order

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted, not compiled")
compiled = test_fast_sm90.compiled


@pytest.mark.parametrize(
    ("arch", "store", "t"),
    [(Arch.GDN, DType.BF16, 2), (Arch.KDA, DType.FP32, 4), (Arch.MAMBA2, DType.BF16, 4)],
)
def test_a_window_with_replay_has_no_spills(
    arch: Arch,
    store: DType,
    t: int,
    compiled: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hopper_call, "at_once", lambda *_: 1)
    g, w, draw = of_arch(arch, store, 2, 4), Window(max_len=t, ring_len=8), Draw(0)
    ring, none = layout.ring("checkpointing", w), torch.zeros(3, dtype=torch.int32)
    ends = none.long() if layout.rounds_at_ends("checkpointing", g, w) else None
    past = History(base=none, count=none, limit=ring.limit, ends=ends)
    rows, lens = torch.ones(16, dtype=torch.int64), torch.full((16,), t)
    verify = hopper.make_verify(g, w, Order.CHAIN)
    verify(draw.layer(g, 3, ring.capacity), draw.tokens(g, 16, t), rows, lens, history=past)
    used = usage(compiled["verify_window"], tmp_path)
    assert used["STACK"] == 0
    assert used["REG"] <= hopper_call.MAX_REGISTERS
