"""What is the families' own: which layer and model state each gets, Mamba2's decay, and its batches as vLLM splits them."""

import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from ssmspec.runtime.vllm import compat
from ssmspec.runtime.vllm.rows import Batch, Rows

MODULES = [f"ssmspec.runtime.vllm.{name}" for name in ("state", "gdn", "kda", "mamba2", "models")]


class Mixer:
    """vLLM's layer as far as the decay goes: it keeps -exp(A_log)."""

    def __init__(self) -> None:
        self.A = torch.nn.Parameter(torch.zeros(2))
        self.A.weight_loader = lambda param, loaded: param.data.copy_(-loaded.exp())


class Kimi:
    """A model with a model state of its own."""

    def __init__(self, **given: Any) -> None:
        self.made = compat.resolve("op_registry_oot").copy()

    def get_model_state_cls(self) -> str:
        return "its own"


class Pluggable:
    registered: ClassVar[dict[str, type[Any]]] = {}

    @classmethod
    def register_oot(cls, name: str) -> Any:
        return lambda layer: cls.registered.update({name: layer})


def _class_without_content(name: str) -> Any:
    if name == "op_registry_oot":
        return Pluggable.registered
    own = {
        "MambaMixer2": Mixer,
        "KimiLinearForCausalLM": Kimi,
        "PluggableLayer": Pluggable,
        "eager_break_during_capture": lambda function: function,
    }
    return own.get(name) or type(name, (), {})


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Our modules over classes without content."""
    pytest.importorskip("triton")
    if any(name in sys.modules for name in MODULES):
        pytest.skip("a vLLM is loaded: tests/vllm_engine runs it")
    monkeypatch.setattr(compat, "resolve", _class_without_content)
    yield SimpleNamespace(**{name.split(".")[-1]: importlib.import_module(name) for name in MODULES})
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(("policy", "state"), [("native", "its own"), ("recover", "ModelState")])
def test_a_model_is_built_with_its_familys_layer_and_under_a_policy_with_our_model_state(
    modules: Any, policy: str, state: str
) -> None:
    config = SimpleNamespace(additional_config={"ssmspec": {"policy": policy, "backend": "triton"}})
    model = modules.models.SsmspecKimiLinearForCausalLM(vllm_config=config)
    assert model.made == {"KimiGatedDeltaNetAttention": modules.kda.KimiDeltaAttention}
    assert Pluggable.registered == {}
    found = model.get_model_state_cls()
    assert getattr(found, "__name__", found) == state


def test_mamba2_has_the_decay_of_weights_that_are_loaded_anew(
    modules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules.mamba2.Mamba2, "serve_policy", lambda self, config: None)
    layer = modules.mamba2.Mamba2()
    layer.session_index, layer.dt_bias, layer.D = 0, torch.zeros(2), torch.ones(2)
    A_log = torch.tensor([-1.5, 0.25])
    layer.A.weight_loader(layer.A, A_log)
    params = layer.params
    torch.testing.assert_close(params.A_log, A_log)
    layer.A.weight_loader(layer.A, A_log + 1)
    torch.testing.assert_close(params.A_log, A_log + 1)


def test_dummy_weights_of_the_wrong_sign_do_not_decay(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules.mamba2.Mamba2, "serve_policy", lambda self, config: None)
    layer = modules.mamba2.Mamba2()
    layer.session_index, layer.dt_bias, layer.D = 0, torch.zeros(2), torch.ones(2)
    layer.A.data.copy_(torch.tensor([1e-3, -1e-3]))
    torch.testing.assert_close(-layer.params.A_log.exp(), torch.tensor([0.0, -1e-3]))


class Step:
    """A model state over 4 requests, and a batch of three rows: a window of 4, and two of one token."""

    def __init__(self, modules: Any, prefilling: list[bool]) -> None:
        self.state: Any = object.__new__(modules.state.ModelState)
        self.settled: list[tuple[list[int], list[int]]] = []
        rows = Rows(4, 4, torch.device("cpu"))
        rows.bind([10 * torch.arange(4)[:, None] + torch.arange(4)], align=8)
        self.state.__dict__.update(
            first_name="layer",
            layers={"layer": object.__new__(modules.mamba2.Mamba2)},
            dummy=False,
            device=torch.device("cpu"),
            session=SimpleNamespace(rows=rows, policy=SimpleNamespace(settle=self._settle)),
        )
        self.input = SimpleNamespace(
            query_start_loc=torch.tensor([0, 4, 5, 6]),
            idx_mapping=torch.tensor([3, 1, 2]),
            seq_lens=torch.tensor([12, 1, 9]),
            prefill_runs_as_decode_np=None,
            is_prefilling_np=torch.tensor(prefilling).numpy(),
        )

    def _settle(self, slots: Tensor) -> None:
        self.settled.append((slots.tolist(), self.state.session.rows.pages[0, slots].tolist()))

    def batch(self, num_decodes: int) -> Batch | None:
        found: Batch | None = self.state._batch(
            self.input, {"layer": SimpleNamespace(num_decodes=num_decodes)}
        )
        return found


def test_windows_are_the_rows_that_vllm_decodes_but_no_padding(modules: Any) -> None:
    step = Step(modules, [False, False, False])
    for decodes, rows in ((2, slice(2)), (8, slice(3))):
        found = step.batch(decodes)
        assert found is not None
        assert (found.rows, found.count) == (rows, rows.stop)
    assert step.batch(0) is None


def test_a_request_behind_a_prompt_of_its_length_has_its_page_made_exact(modules: Any) -> None:
    """Row 1 is the first token of a prompt, so vLLM runs row 2, of request 2, as a prompt too: tokens 9.. in column 1."""
    step = Step(modules, [False, True, False])
    step.state._settle_late(step.input, step.batch(1))
    assert step.settled == [([3], [21])]


def test_no_page_is_touched_where_every_such_row_is_a_prompt(modules: Any) -> None:
    step = Step(modules, [False, True, True])
    step.state._settle_late(step.input, step.batch(1))
    assert step.settled == []


def test_without_any_window_the_rows_are_found_too(modules: Any) -> None:
    step = Step(modules, [True, False, False])
    step.state._settle_late(step.input, step.batch(0))
    assert step.settled == [([2, 3], [10, 21])]
