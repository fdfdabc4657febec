"""What cannot be served is refused while vLLM is being configured, by the flag's name. Stand-ins for vLLM's configs."""

from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest

from ssmspec.runtime.vllm.config import ServeConfig
from ssmspec.runtime.vllm.refusals import check
from ssmspec.runtime.vllm.rules import OF_FAMILY, ON_DEVICE, RULES, SERVED, Refused

SERVE = ServeConfig(policy="checkpointing")


def served() -> Any:
    """A configuration with nothing to refuse; the names are those of vLLM 0.32.0 and 0.33.0."""
    return SimpleNamespace(
        use_v2_model_runner=True,
        device_config=SimpleNamespace(device_type="cpu"),
        model_config=SimpleNamespace(
            runner_type="generate",
            model_impl="auto",
            enforce_eager=True,
            enable_sleep_mode=False,
            hf_config=SimpleNamespace(architectures=["Qwen3NextForCausalLM"], linear_attn_config={}),
        ),
        speculative_config=SimpleNamespace(
            method="mtp",
            num_speculative_tokens=3,
            enable_adaptive_verification=False,
            num_speculative_tokens_per_batch_size=None,
            parallel_drafting=False,
            use_heterogeneous_vocab=False,
            model="drafter",
            draft_model_config=SimpleNamespace(is_hybrid=True),
        ),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1,
            tensor_parallel_size=1,
            data_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            enable_dbo=False,
            ubatch_size=0,
            worker_extension_cls="",
        ),
        cache_config=SimpleNamespace(
            mamba_cache_mode="align",
            mamba_ssm_cache_dtype="auto",
            kv_offloading_size=None,
            use_replayssm=False,
            enable_mamba_shared_prefix_checkpoint=False,
        ),
        mamba_config=SimpleNamespace(enable_stochastic_rounding=False),
        offload_config=SimpleNamespace(
            uva=SimpleNamespace(cpu_offload_gb=0), prefetch=SimpleNamespace(offload_group_size=0)
        ),
        kv_transfer_config=None,
        lora_config=None,
        weight_transfer_config=None,
    )


REFUSED = [
    ("use_v2_model_runner", False, "VLLM_USE_V2_MODEL_RUNNER", "1"),
    ("model_config.runner_type", "pooling", "--runner", "generate"),
    ("model_config.model_impl", "transformers", "--model-impl", "vllm"),
    ("speculative_config", None, "--speculative-config", '\'{"method": "mtp"'),
    ("speculative_config.method", "suffix", "--speculative-config.method", "mtp or ngram or draft_model"),
    ("speculative_config.enable_adaptive_verification", True, "enable_adaptive_verification", "false"),
    (
        "speculative_config.num_speculative_tokens_per_batch_size",
        [(1, 8, 3)],
        "per_batch_size",
        "num_speculative_tokens alone",
    ),
    ("speculative_config.parallel_drafting", True, "parallel_drafting", "false"),
    ("speculative_config.use_heterogeneous_vocab", True, "use_heterogeneous_vocab", "false"),
    ("parallel_config.pipeline_parallel_size", 2, "--pipeline-parallel-size", "1"),
    ("parallel_config.data_parallel_size", 2, "--data-parallel-size", "1"),
    ("parallel_config.decode_context_parallel_size", 2, "--decode-context-parallel-size", "1"),
    ("parallel_config.prefill_context_parallel_size", 2, "--prefill-context-parallel-size", "1"),
    ("parallel_config.enable_dbo", True, "--enable-dbo", "false"),
    ("parallel_config.ubatch_size", 2, "--ubatch-size", "0"),
    ("parallel_config.worker_extension_cls", "my.Worker", "--worker-extension-cls", "none"),
    ("kv_transfer_config", SimpleNamespace(), "--kv-transfer-config", "none"),
    ("offload_config.uva.cpu_offload_gb", 4.0, "--cpu-offload-gb", "0"),
    ("offload_config.prefetch.offload_group_size", 8, "--offload-group-size", "0"),
    ("cache_config.kv_offloading_size", 1.0, "--kv-offloading-size", "none"),
    ("lora_config", SimpleNamespace(), "--enable-lora", "none"),
    ("model_config.enable_sleep_mode", True, "--enable-sleep-mode", "false"),
    ("cache_config.use_replayssm", True, "--use-replayssm", "false"),
    ("mamba_config.enable_stochastic_rounding", True, "--enable-mamba-cache-stochastic-rounding", "false"),
    ("cache_config.mamba_cache_mode", "all", "--mamba-cache-mode", "align"),
    ("cache_config.enable_mamba_shared_prefix_checkpoint", True, "shared-prefix-checkpoint", "false"),
    ("cache_config.mamba_ssm_cache_dtype", "fp8", "--mamba-ssm-cache-dtype", "float32, bfloat16 or float16"),
]
ON_DEVICES = [
    ("cpu", "model_config.enforce_eager", False, "--enforce-eager", "true"),
    (
        "cpu",
        "model_config.hf_config.architectures",
        ["KimiLinearForCausalLM"],
        "--model of the architectures",
        "a model with Gated DeltaNet layers",
    ),
]
OF_FAMILIES = [
    ("NemotronHForCausalLM", "weight_transfer_config", SimpleNamespace(), "--weight-transfer-config", "none"),
    (
        "KimiLinearForCausalLM",
        "cache_config.mamba_ssm_cache_dtype",
        "bfloat16",
        "--mamba-ssm-cache-dtype",
        "float32",
    ),
    (
        "KimiLinearForCausalLM",
        "model_config.hf_config.linear_attn_config",
        {"use_full_rank_gate": True},
        "--model with linear_attn_config",
        "one without use_full_rank_gate",
    ),
]


