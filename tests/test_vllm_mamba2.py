"""Mamba2's batches as vLLM splits them: windows in front, and rows that it takes for prompts although they are none."""

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ssmspec.runtime.vllm import compat
from ssmspec.runtime.vllm.rows import Batch, Rows

MODULES = ("ssmspec.runtime.vllm.state", "ssmspec.runtime.vllm.mamba2")


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ModuleType, ModuleType]]:
    """Our classes over classes without content."""
    if any(name in sys.modules for name in MODULES):
        pytest.skip("a vLLM is loaded: tests/vllm_engine runs it")
    monkeypatch.setattr(compat, "resolve", lambda name: type(name, (), {}))
    state, mamba2 = (importlib.import_module(name) for name in MODULES)
    yield state, mamba2
    for name in MODULES:
        sys.modules.pop(name, None)


class Step:
    """A model state over 4 requests, and a batch of three rows: a window of 4, and two of one token."""

    def __init__(self, modules: tuple[ModuleType, ModuleType], prefilling: list[bool]) -> None:
        state, mamba2 = modules
        self.state: Any = object.__new__(state.ModelState)
        self.settled: list[tuple[list[int], list[int]]] = []
        rows = Rows(4, 4, torch.device("cpu"))
        rows.bind([10 * torch.arange(4)[:, None] + torch.arange(4)], align=8)
        self.state.__dict__.update(
            first_name="layer",
            layers={"layer": object.__new__(mamba2.Mamba2)},
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
