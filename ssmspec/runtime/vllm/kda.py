"""The Kimi Delta Attention layer of Kimi-Linear under a policy."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ssmspec.geometry import Arch, Geometry
from ssmspec.kernels.base import LayerParams
from ssmspec.runtime.vllm import compat
from ssmspec.runtime.vllm.gdn import packed, without_windows
from ssmspec.runtime.vllm.layer import PolicyLayer


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
        context = compat.get_forward_context()
        metadata = (context.attn_metadata or {}).get(self.prefix)
        if metadata is None or metadata.spec_sequence_masks is None:
            super()._forward(mixed_qkv, g1, g2, beta, core_attn_out)
            return
        n, (out, a, b) = metadata.num_actual_tokens, (core_attn_out[0], g1[0], beta[0])
        if not metadata.num_prefills:
            outs = self.windows(packed(metadata), mixed_qkv[:n], a[:n], b[:n])
            out[:n] = self.o_norm(outs, g2[:n])
            return
        spec, rest = metadata.spec_token_indx.long(), metadata.non_spec_token_indx.long()
        out[spec] = self.o_norm(self.windows(packed(metadata), mixed_qkv[spec], a[spec], b[spec]), g2[spec])
        theirs = torch.zeros_like(out[rest])
        with compat.metadata_replaced(context, self.prefix, without_windows(metadata, len(rest))):
            super()._forward(mixed_qkv[rest], g1[:, rest], g2[rest], beta[:, rest], theirs[None])
        out[rest] = theirs
