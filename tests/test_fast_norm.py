"""Fast mode's outputs, normed and gated in the window's launch: those of the norm behind it."""

from dataclasses import replace

import pytest
import torch
from test_fast_triton import drawn
from torch import Tensor
from triton_lives import DEVICE, ON_GPU, policy, shape, staged, start

from ssmspec.geometry import DType, Geometry, Mode, Window
from ssmspec.kernels import fast
from ssmspec.kernels.fast_call import Gated
from ssmspec.kernels.norm_triton import TritonNorm

pytestmark = [pytest.mark.interpreter, pytest.mark.gpu]

SLOTS = [3, 0, 1, 5, -1]


def window_of(t: int) -> Window:
    return Window(max_len=t, mode=Mode.FAST) if ON_GPU else Window(max_len=t, ring_len=4, mode=Mode.FAST)


def near(got: Tensor, wanted: Tensor) -> None:
    """A unit in the last place, and in few places: sums of up to 256 fp32 squares, added in another order."""
    close = max(torch.finfo(got.dtype).eps, 2**-19)
    assert bool(((got - wanted).abs().double() <= close * wanted.abs().double()).all())
    if got.dtype != torch.float32:
        assert float((got != wanted).double().mean()) < 0.01


def compare(g: Geometry, t: int, norm: TritonNorm, steps: int) -> None:
    """Two lives side by side, through flushes, windows of every length and null rows."""
    w, gen = window_of(t), torch.Generator().manual_seed(t)
    fused, apart = policy("checkpointing", g, w), policy("checkpointing", g, w)
    for p in (fused, apart):
        start(p, [1, 3, 5], seed=0)
    heads, dtype = g.num_v_heads, torch.bfloat16 if ON_GPU else torch.float32
    values = norm.group if norm.group == g.head_v else heads * g.head_v
    weight = torch.randn(values, generator=gen).to(dtype).to(DEVICE)
    for i in range(steps):
        lens = [1 + (i + j) % t for j in range(len(SLOTS))]
        accepted = [max(1, n - i % 2) if slot > 0 else 0 for n, slot in zip(lens, SLOTS, strict=True)]
        x = drawn(g, len(SLOTS), t, gen)
        packed = torch.randn(len(SLOTS), t, 8 + heads * g.head_v, generator=gen).to(x.v.dtype).to(DEVICE)
        z = packed[..., 8:].view(*packed.shape[:2], heads, g.head_v)
        step = staged(w, SLOTS, lens, accepted=accepted)
        wanted = norm(apart.verify(0, step, x), z, weight, step)
        got = fused.verify(0, step, Gated(**vars(x), norm=norm, z=z, weight=weight, step=step))
        near(got, wanted)
        assert not got[[1, 4]].any()
        for p in (fused, apart):
            p.accept(step.close())
            step = staged(w, SLOTS, lens, accepted=accepted)
        for name, field in fused.pool.tensors.items():
            assert torch.equal(field.nan_to_num(), apart.pool[name].nan_to_num()), name


@pytest.mark.parametrize("few", [0, fast.FEW] if ON_GPU else [0])
@pytest.mark.parametrize("t", [1, 3, 4, 8, 16] if ON_GPU else [3])
@pytest.mark.parametrize("store", ["fp32", "bf16", "fp16"] if ON_GPU else ["fp32"])
@pytest.mark.parametrize("gate", ["gdn", "kda"])
def test_normed_in_the_window_or_behind_it(
    gate: str, store: str, t: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast, "FEW", few)
    g = shape(gate, store, num_layers=1)
    compare(g, t, TritonNorm.of(g), steps=12 if ON_GPU else 3)


@pytest.mark.parametrize("v", [16, 32, 64, 96, 128, 192] if ON_GPU else [12])
def test_heads_of_any_width_and_number(v: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "FEW", 0)
    g = shape("gdn", num_layers=1, num_k_heads=1, num_v_heads=3, head_v=v)
    compare(g, 3, TritonNorm.of(g), steps=8 if ON_GPU else 2)


@pytest.mark.parametrize("act", [DType.FP32, DType.BF16, DType.FP16] if ON_GPU else [DType.FP32])
def test_activations_of_any_kind(act: DType) -> None:
    g = shape("gdn", num_layers=1, act_dtype=act)
    compare(g, 3, replace(TritonNorm.of(g), eps=0.5), steps=6 if ON_GPU else 2)


def test_a_norm_over_several_heads_stays_behind_the_window() -> None:
    g = shape("mamba2", num_layers=1)
    compare(g, 3, TritonNorm.of(g), steps=6 if ON_GPU else 2)


@pytest.mark.skipif(not ON_GPU, reason="the interpreter has no Gluon")
def test_one_launch_norms_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gated, "apart", lambda *_: pytest.fail("normed apart"))
    for gate in ("gdn", "kda"):
        g, w, gen = shape(gate, num_layers=1), window_of(4), torch.Generator().manual_seed(0)
        p, x = policy("checkpointing", g, w), drawn(g, 1, 4, gen)
        start(p, [1], seed=0)
        step, norm = staged(w, [1], [4]), TritonNorm.of(g)
        weight = torch.ones(g.head_v, device=DEVICE)
        p.verify(0, step, Gated(**vars(x), norm=norm, z=x.v.contiguous(), weight=weight, step=step))
