"""Published config.json files, whole under data/configs or their read keys below, and ways to break them."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from ssmspec.checked import ConfigError
from ssmspec.huggingface import from_config

CONFIGS = Path(__file__).parent / "data" / "configs"
PUBLISHED = sorted(CONFIGS.glob("*.json"))
BY_NAME = {path.stem: json.loads(path.read_text()) for path in PUBLISHED}

# In the spelling and near the sizes of granite-4.0-h-small, Bamba-9B, Falcon-H1-0.5B, Kimi-K3 and Qwen3.8-Flash-Next;
# written for these tests, not copied whole from the published files.
GRANITE: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "hidden_size": 4096,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
BAMBA: dict[str, Any] = {
    **{k: v for k, v in GRANITE.items() if k not in ("architectures", "layer_types")},
    "model_type": "bamba",
    "num_hidden_layers": 32,
    "attn_layer_indices": [9, 18, 27],
    "mamba_d_head": "auto",
}
FALCON: dict[str, Any] = {
    "model_type": "falcon_h1",
    "attn_layer_indices": None,
    "hidden_size": 1024,
    "num_hidden_layers": 36,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "mamba_n_heads": 24,
    "mamba_d_head": 64,
    "mamba_d_ssm": 1536,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "torch_dtype": "bfloat16",
}
KIMI_K3: dict[str, Any] = {
    "model_type": "kimi_k3",
    "text_config": {
        "hidden_size": 7168,
        "num_hidden_layers": 93,
        "num_attention_heads": 96,
        "num_key_value_heads": 96,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "linear_attn_config": {
            "full_attn_layers": [*range(4, 93, 4), 93],
            "kda_layers": [i for i in range(1, 93) if i % 4],
            "gate_lower_bound": -5.0,
            "num_heads": 96,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
        "dtype": "bfloat16",
    },
}
FLASH_NEXT: dict[str, Any] = {
    "model_type": "qwen4_exp",
    "text_config": {
        **BY_NAME["qwen3.5-4b"]["text_config"],
        "model_type": "qwen4_exp_text",
        "hidden_size": 2560,
        "num_hidden_layers": 48,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "layer_types": [*["linear_attention"] * 3, "qwen_sparse_attention"] * 12,
        "linear_num_value_heads": 48,
        "hc_count": 4,
        "ple_layer_ids": [2],
        "ple_conv_kernel_size": 4,
        "ngram_size": 3,
        "indexer_n_heads": 4,
    },
}
EVERY = [*BY_NAME.values(), GRANITE, BAMBA, FALCON, KIMI_K3, FLASH_NEXT]
QWEN, NEMOTRON, KIMI = (BY_NAME[n] for n in ("qwen3.5-4b", "nemotron-h-8b", "kimi-linear-48b-a3b"))


def changed(config: dict[str, Any], **values: Any) -> dict[str, Any]:
    """A copy with these keys replaced, in text_config where there is one; ... takes a key out."""
    result = copy.deepcopy(config)
    text = result.get("text_config", result)
    for key, value in values.items():
        if value is ...:
            del text[key]
        else:
            text[key] = value
    return result


def complaint(config: Any) -> str:
    with pytest.raises(ConfigError) as error:
        from_config(config, "m")
    return str(error.value)
