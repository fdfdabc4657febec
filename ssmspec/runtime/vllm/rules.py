"""What cannot be served, setting by setting: the flag's name, the values that are, and the nearest of them."""

import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from ssmspec.geometry import Arch

SERVED = {
    "Qwen3NextForCausalLM": Arch.GDN,
    "Qwen3_5ForCausalLM": Arch.GDN,
    "Qwen3_5MoeForCausalLM": Arch.GDN,
    "Qwen3_5ForConditionalGeneration": Arch.GDN,
    "Qwen3_5MoeForConditionalGeneration": Arch.GDN,
    "KimiLinearForCausalLM": Arch.KDA,
    "NemotronHForCausalLM": Arch.MAMBA2,
}
METHODS = ("mtp", "ngram", "draft_model", "eagle3")
OURS = "Ssmspec"  # prefix of the architecture names that load our model classes
REPORT = "ssmspec.runtime.vllm.report.WorkerReport"  # our worker extension
STREAMED = (
    "ssmspec: more input for a running request is not served with --ssm-policy {}: vLLM counts tokens back that the"
    " recurrent state has taken; send the input whole"
)
STATE_DTYPES = ("auto", "float32", "bfloat16", "float16")


class Refused(ValueError):
    """A policy was asked for together with something that it does not work with."""


@dataclass(frozen=True)
class Rule:
    flag: str
    path: str  # of the value, in VllmConfig
    serves: Callable[[Any], bool]
    nearest: str
    why: str

    def check(self, vllm_config: Any, policy: str) -> None:
        value = attrgetter(self.path)(vllm_config)
        if not self.serves(value):
            raise Refused(
                f"{self.flag}={reprlib.repr(value)} is not served with --ssm-policy {policy}: {self.why};"
                f" the nearest legal setting is {self.nearest}"
            )


def _is(legal: object) -> Callable[[Any], bool]:
    return lambda value: bool(value == legal)


def _absent(value: Any) -> bool:
    return value is None


def _off(value: Any) -> bool:
    return not value


def _never(flag: str, path: str, why: str) -> Rule:
    return Rule(flag, path, _off, "false", why)


def _without(flag: str, path: str, why: str) -> Rule:
    return Rule(flag, path, _absent, "none", why)


def _alone(flag: str, why: str) -> Rule:
    return Rule(f"--{flag}", f"parallel_config.{flag.replace('-', '_')}", _is(1), "1", why)


