"""What the plugin registers in vLLM, and which rows it takes from it; classes made up here stand for vLLM's."""

import importlib
import os
import sys
import tomllib
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from ssmspec.runtime.rows import Rows
from ssmspec.runtime.vllm import compat, hooks, refusals
from ssmspec.runtime.vllm.config import KEY

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
GROUP = "vllm.general_plugins"
ARCHITECTURE = "Qwen3NextForCausalLM"


@dataclass
class Front:
    """vLLM's classes as they are before a plugin came, and what was called of them."""

    calls: list[str] = field(default_factory=list)
    checked: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        calls = self.calls

        class EngineArgs:
            @staticmethod
            def add_cli_args(parser: ArgumentParser) -> ArgumentParser:
                return parser

            @classmethod
            def from_cli_args(cls, args: Namespace) -> Namespace:
                calls.append("from_cli_args")
                return args

        @dataclass
        class VllmConfig:
            model_config: Any
            additional_config: dict[str, Any] = field(default_factory=dict)
            parallel_config: Any = field(default_factory=SimpleNamespace)

            def __post_init__(self) -> None:
                calls.append("__post_init__")

        class AsyncLLM:
            def _add_streaming_input_request(self) -> None: ...

        self.EngineArgs, self.VllmConfig, self.AsyncLLM = EngineArgs, VllmConfig, AsyncLLM


@pytest.fixture
def front(monkeypatch: pytest.MonkeyPatch) -> Front:
    found = Front()
    monkeypatch.setattr(compat, "resolve", lambda name: getattr(found, name))
    monkeypatch.setattr(compat, "check", lambda: "cpu")
    monkeypatch.setattr(refusals, "check", lambda config, serve, device: found.checked.append(config))
    for name in [n for n in os.environ if n.startswith("SSMSPEC_")]:
        monkeypatch.delenv(name)
    declared = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["entry-points"]
    plugin = EntryPoint("ssmspec", declared[GROUP]["ssmspec"], GROUP)
    for _ in range(3):  # vLLM loads plugins in every process, and may do so again
        plugin.load()()
    return found


def model(runner: str = "generate") -> SimpleNamespace:
    return SimpleNamespace(
        runner_type=runner,
        is_submodel_config=False,
        hf_config=SimpleNamespace(architectures=[ARCHITECTURE]),
        model_class_overrides={},
    )


def test_the_validator_is_registered_and_runs_once(front: Front) -> None:
    """N1 (a fork's config tests: a helper between decorator and validator had unregistered it)."""
    with pytest.raises(ValueError, match="nearest legal value is recover"):
        front.VllmConfig(model(), {KEY: {"policy": "recovery"}})
    front.calls.clear()
    config = front.VllmConfig(model(), {KEY: {"policy": "recover"}})
    assert front.calls == ["__post_init__"]
    assert front.checked == [config]
    parser = front.EngineArgs.add_cli_args(ArgumentParser())
    args = front.EngineArgs.from_cli_args(parser.parse_args(["--ssm-policy", "recover"]))
    assert args.additional_config[KEY]["policy"] == "recover"
    with pytest.raises(SystemExit):
        parser.parse_args(["--ssm-policy", "recovery"])


def test_a_drafters_config_leaves_the_targets_choice_alone(front: Front) -> None:
    """N2 (the same): a drafter shares the target's settings; selecting again selects the same."""
    target = front.VllmConfig(model(), {KEY: {"policy": "recover"}})
    chosen = (target.model_config.hf_config.architectures, dict(target.model_config.model_class_overrides))
    assert chosen[0] == [hooks.OURS + ARCHITECTURE]
    drafter = front.VllmConfig(model("draft"), target.additional_config, target.parallel_config)
    assert drafter.model_config.hf_config.architectures == [ARCHITECTURE]
    assert not drafter.model_config.model_class_overrides
    again = front.VllmConfig(target.model_config, target.additional_config, target.parallel_config)
    for config in (target, again):
        assert config.additional_config[KEY]["policy"] == "recover"
        assert (
            config.model_config.hf_config.architectures,
            config.model_config.model_class_overrides,
        ) == chosen
    assert front.checked == [target, again]


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The plugin's module over classes without content."""
    pytest.importorskip("triton")
    name = "ssmspec.runtime.vllm.state"
    if name in sys.modules:
        pytest.skip("a vLLM is loaded: tests/vllm_engine runs it")
    monkeypatch.setattr(compat, "resolve", lambda name: type(name, (), {}))
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


def test_rows_and_lengths_are_vllms_whatever_the_draft_counts(state: ModuleType) -> None:
    """A5 (vllm-project/vllm#49887, #58863): its mask makes rows 0, 2 (without drafts) and 3 speculative.

    Draft counts may be stale or -1 behind the requests, so none is read; a mapping that is too short raises.
    """
    ours = object.__new__(state.ModelState)
    ours.first_name, ours.dummy, ours.device = "layer", False, torch.device("cpu")
    ours.layers = {"layer": state.PolicyLayer()}
    batch = SimpleNamespace(
        query_start_loc=torch.tensor([0, 4, 104, 105, 107, 107]),
        idx_mapping=torch.tensor([6, 2, 0, 3, 1]),
        seq_lens=torch.tensor([20, 100, 9, 12, 5]),
        prefill_runs_as_decode_np=None,
    )
    mask = torch.tensor([True, False, True, True, False])
    metadata = {"layer": SimpleNamespace(spec_sequence_masks_cpu=mask)}
    found = ours._batch(batch, metadata)
    assert found.rows.tolist() == [0, 2, 3]
    rows = Rows(8, 4, ours.device)
    rows.bind([100 * torch.arange(8)[:, None] + torch.arange(4)], align=8)
    rows.stage(found)
    step = rows.step(3)
    assert step.slots.tolist() == [7, 1, 4]
    assert step.lens.tolist() == [4, 1, 2]
    assert rows.pages[0, [7, 1, 4]].tolist() == [602, 1, 301]  # tokens 16..19, 8, and 10..11
    batch.idx_mapping = batch.idx_mapping[:3]
    with pytest.raises(IndexError):
        rows.stage(ours._batch(batch, metadata))
