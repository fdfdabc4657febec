"""What would go wrong without a word inside vLLM raises instead."""

import json
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def errors(run_script: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    target = tmp_path_factory.mktemp("guards") / "errors.json"
    run_script("engine_guards.py", target)
    found: dict[str, str] = json.loads(target.read_text())
    return found


def test_doctor_finds_every_name(errors: dict[str, str]) -> None:
    assert errors["doctor"] == "served on cpu"


def test_more_input_for_a_running_request_is_refused(errors: dict[str, str]) -> None:
    assert "more input for a running request is not served with --ssm-policy recover" in errors["readded"]


def test_a_name_may_come_back_once_its_request_has_finished(errors: dict[str, str]) -> None:
    assert errors["followed"] == ""


def test_a_layer_without_our_model_state_does_not_run(errors: dict[str, str]) -> None:
    assert "no session was bound to layers.0" in errors["unbound"]


def test_weights_that_are_loaded_anew_reach_the_policies(errors: dict[str, str]) -> None:
    assert errors["reloaded"] == ""


def test_a_decay_that_is_loaded_anew_by_vllms_reload_reaches_mamba2(errors: dict[str, str]) -> None:
    assert errors["reloaded decay"] == ""


def test_a_worker_that_runs_stock_says_so(errors: dict[str, str]) -> None:
    assert "not a policy" in errors["stock worker"]


def test_two_plugins_do_not_replace_the_same_layer(errors: dict[str, str]) -> None:
    assert "another plugin has replaced vLLM's Name" in errors["replaced twice"]
