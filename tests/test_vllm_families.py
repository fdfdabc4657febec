"""What is the families' own: which layer and model state each gets, Mamba2's decay, and its batches as vLLM splits them."""

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from ssmspec.geometry import DType
from ssmspec.runtime.rows import Batch, Rows
from ssmspec.runtime.vllm import compat

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


@dataclass
class Metadata:
    """Of seven tokens, two of them padding: a window of two, a prompt of two, a window of one."""

    num_prefills: int = 1
    num_actual_tokens: int = 5
    num_spec_decodes: int = 2
    num_spec_decode_tokens: int = 3
    num_accepted_tokens: Any = (1, 1)
    spec_sequence_masks: Any = True
    spec_query_start_loc: Any = (0, 2, 3)
    spec_state_indices_tensor: Any = (1, 2)
    spec_token_indx: Tensor = field(default_factory=lambda: torch.tensor([0, 1, 4]))
    non_spec_token_indx: Tensor = field(default_factory=lambda: torch.tensor([2, 3]))
    spec_sequence_masks_cpu: Tensor = field(default_factory=lambda: torch.tensor([True, False, True]))


CONTEXT = SimpleNamespace(attn_metadata=None)


def _class_without_content(name: str) -> Any:
    if name == "op_registry_oot":
        return Pluggable.registered
    own = {
        "MambaMixer2": Mixer,
        "KimiLinearForCausalLM": Kimi,
        "PluggableLayer": Pluggable,
        "eager_break_during_capture": lambda function: function,
        "get_forward_context": lambda: CONTEXT,
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


def test_weights_that_a_reload_only_counts_leave_the_decay(
    modules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's layerwise reload calls the loader with a parameter without storage first."""
    monkeypatch.setattr(modules.mamba2.Mamba2, "serve_policy", lambda self, config: None)
    layer = modules.mamba2.Mamba2()
    A_log = torch.tensor([-1.5, 0.25])
    layer.A.weight_loader(layer.A, A_log)
    counted = torch.nn.Parameter(layer.A.to("meta"))
    layer.A.weight_loader(counted, A_log + 1)
    torch.testing.assert_close(layer.A_log, A_log)


def test_dummy_weights_of_the_wrong_sign_do_not_decay(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules.mamba2.Mamba2, "serve_policy", lambda self, config: None)
    layer = modules.mamba2.Mamba2()
    layer.session_index, layer.dt_bias, layer.D = 0, torch.zeros(2), torch.ones(2)
    layer.A.data.copy_(torch.tensor([1e-3, -1e-3]))
    torch.testing.assert_close(-layer.params.A_log.exp(), torch.tensor([0.0, -1e-3]))


def test_activations_are_the_models_whatever_conv_windows_are_kept_in(modules: Any) -> None:
    layer = object.__new__(modules.kda.KimiDeltaAttention)
    layer.get_state_dtype = lambda: (torch.float32, torch.float32)
    layer.model_config = SimpleNamespace(dtype=torch.bfloat16)
    found = layer.shape((2, 2), (64, 64), 4)
    assert (found.act_dtype, found.state_dtype) == (DType.BF16, DType.FP32)


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


class Split:
    """What a layer's windows and vLLM's own method are given of a batch, and what comes out."""

    def __init__(self, modules: Any, metadata: Metadata | None) -> None:
        CONTEXT.attn_metadata = None if metadata is None else {"layer": metadata, "other": 1}
        layer = object.__new__(modules.kda.KimiDeltaAttention)
        layer.prefix, out = "layer", torch.zeros(7, dtype=torch.int64)
        self.ours: list[int] = []
        self.theirs: list[int] = []
        self.seen: Any = None
        layer.split((torch.arange(7), torch.arange(7)), out, self._ours, self._theirs)
        self.out = out.tolist()

    def _ours(self, packed: Any, x: Tensor, y: Tensor) -> Tensor:
        assert (packed.starts, packed.blocks) == ((0, 2, 3), (1, 2))
        self.ours = x.tolist()
        return x + y + 10

    def _theirs(self, x: Tensor, y: Tensor, out: Tensor) -> None:
        self.theirs, self.seen = x.tolist(), CONTEXT.attn_metadata
        out.copy_(x + y + 20)


IN_FRONT = {
    "spec_sequence_masks_cpu": torch.tensor([True, True, False]),
    "spec_token_indx": torch.tensor([0, 1, 2]),
    "non_spec_token_indx": torch.tensor([3, 4]),
}


@pytest.mark.parametrize(
    ("changes", "windows", "prompt", "out"),
    [({}, [0, 1, 4], [2, 3], [10, 12, 24, 26, 18]), (IN_FRONT, [0, 1, 2], [3, 4], [10, 12, 14, 26, 28])],
)
def test_windows_and_prompts_of_a_batch_come_back_to_their_tokens(
    modules: Any, changes: dict[str, Any], windows: list[int], prompt: list[int], out: list[int]
) -> None:
    """A prompt between windows; and windows in front, where nothing is copied."""
    metadata = replace(Metadata(), **changes)
    split = Split(modules, metadata)
    assert (split.ours, split.theirs) == (windows, prompt)
    assert split.out == [*out, 0, 0]
    seen = split.seen["layer"]
    assert (seen.spec_sequence_masks, seen.num_spec_decodes, seen.num_actual_tokens) == (None, 0, 2)
    assert split.seen["other"] == 1
    assert CONTEXT.attn_metadata["layer"] is metadata


def test_of_windows_alone_padding_is_left_alone(modules: Any) -> None:
    split = Split(modules, replace(Metadata(), num_prefills=0))
    assert (split.ours, split.theirs) == ([0, 1, 2, 3, 4], [])
    assert split.out == [10, 12, 14, 16, 18, 0, 0]


@pytest.mark.parametrize("metadata", [None, replace(Metadata(), spec_sequence_masks=None)])
def test_a_batch_without_windows_is_vllms(modules: Any, metadata: Metadata | None) -> None:
    split = Split(modules, metadata)
    assert (split.ours, split.theirs) == ([], list(range(7)))