def test_a_config_whose_model_was_chosen_before_is_checked_like_the_first() -> None:
    config = served()
    config.model_config.hf_config.architectures = ["SsmspecQwen3NextForCausalLM"]
    config.parallel_config.worker_extension_cls = "ssmspec.runtime.vllm.report.WorkerReport"
    check(config, SERVE, "cpu", {})
    config.parallel_config.enable_dbo = True
    with pytest.raises(ValueError, match="--enable-dbo=True"):
        check(config, SERVE, "cpu", {})


def test_what_is_served_is_not_refused() -> None:
    check(served(), SERVE, "cpu", {})


@pytest.mark.parametrize(
    ("device", "path", "value", "flag", "nearest"), [*(("cpu", *case) for case in REFUSED), *ON_DEVICES]
)
def test_a_setting_is_refused_by_its_flag_with_the_nearest_legal(
    device: str, path: str, value: object, flag: str, nearest: str
) -> None:
    _refused(served(), device, path, value, flag, nearest)


@pytest.mark.parametrize(("arch", "path", "value", "flag", "nearest"), OF_FAMILIES)
def test_what_one_family_does_not_work_with_is_refused_for_it_alone(
    arch: str, path: str, value: object, flag: str, nearest: str
) -> None:
    config = served()
    config.model_config.hf_config.architectures = [arch]
    _refused(config, "cuda", path, value, flag, nearest)
    config.model_config.hf_config.architectures = ["Qwen3NextForCausalLM"]
    check(config, SERVE, "cuda", {})


def _refused(config: Any, device: str, path: str, value: object, flag: str, nearest: str) -> None:
    config.device_config.device_type = device
    *owner, name = path.split(".")
    setattr(attrgetter(".".join(owner))(config) if owner else config, name, value)
    with pytest.raises(Refused, match="is not served with --ssm-policy checkpointing") as error:
        check(config, SERVE, device, {})
    what, _, legal = str(error.value).partition("; the nearest legal setting is ")
    assert flag in what
    assert legal.startswith(nearest)


CHOOSE_V1 = [
    ("speculative_config.method", "suffix"),
    ("speculative_config.parallel_drafting", True),
    ("speculative_config.use_heterogeneous_vocab", True),
    ("parallel_config.enable_dbo", True),
    ("parallel_config.ubatch_size", 2),
]


