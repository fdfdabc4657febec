"""A server that was told no ring takes the one that is fastest on its GPU, if one was measured."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ssmspec.geometry import Mode
from ssmspec.kernels import choices
from ssmspec.runtime.vllm import compat
from ssmspec.runtime.vllm.config import ServeConfig
from ssmspec.runtime.vllm.ring import of_engine

H200, SERVE = "NVIDIA H200", ServeConfig(policy="checkpointing")
QWEN = {
    "model_type": "qwen3_5_text",
    "architectures": ["SsmspecQwen3_5ForCausalLM"],
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "vocab_size": 512,
    "dtype": "bfloat16",
    "mamba_ssm_dtype": "float32",
}


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """What vLLM says that the GPU is."""

    def is_called(name: str) -> None:
        monkeypatch.setattr(compat, "resolve", lambda _: SimpleNamespace(get_device_name=lambda: name))

    is_called(H200)
    return is_called


def ring(
    config: dict[str, Any] = QWEN, serve: ServeConfig = SERVE, state: str = "auto", drafts: int = 3
) -> int | None:
    engine = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: config)),
        cache_config=SimpleNamespace(mamba_ssm_cache_dtype=state),
        speculative_config=SimpleNamespace(num_speculative_tokens=drafts),
    )
    return of_engine(serve, engine).ring_len


def measured(state_dtype: str) -> list[int]:
    """The committed table's, for GDN windows of 4 tokens in exact mode."""
    return [
        row.ring
        for row in choices.committed()[H200].rings
        if (row.mode, row.window, row.shape.arch) == (Mode.EXACT, 4, "gdn")
        and row.shape.state_dtype == state_dtype
    ]


@pytest.mark.parametrize(("asked", "state"), [("auto", "float32"), ("bfloat16", "bfloat16")])
def test_it_is_the_tables_for_the_state_that_is_served(asked: str, state: str) -> None:
    assert [ring(state=asked)] == measured(state)


@pytest.mark.parametrize("text", [QWEN, {"model_type": "qwen3_5", "text_config": QWEN}])
def test_a_text_model_is_found_inside_another(text: dict[str, Any]) -> None:
    assert [ring(text)] == measured("float32")


@pytest.mark.parametrize(
    "what",
    [
        {"drafts": 6},
        {"state": "float16"},
        {"serve": ServeConfig(policy="recover")},
        {"serve": ServeConfig(policy="checkpointing", mode=Mode.FAST)},
        {"config": {"model_type": "of another kind"}},
    ],
)
def test_what_was_not_measured_is_left_alone(what: dict[str, Any]) -> None:
    assert ring(**what) is None


def test_a_gpu_without_a_table_is_left_alone(device: Callable[[str], None]) -> None:
    device("NVIDIA GH100")
    assert ring() is None


def test_what_was_asked_for_stays() -> None:
    assert ring(serve=replace(SERVE, ring_len=24)) == 24
