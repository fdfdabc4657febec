"""Every vLLM-internal name that is used, the versions they were checked on, and their fingerprints then."""

import ast
import hashlib
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = {
    "EngineArgs": "vllm.engine.arg_utils:EngineArgs",
    "VllmConfig": "vllm.config.vllm:VllmConfig",
    "AsyncLLM": "vllm.v1.engine.async_llm:AsyncLLM",
    "VLLMValidationError": "vllm.exceptions:VLLMValidationError",
    "PluggableLayer": "vllm.model_executor.custom_op:PluggableLayer",
    "op_registry_oot": "vllm.model_executor.custom_op:op_registry_oot",
    "get_forward_context": "vllm.forward_context:get_forward_context",
    "init_logger": "vllm.logger:init_logger",
    "current_platform": "vllm.platforms:current_platform",
    "QwenGatedDeltaNetAttention": (
        "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention"
    ),
    "KimiGatedDeltaNetAttention": (
        "vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn:KimiGatedDeltaNetAttention"
    ),
    "MambaMixer2": "vllm.model_executor.layers.mamba.mamba_mixer2:MambaMixer2",
    "get_current_vllm_config": "vllm.config:get_current_vllm_config",
    "eager_break_during_capture": "vllm.compilation.breakable_cudagraph:eager_break_during_capture",
    "cpu_gdn_attention_core": "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention:cpu_gdn_attention_core",
    "unpacked_conv_weight": "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention:_unpacked_conv_weight",
    "causal_conv1d_update": "vllm.model_executor.layers.mamba.ops.causal_conv1d:causal_conv1d_update",
    "MambaHybridModelState": "vllm.v1.worker.gpu.model_states.mamba_hybrid:MambaHybridModelState",
    "Qwen3NextForCausalLM": "vllm.model_executor.models.qwen3_next:Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM": "vllm.model_executor.models.qwen3_5:Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM": "vllm.model_executor.models.qwen3_5:Qwen3_5MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration": "vllm.model_executor.models.qwen3_5:Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration": "vllm.model_executor.models.qwen3_5:Qwen3_5MoeForConditionalGeneration",
    "KimiLinearForCausalLM": "vllm.models.kimi_k3:KimiLinearForCausalLM",
    "NemotronHForCausalLM": "vllm.model_executor.models.nemotron_h:NemotronHForCausalLM",
}

_GDN = "model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py"
_NORM = "third_party/flash_linear_attention/ops/layernorm_guard.py"
_KDA = "model_executor/layers/mamba/gdn/kimi_gdn_linear_attn.py"
_KIMI = "models/kimi_k3/nvidia/"
_MAMBA2 = "model_executor/layers/mamba/mamba_mixer2.py"
_CPU = "model_executor/layers/mamba/ops/cpu/gdn_attention.py"
_V2 = "v1/worker/gpu/"

