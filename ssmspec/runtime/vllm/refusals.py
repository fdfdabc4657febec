"""What cannot be served, refused while vLLM is being configured: by the flag's name, with the nearest legal setting."""

import os
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from ssmspec.geometry import Arch
from ssmspec.runtime.vllm.config import BEST, ServeConfig

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
CONV_LAYOUT = "VLLM_SSM_CONV_STATE_LAYOUT"
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


LONELY = "it has not been checked with a policy"
RULES = (
    Rule(
        "VLLM_USE_V2_MODEL_RUNNER",
        "use_v2_model_runner",
        bool,
        "1, with a Triton that has a backend for this device",
        "the V1 runner has no step after sampling in which a state could be committed",
    ),
    Rule(
        "--runner",
        "model_config.runner_type",
        _is("generate"),
        "generate",
        "a pooling model rejects no drafts",
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
    _alone("pipeline-parallel-size", "a later step is staged before the earlier one is committed"),
    _alone("data-parallel-size", LONELY),
    _alone("decode-context-parallel-size", LONELY),
    _alone("prefill-context-parallel-size", LONELY),
    _never("--enable-dbo", "parallel_config.enable_dbo", "two half batches share one set of cursors"),
    Rule(
        "--worker-extension-cls",
        "parallel_config.worker_extension_cls",
        lambda value: value in ("", REPORT),
        "none",
        "the counters are read through that class",
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
    _without("--enable-lora", "lora_config", "it has not been checked"),
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
    Arch.MAMBA2: (),
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


def check(
    vllm_config: Any, serve: ServeConfig, checked: str, environ: Mapping[str, str] = os.environ
) -> None:
    """Raise Refused for the first thing in the engine's configuration that the policy does not work with.

    ``checked``: the device that this version of vLLM was checked on. A config whose model was chosen before passes too.
    """
    arch = vllm_config.model_config.hf_config.architectures[0].removeprefix(OURS)
    if arch not in SERVED:
        raise Refused(
            f"--model of the architecture {arch} is not served with --ssm-policy {serve.policy};"
            f" served are {', '.join(SERVED)}"
        )
    _check_device(vllm_config.device_config.device_type, serve, checked)
    for rule in (*RULES, *ON_DEVICE[checked], *OF_FAMILY[SERVED[arch]]):
        rule.check(vllm_config, serve.policy)
    layout = environ.get(CONV_LAYOUT, "SD")
    if layout != "SD":
        raise Refused(
            f"{CONV_LAYOUT}={layout} is not served with --ssm-policy {serve.policy}: the conv window is read in the"
            " layout SD; the nearest legal setting is SD"
        )
    try:
        serve.window(vllm_config.speculative_config.num_speculative_tokens)
    except ValueError as error:
        raise Refused(f"--ssm-policy {serve.policy} with this --speculative-config: {error}") from None


def _check_device(device: str, serve: ServeConfig, checked: str) -> None:
    if device != checked:
        raise Refused(
            f"the device {device} is not served with --ssm-policy {serve.policy}: this version of vLLM was checked on"
            f" {checked} only; the nearest legal setting is {checked}"
        )
    if serve.kernels(device) != BEST[device]:
        raise Refused(
            f'additional_config["ssmspec"]["backend"]={serve.backend} does not run on {device};'
            f" the nearest legal setting is {BEST[device]}"
        )