@pytest.mark.parametrize(("path", "value"), CHOOSE_V1)
def test_what_makes_vllm_choose_the_v1_runner_is_refused_by_its_own_flag(path: str, value: object) -> None:
    """As vLLM's VllmConfig._get_v2_model_runner_unsupported_features says."""
    config = served()
    config.use_v2_model_runner = False
    (flag,) = (flag for case, _, flag, _ in REFUSED if case == path)
    _refused(config, "cpu", path, value, flag, "")


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_a_drafter_with_recurrent_layers_is_refused(method: str) -> None:
    config = served()
    config.speculative_config.method = method
    with pytest.raises(
        Refused, match=r"--speculative-config\.model=drafter is not served .* attention alone"
    ):
        check(config, SERVE, "cpu", {})
    config.speculative_config.draft_model_config.is_hybrid = False
    check(config, SERVE, "cpu", {})


def test_every_rule_has_its_refusal_tested() -> None:
    assert {rule.path for rule in RULES} == {path for path, *_ in REFUSED}
    assert {(device, r.path) for device, rules in ON_DEVICE.items() for r in rules} == {
        case[:2] for case in ON_DEVICES
    }
    assert {(family, r.path) for family, rules in OF_FAMILY.items() for r in rules} == {
        (SERVED[arch], path) for arch, path, *_ in OF_FAMILIES
    }


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_two_ranks_are_served(device: str) -> None:
    config = served()
    config.device_config.device_type = device
    config.parallel_config.tensor_parallel_size = 2
    check(config, SERVE, device, {})


@pytest.mark.parametrize(("checked", "other"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_a_version_serves_on_the_device_that_it_was_checked_on(checked: str, other: str) -> None:
    config = served()
    config.device_config.device_type = checked
    check(config, SERVE, checked, {})
    config.device_config.device_type = other
    with pytest.raises(Refused, match=f"the device {other} is not served .* setting is {checked}"):
        check(config, SERVE, checked, {})


@pytest.mark.parametrize(
    ("device", "backend", "nearest"), [("cpu", "triton", "torch"), ("cuda", "torch", "triton")]
)
def test_kernels_of_another_device_are_refused(device: str, backend: str, nearest: str) -> None:
    config = served()
    config.device_config.device_type = device
    with pytest.raises(
        Refused, match=f"{backend} does not run on {device}; the nearest legal setting is {nearest}"
    ):
        check(config, ServeConfig(policy="native", backend=backend), device, {})


def test_cuda_graphs_are_served() -> None:
    config = served()
    config.device_config.device_type, config.model_config.enforce_eager = "cuda", False
    check(config, SERVE, "cuda", {})


@pytest.mark.parametrize("arch", SERVED)
def test_a_served_architecture_is_not_refused(arch: str) -> None:
    config = served()
    config.device_config.device_type, config.model_config.hf_config.architectures = "cuda", [arch]
    check(config, SERVE, "cuda", {})


@pytest.mark.parametrize(
    "arch", ["KimiK3ForConditionalGeneration", "NemotronHPuzzleForCausalLM", "LlamaForCausalLM"]
)
def test_an_unknown_architecture_is_refused_by_name(arch: str) -> None:
    config = served()
    config.model_config.hf_config.architectures = [arch]
    with pytest.raises(Refused, match=f"{arch} is not served .* served are {', '.join(SERVED)}"):
        check(config, SERVE, "cpu", {})


def test_the_transposed_conv_layout_is_refused_by_its_variable() -> None:
    with pytest.raises(Refused, match=r"VLLM_SSM_CONV_STATE_LAYOUT=DS .* the nearest legal setting is SD"):
        check(served(), SERVE, "cpu", {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"})


def test_a_window_that_the_ring_cannot_hold_is_refused() -> None:
    with pytest.raises(Refused, match=r"ring_len=3 .* the nearest legal value is 4"):
        check(served(), ServeConfig(policy="checkpointing", ring_len=3), "cpu", {})