# what our code relies on, beyond the name: order of calls, meaning of counts, layout of pages
_BOTH = {
    "engine/arg_utils.py:EngineArgs.from_cli_args": "095e3ad1d4802266",
    "config/model.py:ModelConfig._maybe_register_model_class_overrides": "1c156aeeafcee4f5",
    "model_executor/model_loader/utils.py:_get_model_architecture": "7d0c083b3374f8e3",
    "model_executor/custom_op.py:PluggableLayer": "f7b376ead28dd665",
    "model_executor/layers/mamba/gdn/base.py:GatedDeltaNetAttention": "4cc2b6e1d4f656ab",
    f"{_GDN}:QwenGatedDeltaNetAttention.get_state_shape": "3876b8529865508b",
    "model_executor/models/qwen3_next.py:Qwen3NextForCausalLM": "288f0fa78c71fdf3",
    "model_executor/models/qwen3_5.py:Qwen3_5ForCausalLMBase": "2576ca6a222ae3ca",
    "model_executor/models/qwen3_5.py:Qwen3_5ForCausalLM": "db097a59a3c37f88",
    f"{_V2}model_states/__init__.py:resolve_model_state_cls": "68629f6be0585b41",
    f"{_V2}model_states/mamba_hybrid.py:MambaHybridModelState": "e534b24c1125ef92",
    f"{_V2}input_batch.py:_get_num_sampled_and_rejected_kernel": "7606589a6d98206f",
    f"{_V2}model_runner.py:GPUModelRunner.add_requests": "af92192591e3881c",
    f"{_V2}model_runner.py:GPUModelRunner.gather_batch_req_state": "c2bcb241e5227569",
    "v1/worker/mamba_utils.py:preprocess_mamba_align_fused_kernel": "1cbc905222e04484",
    "v1/worker/mamba_utils.py:precopy_mamba_align_fused_kernel": "f419fe5451b7b1fa",
    "v1/worker/mamba_utils.py:_copy_mamba_state_block": "198969fade86c485",
}
FINGERPRINTS: dict[str, dict[str, str]] = {
    "0.32.0": _BOTH
    | {
        "config/vllm.py:VllmConfig.__post_init__": "c170201946028801",
        "config/vllm.py:VllmConfig.use_v2_model_runner": "65dfa21371166532",
        "model_executor/layers/mamba/abstract.py:MambaBase": "ef6ca3662fe6b8a4",
        f"{_GDN}:QwenGatedDeltaNetAttention.__init__": "9898b9a1be5fa2de",
        f"{_GDN}:QwenGatedDeltaNetAttention.split_ba": "517fa79bccab1ff3",
        f"{_GDN}:QwenGatedDeltaNetAttention.fix_query_key_value_ordering": "def6ed81f1693e85",
        f"{_GDN}:QwenGatedDeltaNetAttention.forward_cpu": "3168874cad74797f",
        f"{_GDN}:QwenGatedDeltaNetAttention._output_projection": "fd927f60e7af2a80",
        f"{_CPU}:cpu_gdn_attention_core": "5ce664c0590b153f",
        f"{_CPU}:_cpu_gdn_attention_spec_aware": "be4803655b4a8d3a",
        f"{_CPU}:_spec_aware_nonspec": "9c4ab5799902af65",
        f"{_CPU}:_unpacked_conv_weight": "6b261bfbd4b4ca4e",
        "v1/attention/backends/gdn_attn.py:GDNAttentionMetadata": "3729f958cbb5d33e",
        "v1/attention/backends/gdn_attn.py:GDNAttentionMetadataBuilder.build": "51f8d2504f25b7ec",
        f"{_V2}input_batch.py:InputBatch": "464284c9112ac910",
        f"{_V2}model_runner.py:GPUModelRunner.execute_model": "172d90de5fea8610",
        f"{_V2}model_runner.py:GPUModelRunner.sample_tokens": "f7c7947858b7d1d9",
        f"{_V2}model_runner.py:GPUModelRunner.postprocess_sampled": "b61a274f0f1e83d0",
    },
    "0.33.0": _BOTH
    | {
        "config/vllm.py:VllmConfig.__post_init__": "bc2f1112b9a80f85",
        "config/vllm.py:VllmConfig.use_v2_model_runner": "0db2a37655ff7444",
        "model_executor/layers/mamba/abstract.py:MambaBase": "415e5060481027e4",
        f"{_GDN}:QwenGatedDeltaNetAttention.__init__": "2332969b4e503bc0",
        f"{_GDN}:QwenGatedDeltaNetAttention.get_kv_cache_spec": "e33e6dbe336d0dce",
        f"{_GDN}:QwenGatedDeltaNetAttention.forward_cuda": "deb5928e74781086",
        f"{_GDN}:QwenGatedDeltaNetAttention._forward_core": "a88c3139e05bc18f",
        f"{_GDN}:QwenGatedDeltaNetAttention._forward_core_fused_norm_packed": "da230cc603342728",
        f"{_GDN}:QwenGatedDeltaNetAttention._forward_core_fused_norm": "1ce8e246b4fc4425",
        f"{_GDN}:QwenGatedDeltaNetAttention._forward_core_decode_spec_fused_norm": "62c2d829612581df",
        f"{_GDN}:QwenGatedDeltaNetAttention._can_use_fused_gdn_mtp_decode": "4d5a67657962daa7",
        f"{_GDN}:QwenGatedDeltaNetAttention._rms_norm_gated_cuda": "ef8986ade0922a15",
        f"{_GDN}:qwen_gdn_attention_core": "d523c81e63cc1855",
        f"{_NORM}:layer_norm_fwd_kernel": "dc5027881164485f",
        f"{_NORM}:calc_rows_per_block": "3a31aa45f42010b7",
        f"{_KDA}:KimiGatedDeltaNetAttention": "c78a88d185c9b284",
        "compilation/breakable_cudagraph.py:eager_break_during_capture": "d5d36b32377e4355",
        "model_executor/layers/mamba/ops/causal_conv1d.py:_causal_conv1d_update_kernel": "17ade07931a0a2e2",
        "model_executor/layers/mamba/ops/causal_conv1d.py:causal_conv1d_update": "3b0a32c63301e327",
        "model_executor/models/qwen3_5.py:Qwen3_5MoeForCausalLM": "6660b6416eba2920",
        "model_executor/models/qwen3_5.py:Qwen3_5ForConditionalGeneration": "706d55d14dd81056",
        "model_executor/models/qwen3_5.py:Qwen3_5MoeForConditionalGeneration": "1eb81ee94c984ff6",
        f"{_MAMBA2}:MambaMixer2": "43d77047ac817fb7",
        f"{_MAMBA2}:mamba_mixer2": "58924db785b2a1ba",
        "model_executor/models/nemotron_h.py:NemotronHForCausalLM": "84468fee25d3fa10",
        "v1/attention/backends/mamba_attn.py:BaseMambaAttentionMetadata": "d782fa61be942fad",
        "v1/attention/backends/mamba_attn.py:BaseMambaAttentionMetadataBuilder": "b8789e7188b86c06",
        "v1/attention/backends/mamba2_attn.py:Mamba2AttentionMetadata": "7d179d7ace9f691d",
        "v1/attention/backends/mamba2_attn.py:Mamba2AttentionMetadataBuilder": "dc95612fe5f52d32",
        "v1/attention/backends/utils.py:split_decodes_and_prefills": "3a67e34d80cbcfd2",
        f"{_V2}model_runner.py:sort_batch_req_ids": "5996de3aef28b98a",
        f"{_KIMI}model.py:KimiDecoderLayer.__init__": "dea72943fb74e55a",
        f"{_KIMI}model.py:KimiLinearForCausalLM": "39f21c638774f3c4",
        f"{_KIMI}model_state.py:KimiK3ModelState": "71d7718ab1e63362",
        "v1/attention/backends/gdn_attn.py:GDNAttentionMetadata": "92369a4f00f42190",
        "v1/attention/backends/gdn_attn.py:GDNAttentionMetadataBuilder": "74893f23279669b3",
        f"{_V2}input_batch.py:InputBatch": "dbee5c4c9faf5f47",
        f"{_V2}model_runner.py:GPUModelRunner.execute_model": "056af36604c67f1a",
        f"{_V2}model_runner.py:GPUModelRunner.sample_tokens": "4850386b1933f601",
        f"{_V2}model_runner.py:GPUModelRunner.postprocess_sampled": "fc9b87c0d2de6b18",
        f"{_V2}cudagraph_utils.py:prepare_inputs_to_capture": "e4ebddcea1f7f534",
        f"{_V2}cudagraph_utils.py:CudaGraphManager.capture": "8be255879fcb2e53",
    },
}
DEVICES = {"0.32.0": "cpu", "0.33.0": "cuda"}  # what each was checked on


