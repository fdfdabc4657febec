"""`ssmspec serve-check` says whether a server generates the same under every policy. Engines are played by a stand-in here."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ssmspec_cli import serve_check
from ssmspec_cli.main import app
from typer.testing import CliRunner

from ssmspec.runtime.vllm import play

Json = dict[str, Any]
LOG = "INFO Maximum concurrency for 4,096 tokens per request: 145.29x"


def request(tokens: list[int]) -> Json:
    return {"tokens": tokens, "logprobs": [{str(t): -0.5, "9": -0.75} for t in tokens], "cached": 32}


def played(tokens: list[int], policy: str) -> Json:
    report = [] if policy == "native" else [{"policy": policy, "flushes": 7}]
    metrics = {
        "vllm:spec_decode_num_drafts": 10,
        "vllm:spec_decode_num_accepted_tokens_per_pos": [8, 6, 4],
        "vllm:prompt_tokens": 128,
    }
    seconds = {"start": 30.0, "waves": [7.0, 2.0]}
    return {
        "waves": [[request(tokens[:1])], [request(tokens)]],
        "seconds": seconds,
        "report": report,
        "metrics": metrics,
        "error": None,
        "log": LOG,
    }


class Engines:
    """Gives out what each policy generates, and keeps what it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **tokens: list[int]) -> None:
        self.tokens, self.asked = tokens, []  # type: ignore[var-annotated]
        monkeypatch.setattr(serve_check, "play", self.play)
        monkeypatch.setattr(serve_check, "_on_gpu", lambda: True)

    def play(self, scenario: Json, tell: Any, limit: float) -> Json:
        self.asked.append(scenario)
        policy = scenario["engine"]["additional_config"].get("ssmspec", {}).get("policy", "native")
        if policy not in self.tokens:
            return {"error": "ValueError: no", "log": "starting\nValueError: no"}
        return played(self.tokens[policy], policy)


def run(*args: str) -> Any:
    return CliRunner().invoke(app, ["serve-check", *args], env={"COLUMNS": "200"})


def rows(*args: str) -> dict[str, Json]:
    return {row["policy"]: row for row in json.loads(run(*args, "--json").stdout)["rows"]}


def test_equal_tokens_end_well(monkeypatch: pytest.MonkeyPatch) -> None:
    Engines(monkeypatch, native=[1, 2, 3, 4], recover=[1, 2, 3, 4])
    found = run("some/model", "--policy", "recover")
    assert found.exit_code == 0, found.stderr
    assert "stock vLLM, VLLM_GDN_DECODE_KERNEL=triton" in found.stdout
    row = rows("some/model", "--policy", "recover")["recover"]
    assert (row["tokens_equal"], row["logprobs_equal"], row["first_difference"]) == (True, True, None)
    assert row["acceptance"] == [0.8, 0.6, 0.4]
    assert row["tokens_per_second"] == 4 / 2
    assert (row["concurrency"], row["concurrency_tokens"]) == (145.29, 4096)
    assert row["prefix_hit_rate"] == 64 / 128
    assert row["workers"][0]["flushes"] == 7


def test_the_first_different_token_is_named_with_natives_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    Engines(monkeypatch, native=[1, 2, 3, 4], recover=[1, 2, 5, 4])
    assert run("some/model", "--policy", "recover").exit_code == 1
    row = rows("some/model", "--policy", "recover")["recover"]
    assert not row["tokens_equal"]
    assert row["first_difference"] == {"request": 1, "token": 2, "native": 3, "found": 5, "native_gap": 0.25}


def test_fast_mode_may_leave_natives_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    Engines(monkeypatch, native=[1, 2], checkpointing=[1, 3])
    assert run("some/model", "--policy", "checkpointing", "--mode", "fast").exit_code == 0


def test_an_engine_that_fails_is_told_and_ends_badly(monkeypatch: pytest.MonkeyPatch) -> None:
    Engines(monkeypatch, native=[1, 2])
    found = run("some/model", "--policy", "recover")
    assert found.exit_code == 1
    assert "ValueError: no" in found.stdout
    assert found.stderr.endswith("recover:\nstarting\nValueError: no\n")
    row = rows("some/model", "--policy", "recover")["recover"]
    assert (row["error"], row["log"]) == ("ValueError: no", ["starting", "ValueError: no"])


