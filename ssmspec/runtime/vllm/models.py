"""vLLM's model classes with our layer and model state inside. Named with a prefix, so that a stock server never meets them."""

from typing import Any

from ssmspec.runtime.vllm import compat, config
from ssmspec.runtime.vllm.layer import GatedDeltaNet
from ssmspec.runtime.vllm.refusals import OURS, SERVED
from ssmspec.runtime.vllm.state import ModelState


class Served:
    """Builds the model with our layer, and tells the V2 runner which model state goes with it."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        self.served_policy = config.resolve({}, vllm_config.additional_config, {}).policy
        with compat.layer_replaced("QwenGatedDeltaNetAttention", GatedDeltaNet):
            super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]

    def get_model_state_cls(self) -> type[Any]:
        return compat.MambaHybridModelState if self.served_policy == "native" else ModelState


def __getattr__(name: str) -> type[Any]:
    """`SsmspecX` for each served architecture X, made when vLLM asks for it."""
    arch = name.removeprefix(OURS)
    if arch == name or arch not in SERVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = type(name, (Served, compat.resolve(arch)), {"__module__": __name__})
    globals()[name] = made
    return made