def resolve(name: str) -> Any:
    """The object behind a name of NAMES. Raises RuntimeError where this vLLM does not have it."""
    module, attribute = NAMES[name].split(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(f"this vLLM has no {module}.{attribute}, which ssmspec needs") from error


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return resolve(name)


@contextmanager
def layer_replaced(name: str, layer: type[Any]) -> Iterator[None]:
    """Inside, vLLM builds ``layer`` wherever it would build its pluggable layer ``name``."""
    registered = resolve("op_registry_oot")
    if name in registered:
        raise RuntimeError(f"another plugin has replaced vLLM's {name} by {registered[name]}")
    resolve("PluggableLayer").register_oot(name=name)(layer)
    try:
        yield
    finally:
        del registered[name]


@contextmanager
def metadata_replaced(context: Any, prefix: str, metadata: object) -> Iterator[None]:
    """Inside, the layer ``prefix`` finds ``metadata`` in the forward context."""
    everything = context.attn_metadata
    context.attn_metadata = {**everything, prefix: metadata}
    try:
        yield
    finally:
        context.attn_metadata = everything


def version() -> str:
    """Version of the installed vLLM."""
    return str(importlib.import_module("vllm").__version__)


def source_root() -> Path:
    """The folder of the installed vllm package. Raises RuntimeError where there is none."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("vllm is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def fingerprint(root: Path, name: str) -> str | None:
    """Hash of the source of `file.py:Class.method` below ``root``; None where it is not there."""
    file, _, path = name.partition(":")
    if not (root / file).is_file():
        return None
    text = (root / file).read_text()
    node: ast.AST | None = ast.parse(text)
    for part in path.split("."):
        body = getattr(node, "body", [])
        node = next((n for n in body if getattr(n, "name", None) == part), None)
    if node is None:
        return None
    return hashlib.sha256((ast.get_source_segment(text, node) or "").encode()).hexdigest()[:16]


def check(found: str | None = None, root: Path | None = None) -> str:
    """The device that this vLLM was checked on.

    Raises RuntimeError with what was found and what is wanted, unless this vLLM is one that was checked.
    """
    found = version() if found is None else found
    if found not in FINGERPRINTS:
        raise RuntimeError(
            f"vllm {found} was not checked with ssmspec: wanted {' or '.join(FINGERPRINTS)}."
            " Install one of these, or serve with --ssm-policy native"
        )
    root = source_root() if root is None else root
    for name, wanted in FINGERPRINTS[found].items():
        actual = fingerprint(root, name)
        if actual != wanted:
            raise RuntimeError(
                f"vllm {found} differs from the one that ssmspec was checked with: {name} is {actual or 'missing'},"
                f" wanted {wanted}. Install an unmodified vllm {found}, or serve with --ssm-policy native"
            )
    return DEVICES[found]


def finding(found: str | None = None, root: Path | None = None) -> str:
    """What `ssmspec doctor` says about this vLLM: whether policies are served, or why not."""
    try:
        device = check(found, root)
    except RuntimeError as error:
        return str(error)
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins", name="ssmspec")
    return f"served on {device}" if plugins else "the plugin is not installed as one: pip install ssmspec"


if __name__ == "__main__":
    sys.stdout.write(finding() + "\n")
