"""vLLM's model classes with our layer and model state inside. Named with a prefix, so that a stock server never meets them."""

import importlib
from typing import Any

from ssmspec.geometry import Arch
from ssmspec.runtime.vllm import compat, config
from ssmspec.runtime.vllm.rules import OURS, SERVED
from ssmspec.runtime.vllm.state import ModelState

# vLLM's layer, and ours; a module is loaded for its family only
LAYERS = {
    Arch.GDN: ("QwenGatedDeltaNetAttention", "gdn", "GatedDeltaNet"),
    Arch.KDA: ("KimiGatedDeltaNetAttention", "kda", "KimiDeltaAttention"),
    Arch.MAMBA2: ("MambaMixer2", "mamba2", "Mamba2"),
}


class Served:
    """Builds the model with our layer, and tells the V2 runner which model state goes with it."""

    served_family: Arch

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        self.served_policy = config.resolve({}, vllm_config.additional_config, {}).policy
        theirs, module, ours = LAYERS[self.served_family]
        layer = getattr(importlib.import_module(f"ssmspec.runtime.vllm.{module}"), ours)
        with compat.layer_replaced(theirs, layer):
            super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]

    def get_model_state_cls(self) -> type[Any]:
        if self.served_policy != "native":
            return ModelState
        theirs = getattr(super(), "get_model_state_cls", None)
        return theirs() if theirs else compat.MambaHybridModelState  # type: ignore[no-any-return]


def __getattr__(name: str) -> type[Any]:
    """`SsmspecX` for each served architecture X, made when vLLM asks for it."""
    arch = name.removeprefix(OURS)
    if arch == name or arch not in SERVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    own = {"__module__": __name__, "served_family": SERVED[arch]}
    made = type(name, (Served, compat.resolve(arch)), own)
    globals()[name] = made
    return made
