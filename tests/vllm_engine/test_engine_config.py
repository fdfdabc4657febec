"""The plugin inside a real vLLM's front end: what it changes when asked, and that it changes nothing when not."""

import json
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import engine_checkpoint
import pytest

pytestmark = pytest.mark.vllm

MTP = {"method": "mtp", "num_speculative_tokens": 3}
OURS, STOCK = ["SsmspecQwen3NextForCausalLM"], ["Qwen3NextForCausalLM"]
REFUSED = {
    "--pipeline-parallel-size": {"pipeline_parallel_size": 2},
    "--speculative-config": {"speculative_config": None},
    "--speculative-config.method": {
        "speculative_config": {"method": "custom_class", "model": "my.Proposer", "num_speculative_tokens": 3}
    },
    "--speculative-config.parallel_drafting": {"speculative_config": {**MTP, "parallel_drafting": True}},
    "--model-impl": {"model_impl": "transformers"},
    "--ubatch-size": {"ubatch_size": 2},
    "--cpu-offload-gb": {"cpu_offload_gb": 1.0},
    "--offload-group-size": {"offload_group_size": 2},
    "--enable-lora": {"enable_lora": True},
    "--enforce-eager": {"enforce_eager": False},
    "--worker-extension-cls": {"worker_extension_cls": "my.Worker"},
    "--kv-offloading-size": {"kv_offloading_size": 1.0},
    "--mamba-cache-mode": {"mamba_cache_mode": "all"},
}
ITSELF = ("--mamba-cache-mode", "--ubatch-size")  # what vLLM refuses before


def _cases(model: str) -> dict[str, dict[str, Any]]:
    base: dict[str, Any] = {
        "model": model,
        "skip_tokenizer_init": True,
        "max_model_len": 512,
        "enforce_eager": True,
        "speculative_config": MTP,
    }

    def asked(policy: str, **more: Any) -> dict[str, Any]:
        return {"args": {**base, "additional_config": {"ssmspec": {"policy": policy}}, **more}}

    cli = [model, "--skip-tokenizer-init", "--max-model-len", "512", "--enforce-eager"]
    cli += ["--speculative-config", json.dumps(MTP)]
    recover = {"environment": {"SSMSPEC_POLICY": "recover"}}
    cases = {
        "nothing": {"args": base},
        "native": asked("native"),
        "no flag": {"cli": cli},
        "native flag": {"cli": [*cli, "--ssm-policy", "native"]},
        "reference": {
            "args": {**base, "additional_config": {"ssmspec": {"policy": "native", "backend": "torch"}}}
        },
        "recover": asked("recover"),
        "every-step": asked("every-step"),
        "checkpointing": asked("checkpointing"),
        "no prefix caching": asked("recover", enable_prefix_caching=False),
        "environment": {"args": base, **recover},
        "flag": {"cli": [*cli, "--ssm-policy", "recover", "--ssm-mode", "fast"]},
        "flag against environment": {"cli": [*cli, "--ssm-policy", "native"], **recover},
        "unknown flag value": {"cli": [*cli, "--ssm-policy", "recovery"]},
        "v1 runner": {**asked("recover"), "environment": {"VLLM_USE_V2_MODEL_RUNNER": "0"}},
    }
    return cases | {flag: asked("recover", **change) for flag, change in REFUSED.items()}


@pytest.fixture(scope="module")
def configs(run_script: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("configs")
    model = engine_checkpoint.write(folder / "model")
    source, target = folder / "cases.json", folder / "found.json"
    source.write_text(json.dumps(_cases(str(model))))
    run_script("engine_config.py", source, target)
    found: dict[str, Any] = json.loads(target.read_text())
    return found


def test_the_plugin_is_installed() -> None:
    (entry,) = entry_points(group="vllm.general_plugins", name="ssmspec")
    assert entry.value == "ssmspec.runtime.vllm:register"


@pytest.mark.parametrize(
    ("name", "additional"),
    [("nothing", {}), ("native flag", {}), ("native", {"ssmspec": {"policy": "native"}})],
)
def test_a_server_without_a_policy_is_stock(configs: dict[str, Any], name: str, additional: object) -> None:
    found = configs[name]
    assert found["architectures"] == STOCK
    assert found["extension"] == ""
    assert found["additional"] == additional


@pytest.mark.parametrize("policy", ["recover", "every-step", "checkpointing"])
def test_a_policy_selects_our_model_class_and_reaches_the_workers(
    configs: dict[str, Any], policy: str
) -> None:
    found = configs[policy]
    assert found["v2"]
    assert found["architectures"] == found["sent_architectures"] == OURS
    assert found["additional"] == found["sent"]
    assert found["sent"]["ssmspec"] == {"policy": policy, "mode": "exact", "backend": "engine"}


def test_prefix_caching_is_on_unless_switched_off(configs: dict[str, Any]) -> None:
    assert configs["recover"]["mode"] == "align"
    assert configs["no prefix caching"]["mode"] == "none"


def test_native_by_flag_leaves_the_config_of_a_stock_server(configs: dict[str, Any]) -> None:
    assert configs["native flag"] == configs["no flag"]


def test_every_policy_has_its_own_compile_hash(configs: dict[str, Any]) -> None:
    names = ["nothing", "reference", "recover", "every-step", "checkpointing"]
    assert len({configs[name]["hash"] for name in names}) == len(names)


def test_the_environment_is_folded_into_the_config(configs: dict[str, Any]) -> None:
    assert configs["environment"]["sent"] == configs["recover"]["sent"]


def test_the_flags_are_folded_into_the_config(configs: dict[str, Any]) -> None:
    assert configs["flag"]["sent"]["ssmspec"] == {"policy": "recover", "mode": "fast", "backend": "engine"}


def test_a_contradiction_is_an_error_that_names_both_sources(configs: dict[str, Any]) -> None:
    error = configs["flag against environment"]["error"]
    assert "--ssm-policy" in error
    assert "SSMSPEC_POLICY" in error


def test_an_unknown_flag_value_ends_the_command_line(configs: dict[str, Any]) -> None:
    assert configs["unknown flag value"]["error"] == "SystemExit: 2"


@pytest.mark.parametrize("flag", [f for f in REFUSED if f not in ITSELF])
def test_a_real_config_is_refused_by_the_flag(configs: dict[str, Any], flag: str) -> None:
    assert f"{flag}=" in configs[flag]["error"]
    assert "the nearest legal setting is" in configs[flag]["error"]


@pytest.mark.parametrize("flag", ITSELF)
def test_what_vllm_itself_refuses_is_an_error_too(configs: dict[str, Any], flag: str) -> None:
    assert "error" in configs[flag]


def test_a_request_whose_input_comes_in_pieces_fails_alone(configs: dict[str, Any]) -> None:
    assert "is not served with --ssm-policy every-step" in configs["every-step"]["streamed"]
    assert configs["nothing"]["streamed"] == ""


def test_the_v1_runner_is_refused(configs: dict[str, Any]) -> None:
    assert "VLLM_USE_V2_MODEL_RUNNER=False is not served" in configs["v1 runner"]["error"]


def test_the_checkpoint_is_the_same_on_every_machine(tmp_path: Path) -> None:
    first = engine_checkpoint.write(tmp_path / "a") / "model.safetensors"
    again = engine_checkpoint.write(tmp_path / "b") / "model.safetensors"
    assert first.read_bytes() == again.read_bytes()
