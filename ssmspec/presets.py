"""Published models by name. Nothing is downloaded: the facts below were copied from each model's config.json.

Weights are those of the language model in bf16, the vision tower and the MTP head left out: for Qwen the parameters
counted from config.json, for the others the number in the model's name. A quantised checkpoint is smaller.
"""

import difflib
import os
from dataclasses import replace
from typing import Any

from ssmspec.checked import ConfigError, show
from ssmspec.huggingface import from_config, read
from ssmspec.model import Model

DEFAULT = "qwen3.5-4b"


def _qwen(kind: str, layers: int, hidden: int, heads: int, kv_heads: int, value_heads: int) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "model_type": kind,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "full_attention_interval": 4,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 262144,
        "dtype": "bfloat16",
    }
    own = {"mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1}  # Qwen3-Next names neither
    return facts if kind == "qwen3_next" else facts | own


def _kimi_linear(layers: int, hidden: int, full: list[int]) -> dict[str, Any]:
    return {
        "model_type": "kimi_linear",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "linear_attn_config": {
            "full_attn_layers": full,
            "kda_layers": [layer for layer in range(1, layers + 1) if layer not in full],
            "num_heads": 32,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
        "dtype": "bfloat16",
    }


def _nemotron(pattern: str, kv_heads: int, **more: int) -> dict[str, Any]:
    return {
        "model_type": "nemotron_h",
        "hidden_size": 4096,
        "hybrid_override_pattern": pattern,
        "num_attention_heads": 32,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "dtype": "bfloat16",
        **more,
    }


_H_8B = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
_SUPER = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"

# name: Hub id, parameters in billions, facts
_PUBLISHED: dict[str, tuple[str, float, dict[str, Any]]] = {
    "qwen3.5-0.8b": ("Qwen/Qwen3.5-0.8B", 0.75, _qwen("qwen3_5", 24, 1024, 8, 2, 16)),
    "qwen3.5-4b": ("Qwen/Qwen3.5-4B", 4.2, _qwen("qwen3_5", 32, 2560, 16, 4, 32)),
    "qwen3.5-27b": ("Qwen/Qwen3.5-27B", 26.9, _qwen("qwen3_5", 64, 5120, 24, 4, 48)),
    "qwen3.5-35b-a3b": ("Qwen/Qwen3.5-35B-A3B", 34.7, _qwen("qwen3_5_moe", 40, 2048, 16, 2, 32)),
    "qwen3.5-122b-a10b": ("Qwen/Qwen3.5-122B-A10B", 122.1, _qwen("qwen3_5_moe", 48, 3072, 32, 2, 64)),
    "qwen3.5-397b-a17b": ("Qwen/Qwen3.5-397B-A17B", 396.3, _qwen("qwen3_5_moe", 60, 4096, 32, 2, 64)),
    "qwen3-next-80b-a3b": (
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        79.7,
        _qwen("qwen3_next", 48, 2048, 16, 2, 32),
    ),
    "kimi-linear-48b-a3b": (
        "moonshotai/Kimi-Linear-48B-A3B-Instruct",
        48,
        _kimi_linear(27, 2304, [4, 8, 12, 16, 20, 24, 27]),
    ),
    "nemotron-h-8b": (
        "nvidia/Nemotron-H-8B-Base-8K",
        8,
        _nemotron(_H_8B, 8, max_position_embeddings=8192),
    ),
    "nemotron-3-super-120b-a12b": (
        "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16",
        120,
        _nemotron(_SUPER, 2, num_nextn_predict_layers=1),
    ),
}


def _preset(name: str, hub_id: str, billions: float, facts: dict[str, Any]) -> Model:
    weights = round(billions * 1e9 * 2 / 2**30, 2)
    return replace(from_config(facts, name), weights_gib=weights, source=f"config.json of {hub_id}")


PRESETS = {name: _preset(name, *published) for name, published in _PUBLISHED.items()}

_IDS = {hub_id.lower(): name for name, (hub_id, _, _) in _PUBLISHED.items()} | {
    "qwen/qwen3.8-27b": "qwen3.5-27b",  # the same config.json
    "qwen/qwen3-next-80b-a3b-thinking": "qwen3-next-80b-a3b",
}
_NAMES = (
    _IDS | {hub_id.split("/")[1]: name for hub_id, name in _IDS.items()} | {name: name for name in PRESETS}
)


def find(name: str) -> Model | None:
    """The preset of that name or Hub id, upper or lower case; None where there is none."""
    preset = _NAMES.get(name.strip().lower())
    return PRESETS[preset] if preset else None


def load(name_or_path: str) -> Model:
    """A preset by name or Hub id, else the config.json (or its folder) at that path. Raises ConfigError.

    A folder that is called like a preset is reached as ./NAME.
    """
    model = find(name_or_path)
    if model is not None:
        return model
    if os.path.exists(name_or_path):
        return read(name_or_path)
    wanted = name_or_path.strip().lower()
    longer = [name for name in _NAMES if wanted and name.startswith(wanted)]
    close = longer or difflib.get_close_matches(wanted, _NAMES, n=1)
    guess = f" Did you mean {_NAMES[close[0]]}?" if close else ""
    raise ConfigError(
        f"{show(name_or_path)} is no preset, no Hub id of one, and no file or folder here.{guess}"
        f" Nothing is downloaded: give the path of a config.json, or a preset: {', '.join(PRESETS)}"
    )
