"""Fast mode's kernels compile for sm_90 without a GPU: on tensor cores, without spills, two programs to a processor."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_triton_sm90
import torch
from shapes import geometry
from test_triton_sm90 import step_once, usage

from ssmspec.geometry import Geometry, Mode, Window
from ssmspec.kernels.base import Tokens
from ssmspec.kernels.norm import GatedNorm
from ssmspec.step import Step

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted, not compiled")

SHARED_A_PROCESSOR, SHARED_RESERVED = (
    227 * 1024,
    1024,
)  # bytes, the latter per program (CUDA's tuning guide of Hopper)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What every launch would have launched, by name."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from ssmspec.kernels import fast

    kernels: dict[str, Any] = {}
    launch = JITFunction.run

    def compile_only(fn: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(fn, *args, grid=grid, warmup=True, **options)
        kernels[kernel.name] = kernel
        return kernel

    h200 = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(driver, "_active", h200)
    monkeypatch.setattr(fast, "_tuned", lambda *_: True)
    monkeypatch.setattr(fast, "FEW", 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132)
    )
    return kernels


def gated(g: Geometry, *tensors: torch.Tensor) -> Tokens:
    from ssmspec.kernels.fast_call import Gated

    x = Tokens.unpack(g, *tensors)
    step = Step.of([1, 2], [1, 1], x.v.shape[1])
    weight = torch.ones(g.head_v)
    return Gated(**vars(x), norm=GatedNorm.of(g), z=torch.zeros_like(x.v), weight=weight, step=step)


CASES = [("gdn", 4), ("gdn", 8), ("kda", 4), ("mamba2", 4)]  # the other two spill a few registers at 8


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("store", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("gate", "t"), CASES)
def test_windows_compile_without_spills(
    gate: str,
    store: str,
    t: int,
    normed: bool,
    compiled: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    if normed and gate == "mamba2":
        pytest.skip("a norm over several heads has a launch of its own")
    if normed:
        monkeypatch.setattr(test_triton_sm90, "Tokens", SimpleNamespace(unpack=gated))
    g = geometry(gate, store, num_layers=1, head_k=128, head_v=64 if gate == "mamba2" else 128)
    step_once("checkpointing", g, Window(max_len=t, mode=Mode.FAST))
    window = compiled["window"]
    assert "mma.sync" in window.asm["ptx"]
    assert ("rsqrt" in window.asm["ptx"]) == normed
    assert 2 * (window.metadata.shared + SHARED_RESERVED) <= SHARED_A_PROCESSOR
    for name in ("window", "couple"):
        used = usage(compiled[name], tmp_path)
        assert used["STACK"] == 0, (name, used)


@pytest.mark.parametrize(("gate", "k", "t"), [("gdn", 192, 4), ("kda", 256, 4), ("gdn", 128, 4)])
def test_a_program_has_room_on_a_multiprocessor(
    gate: str, k: int, t: int, compiled: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows have programs of more warps, and tiles of more rows of V, where that fits."""
    from ssmspec.kernels import fast

    monkeypatch.setattr(fast, "FEW", 256)
    step_once(
        "checkpointing",
        geometry(gate, "fp32", num_layers=1, head_k=k, head_v=128),
        Window(max_len=t, mode=Mode.FAST),
    )
    window = compiled["window"]
    assert window.metadata.num_warps == (8 if k == 128 else 4)
    assert window.metadata.shared + SHARED_RESERVED <= SHARED_A_PROCESSOR
