"""Tokens per second of a vLLM server under the policies: one engine after another, each with the GPU to itself, dummy
weights, synthetic acceptance of 2.95 tokens a step with three drafts, prompts of 64 tokens, 512 new ones.

    python benchmarks/vllm_speed.py qwen3.5-4b native,checkpointing,fast --requests 256,512 --compiled

ENGINES: native (stock vLLM), none (stock vLLM without speculation), recover, every-step, checkpointing, or fast
(checkpointing in fast mode), the two also with a ring length, as checkpointing-16. Prints a JSON record per engine, as
soon as it is known.
"""

import argparse
import json
import random
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from ssmspec_cli.engine import ending, fits, play

Json = dict[str, Any]
PROMPT, NEW, LONGEST, VOCABULARY, K = 64, 512, 4096, 32768, 3
COMMON: Json = {
    "vocab_size": VOCABULARY,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "initializer_range": 0.02,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "head_dim": 256,
    "full_attention_interval": 4,
    "torch_dtype": "bfloat16",
    "mamba_ssm_dtype": "float32",
    "attn_output_gate": True,
    "mtp_num_hidden_layers": 1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
SHAPES: dict[str, Json] = {
    "qwen3.5-4b": {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 32,
    },
    "qwen3.5-122b-a10b": {
        "model_type": "qwen3_5_moe_text",
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "hidden_size": 3072,
        "intermediate_size": 1024,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 64,
        "num_experts": 8,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1024,
        "shared_expert_intermediate_size": 1024,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.001,
        "output_router_logits": False,
    },
}
"""Qwen3.5-122B-A10B has 256 experts: a token visits eight of them here too, and there are no others."""


def config(shape: str) -> Json:
    """What a config.json of the shape says."""
    of = {**COMMON, **SHAPES[shape]}
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    return {**of, "layer_types": kinds * (of["num_hidden_layers"] // len(kinds))}


def engine(folder: Path, name: str, most: int, compiled: bool = False) -> Json:
    """Arguments of vLLM's LLM: ``most`` requests at once; ``compiled`` as by vLLM's default, or not at all."""
    who, _, ring = name.partition("-")
    drafts = 0 if who == "none" else K
    sizes = [n for n in (1, 2, 4, 8, 16, 32, *range(64, most + 1, 64)) if n <= most]
    arguments: Json = {
        "model": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": True,
        "mamba_ssm_cache_dtype": "float32",
        "disable_log_stats": False,
        "max_model_len": LONGEST,
        "max_num_seqs": most,
        "max_num_batched_tokens": 8192,
        "attention_backend": "TRITON_ATTN",
        "gdn_prefill_backend": "triton",
        "compilation_config": {
            **({} if compiled else {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}),
            "cudagraph_capture_sizes": [n * (1 + drafts) for n in sizes],
        },
    }
    if who not in ("native", "none"):
        policy, mode = ("checkpointing", "fast") if who == "fast" else (who, "exact")
        own = {"policy": policy, "mode": mode, **({"ring_len": int(ring)} if ring else {})}
        arguments["additional_config"] = {"ssmspec": own}
    if drafts:
        arguments["speculative_config"] = {
            "method": "mtp",
            "num_speculative_tokens": drafts,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": 2.95,
            "attention_backend": "TRITON_ATTN",
        }
    return arguments


def wave(requests: int, new: int, seed: int) -> Json:
    """Requests of random tokens, all offered at once."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(3, VOCABULARY) for _ in range(PROMPT)] for _ in range(requests)]
    return {"prompts": prompts, "max_tokens": [new] * requests}


def record(name: str, loads: list[int], played: Json) -> Json:
    """What is kept of one engine: the last waves are the loads."""
    if played["error"]:
        return {"engine": name, "error": played["error"], "log": ending(played["log"])}
    seconds = played["seconds"]["waves"][-len(loads) :]
    blocks = re.findall(r"Setting attention block size to (\d+)", played["log"])
    return {
        "engine": name,
        "requests_of_4096_tokens_that_fit": fits(played["log"])[0],
        "attention_block": int(blocks[-1]) if blocks else None,
        "start_seconds": round(played["seconds"]["start"], 1),
        "runs": [
            {"requests": n, "seconds": round(s, 4), "tok_s": round(n * NEW / s, 1)}
            for n, s in zip(loads, seconds, strict=True)
        ],
        "workers": played["report"],
    }


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("shape", choices=sorted(SHAPES))
    ask.add_argument("engines", metavar="ENGINES")
    ask.add_argument(
        "--requests", default="1,256,512", help="loads, one after another (default: %(default)s)"
    )
    ask.add_argument("--compiled", action="store_true", help="let vLLM compile the model, as is its default")
    ask.add_argument("--engine", default="{}", help="more arguments of vLLM's LLM, as JSON")
    of = ask.parse_args()
    loads = [int(n) for n in of.requests.split(",")]
    warm = [wave(n, 24, seed=1) for n in {min(loads), max(loads)}]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config(of.shape)))
        for name in of.engines.split(","):
            arguments = {**engine(Path(folder), name, max(loads), of.compiled), **json.loads(of.engine)}
            waves = [*warm, *(wave(n, NEW, seed=2) for n in loads)]
            scenario = {"engine": arguments, "waves": waves, "logprobs": None}
            played = play(scenario, lambda line: None, limit=3600, settings={})
            sys.stdout.write(json.dumps(record(name, loads, played)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
