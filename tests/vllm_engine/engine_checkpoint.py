"""A tiny Qwen3-Next (experts) or Qwen3.5 (dense) with an MTP head: random weights, but logits with clear winners and states that remember.

Slow decay (A_log in -4..-1) keeps an error in a state visible for tens of tokens.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, LAYERS, VOCAB = 256, 4, 512
H, HV, HEAD = 2, 4, 128  # vLLM's CPU kernels want heads of 128
ATTENTION_HEADS, ATTENTION_DIM = 8, 128  # wide, so that a block is only 64 tokens
EXPERTS, EXPERT_DIM = 4, 64
CONV = 2 * H * HEAD + HV * HEAD

COMMON = {
    "hidden_size": HIDDEN,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": ATTENTION_HEADS,
    "num_key_value_heads": ATTENTION_HEADS,
    "head_dim": ATTENTION_DIM,
    "vocab_size": VOCAB,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "full_attention_interval": LAYERS,
    "layer_types": ["linear_attention"] * (LAYERS - 1) + ["full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": HEAD,
    "linear_value_head_dim": HEAD,
    "linear_num_key_heads": H,
    "linear_num_value_heads": HV,
    "dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROPE = {"rope_theta": 10000000, "partial_rotary_factor": 0.25}
CONFIGS = {
    "qwen3-next": COMMON
    | ROPE
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": EXPERT_DIM,
        "shared_expert_intermediate_size": EXPERT_DIM,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "num_nextn_predict_layers": 1,
    },
    "qwen3.5": COMMON
    | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "rope_parameters": {"rope_type": "default", **ROPE},
        "pad_token_id": 0,
    },
}


class Weights:
    def __init__(self, family: str) -> None:
        self.dense = family == "qwen3.5"
        self.tensors: dict[str, Tensor] = {}
        self.generator = torch.Generator().manual_seed(0)

    def normal(self, name: str, *shape: int, std: float | None = None) -> None:
        values = torch.randn(*shape, generator=self.generator)
        self.tensors[name] = (values * (std or 0.5 / shape[-1] ** 0.5)).bfloat16()

    def uniform(self, name: str, low: float, high: float, dtype: torch.dtype) -> None:
        self.tensors[name] = (torch.rand(HV, generator=self.generator) * (high - low) + low).to(dtype)

    def norm(self, name: str, dim: int) -> None:
        """Qwen3-Next multiplies by 1 + weight."""
        self.tensors[name] = torch.zeros(dim, dtype=torch.bfloat16)

    def mlp(self, prefix: str) -> None:
        self.norm(f"{prefix}.input_layernorm.weight", HIDDEN)
        self.norm(f"{prefix}.post_attention_layernorm.weight", HIDDEN)
        if self.dense:
            self.expert(f"{prefix}.mlp", HIDDEN)
            return
        self.normal(f"{prefix}.mlp.gate.weight", EXPERTS, HIDDEN)
        for name in [*(f"experts.{e}" for e in range(EXPERTS)), "shared_expert"]:
            self.expert(f"{prefix}.mlp.{name}", EXPERT_DIM)
        self.normal(f"{prefix}.mlp.shared_expert_gate.weight", 1, HIDDEN)

    def expert(self, prefix: str, dim: int) -> None:
        self.normal(f"{prefix}.gate_proj.weight", dim, HIDDEN)
        self.normal(f"{prefix}.up_proj.weight", dim, HIDDEN)
        self.normal(f"{prefix}.down_proj.weight", HIDDEN, dim)

    def attention(self, prefix: str) -> None:
        width = ATTENTION_HEADS * ATTENTION_DIM
        self.normal(f"{prefix}.self_attn.q_proj.weight", 2 * width, HIDDEN)  # with the output gate
        self.normal(f"{prefix}.self_attn.k_proj.weight", width, HIDDEN)
        self.normal(f"{prefix}.self_attn.v_proj.weight", width, HIDDEN)
        self.normal(f"{prefix}.self_attn.o_proj.weight", HIDDEN, width)
        self.norm(f"{prefix}.self_attn.q_norm.weight", ATTENTION_DIM)
        self.norm(f"{prefix}.self_attn.k_norm.weight", ATTENTION_DIM)
        self.mlp(prefix)

    def recurrent(self, prefix: str) -> None:
        p = f"{prefix}.linear_attn"
        self.uniform(f"{p}.A_log", -4, -1, torch.float32)
        self.uniform(f"{p}.dt_bias", -2, 0, torch.bfloat16)
        self.normal(f"{p}.conv1d.weight", CONV, 1, 4, std=0.3)
        projections = (
            {"qkv": CONV, "z": HV * HEAD, "b": HV, "a": HV}
            if self.dense
            else {"qkvz": CONV + HV * HEAD, "ba": 2 * HV}
        )
        for name, rows in projections.items():
            std = 2 / HIDDEN**0.5 if "q" in name or name == "z" else None
            self.normal(f"{p}.in_proj_{name}.weight", rows, HIDDEN, std=std)
        self.tensors[f"{p}.norm.weight"] = torch.ones(HEAD, dtype=torch.bfloat16)
        self.normal(f"{p}.out_proj.weight", HIDDEN, HV * HEAD, std=1 / (HV * HEAD) ** 0.5)
        self.mlp(prefix)


def write(folder: Path, family: str = "qwen3-next") -> Path:
    """Put config.json and model.safetensors into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[family], indent=1))
    w = Weights(family)
    for i in range(LAYERS - 1):
        w.recurrent(f"model.layers.{i}")
    w.attention(f"model.layers.{LAYERS - 1}")
    w.normal("model.embed_tokens.weight", VOCAB, HIDDEN, std=1.0)
    w.normal("lm_head.weight", VOCAB, HIDDEN, std=4 / HIDDEN**0.5)
    w.norm("model.norm.weight", HIDDEN)
    w.attention("mtp.layers.0")
    w.normal("mtp.fc.weight", HIDDEN, 2 * HIDDEN)
    for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        w.norm(f"mtp.{name}.weight", HIDDEN)
    save_file(w.tensors, folder / "model.safetensors")
    return folder