UNCHECKED = "it has not been checked with a policy"
PARTS = "parts of a batch share one set of cursors"
RULES = (
    Rule(
        "--runner",
        "model_config.runner_type",
        _is("generate"),
        "generate",
        "a pooling model rejects no drafts",
    ),
    Rule(
        "--model-impl",
        "model_config.model_impl",
        lambda value: value in ("auto", "vllm"),
        "vllm",
        "the layers of other implementations are none of vLLM's",
    ),
    Rule(
        "--speculative-config",
        "speculative_config",
        lambda value: value is not None,
        '\'{"method": "mtp", "num_speculative_tokens": 3}\'',
        "without drafts there is nothing to undo",
    ),
    Rule(
        "--speculative-config.method",
        "speculative_config.method",
        lambda value: value in METHODS,
        " or ".join(METHODS),
        "no other way of drafting has been checked",
    ),
    _never(
        "--speculative-config.enable_adaptive_verification",
        "speculative_config.enable_adaptive_verification",
        "it moves window ends on the device after they were staged",
    ),
    Rule(
        "--speculative-config.num_speculative_tokens_per_batch_size",
        "speculative_config.num_speculative_tokens_per_batch_size",
        _absent,
        "num_speculative_tokens alone",
        "the window length is fixed when records are allocated",
    ),
    _never(
        "--speculative-config.parallel_drafting",
        "speculative_config.parallel_drafting",
        "vLLM's V2 runner drafts one token after another",
    ),
    _never(
        "--speculative-config.use_heterogeneous_vocab",
        "speculative_config.use_heterogeneous_vocab",
        "vLLM's V2 runner maps no tokens between vocabularies",
    ),
    _alone("pipeline-parallel-size", "a later step is staged before the earlier one is committed"),
    _alone("data-parallel-size", UNCHECKED),
    _alone("decode-context-parallel-size", UNCHECKED),
    _alone("prefill-context-parallel-size", UNCHECKED),
    _never("--enable-dbo", "parallel_config.enable_dbo", PARTS),
    Rule("--ubatch-size", "parallel_config.ubatch_size", lambda size: size <= 1, "0", PARTS),
    Rule(
        "--worker-extension-cls",
        "parallel_config.worker_extension_cls",
        lambda value: value in ("", REPORT),
        "none",
        "the counters are read through that class",
    ),
    Rule("--cpu-offload-gb", "offload_config.uva.cpu_offload_gb", _off, "0", UNCHECKED),
    Rule(
        "--offload-group-size",
        "offload_config.prefetch.offload_group_size",
        _off,
        "0",
        "layers share one buffer for their weights, which a policy holds on to",
    ),
    _without("--kv-offloading-size", "cache_config.kv_offloading_size", "an offloaded page may lag"),
    _without(
        "--kv-transfer-config",
        "kv_transfer_config",
        "a page that is sent away may lag behind its records",
    ),
    _never(
        "--enable-sleep-mode",
        "model_config.enable_sleep_mode",
        "records are not put to sleep and woken with the pages",
    ),
    _without("--enable-lora", "lora_config", UNCHECKED),
    _never("--use-replayssm", "cache_config.use_replayssm", "it selects vLLM's own replay for other layers"),
    _never(
        "--enable-mamba-cache-stochastic-rounding",
        "mamba_config.enable_stochastic_rounding",
        "vLLM's and our draws differ",
    ),
    Rule(
        "--mamba-cache-mode",
        "cache_config.mamba_cache_mode",
        lambda value: value in ("none", "align"),
        "align",
        "states are kept at block boundaries only",
    ),
    _never(
        "--enable-mamba-shared-prefix-checkpoint",
        "cache_config.enable_mamba_shared_prefix_checkpoint",
        "its extra checkpoints are written by stock kernels only",
    ),
    Rule(
        "--mamba-ssm-cache-dtype",
        "cache_config.mamba_ssm_cache_dtype",
        lambda value: value in STATE_DTYPES,
        "float32, bfloat16 or float16",
        "no kernel stores it",
    ),
    Rule(  # last: vLLM chooses V1 for some of the above
        "VLLM_USE_V2_MODEL_RUNNER",
        "use_v2_model_runner",
        bool,
        "1, with a Triton that has a backend for this device",
        "the V1 runner has no step after sampling in which a state could be committed",
    ),
)
ON_DEVICE = {
    "cpu": (
        Rule(
            "--model of the architectures",
            "model_config.hf_config.architectures",
            lambda names: SERVED[names[0].removeprefix(OURS)] is Arch.GDN,
            "a model with Gated DeltaNet layers",
            "the CPU engine has been checked with these only",
        ),
        Rule(
            "--enforce-eager",
            "model_config.enforce_eager",
            bool,
            "true",
            "the CPU engine has been checked uncompiled only",
        ),
    ),
    "cuda": (),
}
OF_FAMILY: dict[Arch, tuple[Rule, ...]] = {
    Arch.GDN: (),
    Arch.MAMBA2: (
        _without(
            "--weight-transfer-config",
            "weight_transfer_config",
            "weights may be written past vLLM's loaders, where A_log is made",
        ),
    ),
    Arch.KDA: (
        Rule(
            "--mamba-ssm-cache-dtype",
            "cache_config.mamba_ssm_cache_dtype",
            lambda value: value in ("auto", "float32"),
            "float32",
            "vLLM's layer keeps float32, whatever is asked for",
        ),
        Rule(
            "--model with linear_attn_config",
            "model_config.hf_config.linear_attn_config",
            lambda value: not value.get("use_full_rank_gate"),
            "one without use_full_rank_gate",
            "a full-rank gate belongs to a layer of Kimi-K3's own",
        ),
    ),
}
