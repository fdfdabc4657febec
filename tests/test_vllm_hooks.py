"""On a vLLM without one of the places that the plugin wraps, a stock server starts as it is, and a policy does not."""

from types import SimpleNamespace
from typing import Any

import pytest

from ssmspec.runtime.vllm import compat, hooks


class EngineArgs:
    @staticmethod
    def add_cli_args(parser: Any) -> Any:
        return parser

    @classmethod
    def from_cli_args(cls, args: Any) -> Any:
        return args


@pytest.fixture(params=["EngineArgs", "VllmConfig", "VllmConfig.__post_init__"])
def lacking(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What this vLLM does not have."""
    there = {"EngineArgs": EngineArgs, "VllmConfig": type("VllmConfig", (), {})}

    def resolve(name: str) -> Any:
        if name == request.param:
            raise RuntimeError(f"this vLLM has no {name}, which ssmspec needs")
        return there[name]

    monkeypatch.setattr(compat, "resolve", resolve)
    name: str = request.param
    return name


def test_a_stock_server_starts_unchanged_with_a_warning(lacking: str) -> None:
    with pytest.warns(UserWarning, match=f"no {lacking}, .*: no policy is served"):
        hooks.install()
    assert not hasattr(EngineArgs.from_cli_args, "by_ssmspec")


def test_a_policy_of_the_environment_is_an_error(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSMSPEC_POLICY", "recover")
    with pytest.raises(RuntimeError, match=f"no {lacking}, which ssmspec needs"):
        hooks.install()


def test_a_policy_of_a_config_is_an_error_where_a_config_can_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class VllmConfig:
        def __init__(self, policy: str) -> None:
            self.model_config = SimpleNamespace(runner_type="generate", is_submodel_config=False)
            self.additional_config = {"ssmspec": {"policy": policy}}
            self.__post_init__()

        def __post_init__(self) -> None:
            self.started = True

    there = {"EngineArgs": type("EngineArgs", (), {}), "VllmConfig": VllmConfig}
    monkeypatch.setattr(compat, "resolve", there.__getitem__)
    with pytest.warns(UserWarning, match="no policy is served"):
        hooks.install()
    assert VllmConfig("native").started
    with pytest.raises(RuntimeError, match=r"no EngineArgs.add_cli_args, which ssmspec needs"):
        VllmConfig("recover")


def test_a_stock_config_is_looked_at_no_further() -> None:
    assert hooks._requested(SimpleNamespace(model_config=object(), additional_config=None)).stock


def test_a_config_without_a_model_is_not_asked_which_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mode may come from the environment, the policy from a flag that this config has not."""
    monkeypatch.setenv("SSMSPEC_MODE", "fast")
    assert hooks._requested(SimpleNamespace(model_config=None, additional_config={})).stock


def test_a_policy_has_to_be_written_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM takes any value with a compute_hash as its additional_config; the policy comes from the environment."""
    monkeypatch.setenv("SSMSPEC_POLICY", "recover")
    hf_config = SimpleNamespace(architectures=["Qwen3NextForCausalLM"])
    model = SimpleNamespace(runner_type="generate", is_submodel_config=False, hf_config=hf_config)
    asked = SimpleNamespace(model_config=model, additional_config=("opaque",))
    with pytest.raises(
        ValueError, match=r"additional_config=\('opaque',\) is not served with --ssm-policy recover"
    ):
        hooks._post_init(lambda self: None, asked)


def test_a_request_whose_input_comes_in_pieces_is_vllms_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "resolve", {"VLLMValidationError": KeyError}.__getitem__)
    model = SimpleNamespace(runner_type="generate", is_submodel_config=False)

    def front(**asked: str) -> SimpleNamespace:
        config = SimpleNamespace(model_config=model, additional_config={"ssmspec": asked})
        return SimpleNamespace(vllm_config=config)

    def stock(self: Any, request: str) -> str:
        return f"{request} is served"

    assert hooks._streamed(stock, front(), "r") == "r is served"
    with pytest.raises(KeyError, match=r"more input for a running request .* --ssm-policy recover"):
        hooks._streamed(stock, front(policy="recover"), "r")
