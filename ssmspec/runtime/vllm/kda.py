"""The Kimi Delta Attention layer of Kimi-Linear under a policy."""

from functools import cached_property
from typing import Any

from torch import Tensor

from ssmspec.geometry import Arch, Geometry
from ssmspec.kernels.base import LayerParams
from ssmspec.runtime.vllm import compat
from ssmspec.runtime.vllm.layer import Packed, PolicyLayer


class KimiDeltaAttention(PolicyLayer, compat.KimiGatedDeltaNetAttention):  # type: ignore[misc]
    """vLLM's ``forward`` projects, calls ``_forward`` for everything up to the gated norm, and projects again."""

    arch = Arch.KDA

    def __init__(self, config: Any, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(config, vllm_config, prefix)
        self.activation = "silu"  # as vLLM's own, whatever hidden_act says
        self.serve_policy(vllm_config)

    @property
    def geometry(self) -> Geometry:
        heads, dims = (self.local_num_heads,) * 2, (self.head_dim,) * 2
        return self.shape(heads, dims, self.conv_size, gate_lower_bound=self.gate_lower_bound)

    @cached_property
    def params(self) -> LayerParams:
        """vLLM's own tensors, so that weights that are loaded anew are seen."""
        dt_bias = self.dt_bias.detach().view(self.local_num_heads, self.head_dim)
        return LayerParams(index=self.session_index, A_log=self.A_log.detach(), dt_bias=dt_bias)

    @compat.eager_break_during_capture  # type: ignore[untyped-decorator]
    def _forward(
        self, mixed_qkv: Tensor, g1: Tensor, g2: Tensor, beta: Tensor, core_attn_out: Tensor
    ) -> None:
        """Conv inputs [tokens, D], gates ``g1`` [1, tokens, H, K] and ``beta`` [1, tokens, H], output gate ``g2``
        [tokens, H, V] -> ``core_attn_out`` [1, tokens, H, V], normed and gated, padding behind."""
        stock = super()._forward

        def ours(packed: Packed, mixed: Tensor, a: Tensor, b: Tensor, gate: Tensor) -> Tensor:
            outs: Tensor = self.o_norm(self.windows(packed, mixed, a, b), gate)
            return outs

        def theirs(mixed: Tensor, a: Tensor, b: Tensor, gate: Tensor, out: Tensor) -> None:
            stock(mixed, a[None], gate, b[None], out[None])

        self.split((mixed_qkv, g1[0], beta[0], g2), core_attn_out[0], ours, theirs)
