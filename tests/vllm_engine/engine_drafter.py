"""Tiny drafters of their own weights, attention only, for engine_checkpoint's targets: a model, and an EAGLE-3 head."""

import json
from pathlib import Path

import torch
from engine_checkpoint import HIDDEN as TARGET
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


def layer(hidden: int, into: int) -> dict[str, tuple[int, int]]:
    """Shapes of the weights of one layer of ``hidden`` channels, whose attention reads ``into``."""
    heads = HEADS * DIM
    return {
        "self_attn.q_proj": (heads, into),
        "self_attn.k_proj": (heads, into),
        "self_attn.v_proj": (heads, into),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (MLP, hidden),
        "mlp.up_proj": (MLP, hidden),
        "mlp.down_proj": (hidden, MLP),
    }


NORMS = {
    "self_attn.q_norm": DIM,
    "self_attn.k_norm": DIM,
    "input_layernorm": HIDDEN,
    "post_attention_layernorm": HIDDEN,
}


EAGLE = CONFIG | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": TARGET,
    "draft_vocab_size": VOCAB,
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
}


class Drawn(dict[str, Tensor]):
    """Weights by name, the same on every machine."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def normal(self, name: str, *sizes: int) -> None:
        values = torch.randn(*sizes, generator=self.generator) * sizes[-1] ** -0.5
        self[f"{name}.weight"] = values.bfloat16()

    def norm(self, name: str, size: int) -> None:
        self[f"{name}.weight"] = torch.ones(size).bfloat16()

    def save(self, folder: Path, config: dict[str, object]) -> Path:
        folder.mkdir()
        save_file(self, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config))
        return folder


def write(folder: Path) -> Path:
    """A model that drafts by itself."""
    drawn = Drawn()
    drawn.normal("model.embed_tokens", VOCAB, HIDDEN)
    drawn.normal("lm_head", VOCAB, HIDDEN)
    for name, sizes in layer(HIDDEN, HIDDEN).items():
        drawn.normal(f"model.layers.0.{name}", *sizes)
    for name, size in NORMS.items():
        drawn.norm(f"model.layers.0.{name}", size)
    drawn.norm("model.norm", HIDDEN)
    return drawn.save(folder, CONFIG)


def write_eagle(folder: Path) -> Path:
    """A head that drafts from hidden states of three of the target's layers; it shares the target's embedding."""
    drawn = Drawn()
    drawn.normal("fc", TARGET, 3 * TARGET)
    drawn.normal("lm_head", VOCAB, TARGET)
    for name, sizes in layer(TARGET, 2 * TARGET).items():  # embedding and hidden state, side by side
        drawn.normal(f"midlayer.{name}", *sizes)
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        drawn.norm(f"midlayer.{name}", TARGET)
    drawn.norm("norm", TARGET)
    return drawn.save(folder, EAGLE)
