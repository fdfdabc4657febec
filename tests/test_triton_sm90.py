"""The kernels compile for sm_90 without a GPU, and keep their tiles in registers from the load to the store."""

import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shapes import geometry

from ssmspec import layout
from ssmspec.geometry import Arch, Geometry, Window
from ssmspec.kernels.base import LayerParams, Tokens
from ssmspec.policies import POLICIES
from ssmspec.pool import StatePool, storage
from ssmspec.step import Step

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted, not compiled")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What every launch would have launched."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    kernels: list[Any] = []
    launch = JITFunction.run

    def compile_only(fn: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernels.append(launch(fn, *args, grid=grid, warmup=True, **options))

    h200 = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(driver, "_active", h200)
    return kernels


def usage(kernel: Any, tmp_path: Path) -> dict[str, int]:
    """Registers and stack (spills) as the assembler reports them."""
    from triton import knobs

    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    cuobjdump = knobs.nvidia.cuobjdump.path
    report = subprocess.run(
        [cuobjdump, "-res-usage", cubin], capture_output=True, text=True, check=True
    ).stdout
    return {name: int(re.search(rf"{name}:(\d+)", report)[1]) for name in ("REG", "STACK")}


def step_once(name: str, g: Geometry, w: Window) -> None:
    from ssmspec.kernels import triton_backend

    pool = StatePool.allocate(layout.of(name, g, w), 1, 4)
    bias = torch.zeros((g.num_v_heads, g.head_k) if g.arch is Arch.KDA else (g.num_v_heads,))
    skip = torch.zeros(g.num_v_heads) if g.arch is Arch.MAMBA2 else None
    constants = LayerParams(index=0, A_log=torch.zeros(g.num_v_heads), dt_bias=bias, D=skip)
    policy = POLICIES[name](g, w, pool, triton_backend.make(g, w), [constants])
    packed = torch.zeros(2, w.max_len, 2 * g.num_k_heads * g.head_k + g.num_v_heads * g.head_v)
    gate = torch.zeros(2, w.max_len, *bias.shape)
    beta = None if g.arch is Arch.MAMBA2 else torch.zeros(2, w.max_len, g.num_v_heads)
    packed, gate, beta = (t if t is None else t.to(storage(g.act_dtype)) for t in (packed, gate, beta))
    step = Step.of([1, 2], [w.max_len] * 2, w.max_len, accepted=[1, 1])
    policy.verify(0, step, Tokens.unpack(g, packed, gate, beta))
    policy.accept(step.close())


@pytest.mark.parametrize(
    ("name", "gate", "store"),
    [
        ("native", "gdn", "fp32"),
        ("checkpointing", "gdn", "fp32"),
        ("checkpointing", "kda", "bf16"),
        ("recover", "mamba2", "fp16"),
    ],
)
def test_tiles_stay_in_registers(
    name: str, gate: str, store: str, compiled: list[Any], tmp_path: Path
) -> None:
    g = geometry(gate, store, num_layers=1, head_k=128, head_v=64 if gate == "mamba2" else 128)
    step_once(name, g, Window(max_len=4))
    accept = ["fold", "fold"] if name == "native" else ["_move", "fold"]
    assert [k.name for k in compiled] == ["prepare", "window", *accept]
    for kernel in compiled:
        used = usage(kernel, tmp_path)
        assert used["STACK"] == 0, (kernel.name, used)
        assert "st.shared" not in kernel.asm["ptx"], kernel.name  # a change of layout would go through there
        assert used["REG"] <= 168
