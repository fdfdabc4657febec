"""A tiny drafter of its own weights, attention only, for engine_checkpoint's targets."""

import json
from pathlib import Path

import torch
from engine_checkpoint import VOCAB
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, MLP, HEADS, DIM = 128, 256, 2, 64
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": DIM,
    "hidden_act": "silu",
    "max_position_embeddings": 768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LAYER = {
    "self_attn.q_proj": (HEADS * DIM, HIDDEN),
    "self_attn.k_proj": (HEADS * DIM, HIDDEN),
    "self_attn.v_proj": (HEADS * DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * DIM),
    "mlp.gate_proj": (MLP, HIDDEN),
    "mlp.up_proj": (MLP, HIDDEN),
    "mlp.down_proj": (HIDDEN, MLP),
}
NORMS = {
    "self_attn.q_norm": DIM,
    "self_attn.k_norm": DIM,
    "input_layernorm": HIDDEN,
    "post_attention_layernorm": HIDDEN,
}


def write(folder: Path) -> Path:
    """The checkpoint, the same on every machine."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*sizes: int) -> Tensor:
        return (torch.randn(*sizes, generator=generator) * sizes[-1] ** -0.5).bfloat16()

    weights = {"model.embed_tokens": drawn(VOCAB, HIDDEN), "lm_head": drawn(VOCAB, HIDDEN)}
    weights |= {f"model.layers.0.{name}": drawn(*sizes) for name, sizes in LAYER.items()}
    weights |= {f"model.layers.0.{name}": torch.ones(n).bfloat16() for name, n in NORMS.items()}
    weights["model.norm"] = torch.ones(HIDDEN).bfloat16()
    folder.mkdir()
    save_file(
        {f"{n}.weight": w for n, w in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder
