"""What differs between the recurrent layers that layer_steps.py plays: how each is built, described, and called."""

from types import SimpleNamespace
from typing import Any

import engine_checkpoint
import torch
import triton
import triton.language as tl
from torch import Tensor

LAYER = "layers.0"
QWEN = engine_checkpoint.CONFIGS["qwen3.5"] | {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
KIMI = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "mla_use_nope": True,
    "linear_attn_config": {
        "kda_layers": [1],
        "full_attn_layers": [2],
        "head_dim": 64,
        "num_heads": 2,
        "short_conv_kernel_size": 4,
    },
    "dtype": "bfloat16",
}
NEMOTRON = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "hybrid_override_pattern": "M*",
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 64,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "ssm_state_size": 64,
    "n_groups": 2,
    "conv_kernel": 4,
    "expand": 2,
    "use_conv_bias": True,
    "dtype": "bfloat16",
}
CONFIGS = {"gdn": QWEN, "kda": KIMI, "mamba2": NEMOTRON}


def stand_in_for_prompts(layer: Any, name: str) -> None:
    """vLLM's own method puts out what ``played`` says of its inputs, in place of what its prompt kernels would."""
    stock = next(c for c in type(layer).__mro__ if c.__module__.startswith("vllm.") and name in vars(c))

    def prompts(self: Any, *inputs: Tensor) -> None:
        inputs[-1].copy_(self.played(*inputs))

    setattr(stock, name, prompts)


def random_weights(layer: Any) -> None:
    """Slow decay, so that an error in a state is seen for many tokens."""
    layer.A_log.data.uniform_(-4, -1)
    layer.dt_bias.data.uniform_(-2, 0)
    layer.conv1d.weight.data.normal_(0, 0.3)


@triton.jit
def interpreted_exp(x):  # type: ignore[no-untyped-def]
    return tl.exp(x)


@triton.jit
def interpreted_log(x):  # type: ignore[no-untyped-def]
    return tl.log(x)


class Gate:
    """In the norm's place."""

    eps = 0.0

    def __call__(self, y: Tensor, z: Tensor, weight: Tensor, step: Any) -> Tensor:
        return y * z


class Gdn:
    module, drafting = "gdn.qwen_gdn_linear_attn", "mtp"

    @staticmethod
    def make(module: Any, config: Any, stock: bool, gated: bool) -> Any:
        from triton_host import masks

        from ssmspec.runtime.vllm.gdn import GatedDeltaNet

        kind = module.QwenGatedDeltaNetAttention if stock else GatedDeltaNet
        layer = kind(config.model_config.hf_text_config, config, prefix=LAYER)
        layer.device_type = "cuda"
        if gated:  # as where vLLM's fused kernel is built; the norm is left out, the gate is 2
            layer.gdn_decode_kernel, module.supports_fused_mtp_decode = "cuda", lambda: True
            layer._rms_norm_gated_cuda = lambda x, gate, out: out.copy_(x * gate)
            layer._norm = Gate()
            if config.additional_config["ssmspec"]["mode"] == "fast":
                masks.install()
                layer.windows = None  # nothing goes piece by piece there
        layer.played_gated = gated
        random_weights(layer)
        return layer

    @staticmethod
    def builder() -> Any:
        from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder

        return GDNAttentionMetadataBuilder

    @staticmethod
    def stage_for_graphs(builder: Any, staged: bool) -> None:
        builder.use_full_cuda_graph = staged

    @staticmethod
    def widen(metadata: Any, batch: int) -> None:
        metadata.num_spec_decodes = batch

    @staticmethod
    def mix(layer: Any) -> int:
        """Let prompts play, and say in front of which row one stands."""
        layer.played = lambda mixed, b, a, out: mixed[:, : out[0].numel()].view_as(out)
        stand_in_for_prompts(layer, "_forward_core")
        return 1

    @staticmethod
    def play(layer: Any, tokens: int) -> Tensor:
        wide = torch.randn(tokens, layer.conv_dim + 64).bfloat16()
        inputs = wide[:, : layer.conv_dim]  # a view, as in the model
        b, a = torch.randn(2, tokens, layer.num_v_heads).bfloat16()
        out = torch.zeros(tokens, layer.num_v_heads, layer.head_v_dim).bfloat16()
        if layer.played_gated:
            layer._forward_core_fused_norm(inputs, b, a, out + 2, out)
        else:
            layer._forward_core(inputs, b, a, out)
        layer.inputs = inputs, b, a, out
        return out


class Kda(Gdn):
    module, drafting = "gdn.kimi_gdn_linear_attn", "ngram"

    @staticmethod
    def make(module: Any, config: Any, stock: bool, gated: bool) -> Any:
        from vllm.models.kimi_k3.nvidia.ops.third_party.kda import fused_recurrent

        from ssmspec.runtime.vllm.kda import KimiDeltaAttention

        # bare names, which the interpreter does not find in the kernel
        fused_recurrent.exp, fused_recurrent.log = interpreted_exp, interpreted_log
        kind = module.KimiGatedDeltaNetAttention if stock else KimiDeltaAttention
        layer = kind(config.model_config.hf_text_config, config, prefix=LAYER)
        layer.device_type = "cuda"
        layer.o_norm.weight.data.fill_(1)
        random_weights(layer)
        return layer

    @staticmethod
    def play(layer: Any, tokens: int) -> Tensor:
        h, k = layer.local_num_heads, layer.head_dim
        wide = torch.randn(tokens, 3 * h * k + h + k).bfloat16()
        mixed, beta, _ = wide.split([3 * h * k, h, k], -1)  # views, as in the model
        gate, output_gate = torch.randn(2, 1, tokens, h, k).bfloat16()
        out = torch.zeros(1, tokens, h, k).bfloat16()
        layer._forward(mixed_qkv=mixed, g1=gate, g2=output_gate[0], beta=beta[None], core_attn_out=out)
        layer.inputs = mixed, gate, output_gate[0], beta[None], out
        return out[0]

    @staticmethod
    def mix(layer: Any) -> int:
        layer.played = lambda mixed, gate, output_gate, beta, out: gate
        stand_in_for_prompts(layer, "_forward")
        return 1


class Mamba2:
    module, drafting = "mamba_mixer2", "ngram"

    @staticmethod
    def make(module: Any, config: Any, stock: bool, gated: bool) -> Any:
        from triton_host import masks
        from vllm.model_executor.layers.mamba.ops import ssu_dispatch

        from ssmspec.runtime.vllm.mamba2 import Mamba2

        masks.install()
        ssu_dispatch._mamba_ssu_backend = ssu_dispatch.TritonSSUBackend(config.mamba_config)
        c = config.model_config.hf_text_config
        layer = (module.MambaMixer2 if stock else Mamba2)(
            hidden_size=c.hidden_size,
            ssm_state_size=c.ssm_state_size,
            conv_kernel_size=c.conv_kernel,
            intermediate_size=c.mamba_num_heads * c.mamba_head_dim,
            use_conv_bias=c.use_conv_bias,
            use_bias=False,
            n_groups=c.n_groups,
            num_heads=c.mamba_num_heads,
            head_dim=c.mamba_head_dim,
            model_config=config.model_config,
            cache_config=config.cache_config,
            prefix=LAYER,
        )
        layer.device_type = "cuda"
        layer.A.data.uniform_(-4, -1).exp_().neg_()
        layer.dt_bias.data.uniform_(-2, 0)
        layer.D.data.normal_()
        layer.conv1d.weight.data.normal_(0, 0.3)
        layer.conv1d.bias.data.normal_(0, 0.3)
        return layer

    @staticmethod
    def builder() -> Any:
        from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder

        return Mamba2AttentionMetadataBuilder

    @staticmethod
    def stage_for_graphs(builder: Any, staged: bool) -> None:
        graphs = SimpleNamespace(has_full_cudagraphs=lambda: staged)
        builder.compilation_config = SimpleNamespace(cudagraph_mode=graphs)
        rows, columns = builder.state_indices_tensor_d.shape  # room for one more, the padding
        builder.decode_cudagraph_max_bs = rows + 1
        builder.state_indices_tensor_d = torch.zeros(rows + 1, columns, dtype=torch.int32)
        builder.decode_num_accepted_tokens = torch.zeros(rows + 1, dtype=torch.int32)

    @staticmethod
    def widen(metadata: Any, batch: int) -> None:
        """Padding is among its decode rows already."""
        assert metadata.num_decodes == batch

    @staticmethod
    def mix(layer: Any) -> int:
        layer.played = lambda projected, out: projected[:, : out.shape[1]]
        stand_in_for_prompts(layer, "conv_ssm_forward")
        return 2

    @staticmethod
    def play(layer: Any, tokens: int) -> Tensor:
        heads, dim = layer.num_heads, layer.head_dim
        projected = torch.randn(tokens, heads * dim + layer.conv_dim + heads).bfloat16()
        out = torch.zeros(tokens, heads * dim).bfloat16()
        layer.conv_ssm_forward(projected, out)
        layer.inputs = projected, out
        return out.view(tokens, heads, dim)


FAMILIES: dict[str, Any] = {"gdn": Gdn, "kda": Kda, "mamba2": Mamba2}
