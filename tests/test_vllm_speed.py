"""benchmarks/vllm_speed.py asks every engine the same, and says what came of it. No engine runs here."""

import importlib.util
from pathlib import Path

import pytest

from ssmspec import presets

FILE = Path(__file__).resolve().parents[1] / "benchmarks" / "vllm_speed.py"
spec = importlib.util.spec_from_file_location("vllm_speed", FILE)
assert spec is not None
assert spec.loader is not None
speed = importlib.util.module_from_spec(spec)
spec.loader.exec_module(speed)


@pytest.mark.parametrize("shape", ["qwen3.5-4b", "qwen3.5-122b-a10b"])
def test_the_recurrent_layers_are_the_models(shape: str) -> None:
    config, model = speed.config(shape), presets.load(shape)
    assert len(config["layer_types"]) == model.num_layers
    assert config["layer_types"].count("full_attention") == model.attention.num_layers
    g = model.geometry
    assert (config["linear_num_key_heads"], config["linear_num_value_heads"]) == (
        g.num_k_heads,
        g.num_v_heads,
    )
    assert (config["linear_key_head_dim"], config["linear_value_head_dim"]) == (g.head_k, g.head_v)


def test_engines_differ_in_the_policy_alone(tmp_path: Path) -> None:
    native, fast = (speed.engine(tmp_path, name, 256) for name in ("native", "fast-16"))
    own = {"policy": "checkpointing", "mode": "fast", "ring_len": 16}
    assert fast.pop("additional_config") == {"ssmspec": own}
    assert fast == native


def test_without_speculation_there_are_no_drafts(tmp_path: Path) -> None:
    none = speed.engine(tmp_path, "none", 8)
    assert "speculative_config" not in none
    assert none["compilation_config"]["cudagraph_capture_sizes"] == [1, 2, 4, 8]
    drafting = speed.engine(tmp_path, "native", 8)
    assert drafting["compilation_config"]["cudagraph_capture_sizes"] == [4, 8, 16, 32]


def test_compiled_is_what_vllm_does_by_itself(tmp_path: Path) -> None:
    compiled = speed.engine(tmp_path, "native", 8, compiled=True)
    assert compiled["compilation_config"] == {"cudagraph_capture_sizes": [4, 8, 16, 32]}
    plain = speed.engine(tmp_path, "native", 8)
    assert plain["compilation_config"]["mode"] == 0
    assert {**plain, "compilation_config": None} == {**compiled, "compilation_config": None}


def test_tokens_per_second_are_of_the_loads_and_not_of_what_warmed_up() -> None:
    log = "Maximum concurrency for 4,096 tokens per request: 261.00x\nSetting attention block size to 544 tokens"
    played = {
        "error": None,
        "log": log,
        "report": [],
        "seconds": {"start": 30.0, "waves": [9.0, 9.0, 1.0, 8.0]},
    }
    found = speed.record("native", [1, 256], played)
    assert [run["tok_s"] for run in found["runs"]] == [512.0, 256 * 512 / 8]
    assert (found["requests_of_4096_tokens_that_fit"], found["attention_block"]) == (261.0, 544)
