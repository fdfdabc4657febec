"""Layers of the CUDA build of vLLM, without a GPU: its code under Triton's interpreter, and ours in its place.

VLLM_CUDA_BUILD names a folder with the unpacked wheel of vllm 0.33.0.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from conftest import HERE, engine_environment
from layer_families import CONFIGS

BUILD = os.environ.get("VLLM_CUDA_BUILD")
pytestmark = [pytest.mark.vllm, pytest.mark.skipif(BUILD is None, reason="VLLM_CUDA_BUILD is not set")]

POLICIES, STEPS = (
    ("recover", "every-step", "checkpointing"),
    {"ragged": 6, "staged": 3, "gated": 3, "fast": 3, "mixed": 3, "behind": 3},
)
NAMES = {
    "gdn": ("QwenGatedDeltaNetAttention", "GatedDeltaNet"),
    "mamba2": ("MambaMixer2", "Mamba2"),
    "kda": ("KimiGatedDeltaNetAttention", "KimiDeltaAttention"),
}
Played = Callable[[str, str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """The outputs of a family's layer under a policy; a layer small enough for the interpreter."""
    folders = {family: tmp_path_factory.mktemp(family) for family in NAMES}
    for family, folder in folders.items():
        (folder / "config.json").write_text(json.dumps(CONFIGS[family]))

    def play(family: str, policy: str, kind: str) -> dict[str, Any]:
        folder = folders[family]
        target = folder / f"{policy}.{kind}.json"
        if not target.exists():
            env = engine_environment()
            path = os.pathsep.join([str(BUILD), env["PYTHONPATH"]])
            env |= {"PYTHONPATH": path, "VLLM_TARGET_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": ""}
            command = [
                sys.executable,
                HERE / "layer_steps.py",
                folder,
                family,
                policy,
                kind,
                str(STEPS[kind]),
            ]
            found = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)
            assert found.returncode == 0, found.stderr[-4000:]
        result: dict[str, Any] = json.loads(target.read_text())
        return result

    return play


def _flat(x: Any) -> list[float]:
    return [number for part in x for number in _flat(part)] if isinstance(x, list) else [x]


@pytest.mark.parametrize("kind", ["ragged", "staged"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", NAMES)
def test_windows_have_the_bits_of_a_page_per_token(
    played: Played, family: str, policy: str, kind: str
) -> None:
    native, ours = played(family, "native", kind), played(family, policy, kind)
    assert ours["layer"] == NAMES[family][1]
    assert ours["outs"] == native["outs"]


@pytest.mark.parametrize("kind", ["mixed", "behind"])
@pytest.mark.parametrize("family", NAMES)
def test_windows_beside_a_prompt_have_their_bits_and_the_prompt_vllms_own_method(
    played: Played, family: str, kind: str
) -> None:
    """A prompt before a window, as may be, or behind all, where vLLM puts it. The script compares the prompt."""
    assert played(family, "checkpointing", kind)["outs"] == played(family, "native", kind)["outs"]


def test_where_vllm_takes_its_fused_kernel_ours_go_there_with_the_norm_behind(played: Played) -> None:
    """The same windows; what stands for the norm doubles, which is exact."""
    plain, gated = (played("gdn", "checkpointing", kind) for kind in ("staged", "gated"))
    assert _flat(gated["outs"]) == [2 * x for x in _flat(plain["outs"])]


@pytest.mark.parametrize("policy", POLICIES)
def test_in_fast_mode_the_conv_over_vllms_pages_and_the_norm_go_with_the_window(
    played: Played, policy: str
) -> None:
    """Behind windows that were accepted in part, so that inputs in the wrong place would show."""
    exact, fast = (_flat(played("gdn", policy, kind)["outs"]) for kind in ("gated", "fast"))
    largest = max(map(abs, exact))
    assert all(abs(a - b) <= 2**-6 * largest for a, b in zip(exact, fast, strict=True))


@pytest.mark.parametrize("family", NAMES)
def test_a_page_per_token_is_what_vllms_own_layer_does(played: Played, family: str) -> None:
    """Outputs are bfloat16: sums of 128 terms in another order may round to its neighbour."""
    stock, native = played(family, "stock", "ragged"), played(family, "native", "ragged")
    assert stock["layer"] == NAMES[family][0]
    for theirs, ours in zip(stock["outs"], native["outs"], strict=True):
        assert all(
            abs(a - b) <= max(abs(a), 2**-10) * 2**-7 for a, b in zip(_flat(theirs), _flat(ours), strict=True)
        )
