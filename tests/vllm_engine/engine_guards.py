"""Calls our vLLM classes out of order, and writes the errors as JSON. Run as a script."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config

from ssmspec.runtime.vllm import compat
from ssmspec.runtime.vllm.gdn import GatedDeltaNet
from ssmspec.runtime.vllm.report import WorkerReport
from ssmspec.runtime.vllm.state import ModelState


def readded(finished: bool) -> None:
    """A running request gets more input, or one of the same name follows: either way vLLM removes it before it is added."""
    state = object.__new__(ModelState)
    state.running, state.replaced = {"r"}, None
    state.session = SimpleNamespace(serve=SimpleNamespace(policy="recover"), admit=lambda request: None)
    stock = compat.MambaHybridModelState
    stock.remove_request, stock.add_request = (lambda *args: None), (lambda *args: None)
    if finished:
        state.remove_request("r")
    state.remove_request("r")
    state.add_request(0, SimpleNamespace(req_id="r"))


def unbound() -> None:
    layer = object.__new__(GatedDeltaNet)
    layer.__dict__.update(session=None, prefix="layers.0")
    layer.bound()


def reloaded() -> None:
    """Weights are loaded anew into the tensors that are there."""
    layer: Any = object.__new__(GatedDeltaNet)
    a_log, bias = torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16)
    layer.__dict__.update(session_index=0, A_log=torch.nn.Parameter(a_log), dt_bias=torch.nn.Parameter(bias))
    params = layer.params
    layer.A_log.data.copy_(torch.ones(2))
    layer.dt_bias.data.copy_(torch.ones(2))
    if not (params.A_log.all() and params.dt_bias.all()):
        raise RuntimeError("the policies still have the old weights")


def reloaded_decay() -> None:
    """Weights are loaded anew as `reload_weights` does it: counted without storage, then loaded beside, then copied."""
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.model_executor.model_loader.weight_utils import composed_weight_loader, default_weight_loader
    from vllm.model_executor.utils import set_weight_attrs

    from ssmspec.runtime.vllm.mamba2 import Mamba2

    def stock(mixer: Any) -> None:
        torch.nn.Module.__init__(mixer)
        mixer.A, mixer.D = (torch.nn.Parameter(torch.ones(2), requires_grad=False) for _ in range(2))
        loader = composed_weight_loader(default_weight_loader, lambda x: -x.exp())
        set_weight_attrs(mixer.A, {"weight_loader": loader})

    compat.MambaMixer2.__init__ = stock
    Mamba2.serve_policy = lambda self, config: None  # type: ignore[method-assign]
    with set_current_vllm_config(VllmConfig()):
        layer = Mamba2()
    layerwise.record_metadata_for_reloading(layer)
    layer.A.weight_loader(layer.A, torch.tensor([0.1, 0.2]))
    A_log, anew = layer.A_log, torch.tensor([0.3, 0.4])
    layerwise.initialize_layerwise_reload(layer)
    layer.A.weight_loader(layer.A, anew)
    layer.D.weight_loader(layer.D, torch.ones(2))
    layerwise.finalize_layerwise_reload(layer, None)
    torch.testing.assert_close(layer.A, -anew.exp())
    torch.testing.assert_close(A_log, anew)


def stock_worker() -> None:
    worker: Any = WorkerReport()
    worker.model_runner = SimpleNamespace(model_state=SimpleNamespace())
    worker.ssmspec_report()


def replaced_twice() -> None:
    with compat.layer_replaced("Name", GatedDeltaNet), compat.layer_replaced("Name", GatedDeltaNet):
        pass


def error_of(call: Callable[[], None]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    found = {
        "doctor": compat.finding(),
        "readded": error_of(lambda: readded(finished=False)),
        "followed": error_of(lambda: readded(finished=True)),
        "unbound": error_of(unbound),
        "reloaded": error_of(reloaded),
        "reloaded decay": error_of(reloaded_decay),
        "stock worker": error_of(stock_worker),
        "replaced twice": error_of(replaced_twice),
    }
    Path(sys.argv[1]).write_text(json.dumps(found))
