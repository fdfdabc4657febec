"""How long checkpointing's ring is where nobody said: what was measured to be the fastest for the model on this GPU."""

from dataclasses import replace
from typing import Any

from ssmspec import huggingface
from ssmspec.checked import ConfigError
from ssmspec.geometry import DType
from ssmspec.kernels import choices
from ssmspec.runtime.vllm import compat
from ssmspec.runtime.vllm.config import ServeConfig


def of_engine(serve: ServeConfig, vllm_config: Any) -> ServeConfig:
    """``serve`` with a ring for the engine that vLLM is configuring, before its compile hash is made."""
    if serve.policy != "checkpointing" or serve.ring_len is not None:
        return serve
    return with_ring(
        serve,
        vllm_config.model_config.hf_config.to_dict(),
        vllm_config.cache_config.mamba_ssm_cache_dtype,
        vllm_config.speculative_config.num_speculative_tokens,
        compat.resolve("current_platform").get_device_name(),
    )


def with_ring(
    serve: ServeConfig, hf_config: dict[str, Any], state_dtype: str, num_drafts: int, device: str
) -> ServeConfig:
    """``serve``, of checkpointing, with the ring of the device's table; as it is where none was measured, and Window's
    default holds.

    ``state_dtype``: vLLM's --mamba-ssm-cache-dtype, "auto" for the model's own.
    """
    table = choices.committed().get(device)
    if table is None:
        return serve
    try:
        g = huggingface.from_config(hf_config, device).geometry
    except ConfigError:  # of a model that vLLM reads and we do not
        return serve
    if state_dtype != "auto":
        g = replace(g, state_dtype=DType(state_dtype))
    return replace(serve, ring_len=table.ring(g, serve.window(num_drafts)))