def test_every_policy_gets_the_same_prompts_and_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines(monkeypatch, native=[1], recover=[1])
    run("some/model", "--policy", "recover", "--draft", "5", "--engine", '{"max_model_len": 512}')
    native, recover = engines.asked
    assert native["waves"] == recover["waves"]
    assert native["engine"].pop("additional_config") == {}
    assert recover["engine"].pop("additional_config") == {"ssmspec": {"policy": "recover", "mode": "exact"}}
    assert native["engine"] == recover["engine"]
    assert native["engine"]["speculative_config"]["synthetic_acceptance_rates"] == [0.8, 0.6, 0.4, 0.4, 0.4]
    assert native["engine"]["max_model_len"] == 512


def test_more_settings_are_the_policies_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring is checkpointing's."""
    engines = Engines(monkeypatch, native=[1], recover=[1], checkpointing=[1])
    more = {"additional_config": {"ssmspec": {"ring_len": 24}, "another": 1}}
    run("some/model", "--policy", "recover,checkpointing", "--engine", json.dumps(more))
    native, recover, checkpointing = (scenario["engine"]["additional_config"] for scenario in engines.asked)
    assert native == {"another": 1}
    assert checkpointing.pop("ssmspec") == {"policy": "checkpointing", "mode": "exact", "ring_len": 24}
    assert checkpointing == native
    assert recover == native | {"ssmspec": {"policy": "recover", "mode": "exact"}}


def test_a_drafter_that_needs_a_checkpoint_is_refused() -> None:
    found = run("some/model", "--method", "eagle3")
    assert found.exit_code == 2
    assert "'mtp', 'ngram'" in found.stderr


def test_a_folder_without_weights_is_served_with_dummies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 10}}')
    engines = Engines(monkeypatch, native=[1], recover=[1])
    run(str(tmp_path), "--policy", "recover")
    assert engines.asked[0]["engine"]["load_format"] == "dummy"
    assert max(t for w in engines.asked[0]["waves"] for p in w["prompts"] for t in p) < 10


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.pt"])
def test_a_folder_with_weights_is_served_with_them(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """vLLM's DefaultModelLoader._prepare_weights takes these three."""
    (tmp_path / name).touch()
    engines = Engines(monkeypatch, native=[1], recover=[1])
    run(str(tmp_path), "--policy", "recover")
    assert "load_format" not in engines.asked[0]["engine"]


def test_without_vllm_or_without_the_folder_there_is_a_sentence(tmp_path: Path) -> None:
    if importlib.util.find_spec("vllm") is None:
        assert "no vLLM is installed" in run(str(tmp_path)).output
    result = run(str(tmp_path / "gone"))
    assert result.exit_code == 2
    assert "no such folder" in result.output


def test_an_engine_argument_that_is_no_json_is_refused() -> None:
    found = run("some/model", "--engine", "{")
    assert found.exit_code == 2
    assert "--engine is not JSON" in found.stderr


@pytest.mark.parametrize("logprobs", [2, None])
def test_a_process_plays_a_scenario_into_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, logprobs: int | None
) -> None:
    class LLM:
        def __init__(self, **arguments: object) -> None:
            assert arguments["model"] == "m"

        def generate(self, prompts: list[Json], params: list[Json], use_tqdm: bool) -> list[Any]:
            assert all(p["logprobs"] == logprobs for p in params)
            known = [{4: SimpleNamespace(logprob=-1.0)}] if logprobs else None
            completion = SimpleNamespace(token_ids=[4, 5], logprobs=known)
            return [SimpleNamespace(outputs=[completion], num_cached_tokens=0) for _ in prompts]

        def collective_rpc(self, name: str) -> list[Json]:
            return [{"asked": name}]

        def get_metrics(self) -> list[Any]:
            return [SimpleNamespace(name="a", value=3), SimpleNamespace(name="b", values=[1, 2])]

    vllm = SimpleNamespace(LLM=LLM, SamplingParams=lambda **values: values)
    monkeypatch.setattr(play, "import_module", lambda name: vllm)
    scenario = {
        "engine": {"model": "m", "additional_config": {"ssmspec": {"policy": "recover"}}},
        "waves": [{"prompts": [[1], [2]], "max_tokens": [2, 2]}],
        **({} if logprobs else {"logprobs": None}),
    }
    (tmp_path / "in.json").write_text(json.dumps(scenario))
    play.main(tmp_path / "in.json", tmp_path / "out.json")
    found = json.loads((tmp_path / "out.json").read_text())
    kept = [{"4": -1.0}] if logprobs else []
    assert found["waves"] == [[{"tokens": [4, 5], "logprobs": kept, "cached": 0}] * 2]
    assert len(found["seconds"]["waves"]) == 1
    assert found["report"] == [{"asked": "ssmspec_report"}]
    assert found["metrics"] == {"a": 3, "b": [1, 2]}
