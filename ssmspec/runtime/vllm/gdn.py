"""The Gated DeltaNet layer of Qwen models under a policy."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ssmspec.geometry import Arch, Geometry, Mode
from ssmspec.kernels.base import LayerParams
from ssmspec.kernels.fast_layer import Settled, Unconvolved, merges
from ssmspec.kernels.gated_norm import gated_norm
from ssmspec.kernels.layer_step import Projected
from ssmspec.kernels.norm import Gate
from ssmspec.kernels.norm_triton import TritonNorm
from ssmspec.runtime.vllm import compat, pages
from ssmspec.runtime.vllm.layer import Packed, PolicyLayer, packed_windows


class GatedDeltaNet(PolicyLayer, compat.QwenGatedDeltaNetAttention):  # type: ignore[misc]
    """On CUDA vLLM's custom ops call ``_forward_core``, or for a batch of windows alone what takes its fused kernel, if
    it would."""

    arch = Arch.GDN

    def __init__(self, config: Any, vllm_config: Any, prefix: str = "", **options: Any) -> None:
        super().__init__(config, vllm_config, prefix, **options)
        self.serve_policy(vllm_config)

    @property
    def geometry(self) -> Geometry:
        heads = (self.num_k_heads // self.tp_size, self.num_v_heads // self.tp_size)
        return self.shape(heads, (self.head_k_dim, self.head_v_dim), self.conv_kernel_size)

    @cached_property
    def params(self) -> LayerParams:
        """vLLM's own tensors, so that weights that are loaded anew are seen; dt_bias is in the model's dtype."""
        return LayerParams(index=self.session_index, A_log=self.A_log.detach(), dt_bias=self.dt_bias.detach())

    @property
    def state(self) -> Tensor:
        """[pages, HV, V, K]. vLLM's CPU kernels keep the K index outside in the same bytes."""
        state = super().state
        if self.device_type != "cpu":
            return state
        blocks, hv, v, k = state.shape
        return state.view(blocks, hv, k, v).mT

    @property
    def conv(self) -> pages.ConvPages:
        if self.device_type != "cpu":
            return super().conv
        weight = compat.unpacked_conv_weight(self)
        return pages.ConvPages(self.kv_cache[0].transpose(-1, -2), weight, self.conv1d.bias)

    def convolved(self, packed: Packed, mixed: Tensor) -> Tensor:
        """vLLM's CPU kernel keeps the wrong inputs of short windows: there the reference takes its place."""
        if self.device_type != "cpu":
            return super().convolved(packed, mixed)
        starts, t = packed.starts.long(), self.window.max_len
        at = (starts[:-1, None] + torch.arange(t)).clamp(max=len(mixed) - 1)
        blocks, offsets = packed.blocks[:, 0].long(), packed.accepted.long() - 1
        windows = self.conv.verify(blocks, offsets, mixed[at])
        live = torch.arange(t) < starts.diff()[:, None]
        return mixed.index_put((at[live],), windows[live])

    def forward_cpu(self, hidden_states: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        mixed, z, b, a = self._projected(hidden_states)
        out = torch.zeros_like(z)
        self._forward_core(mixed, b, a, out)
        result: Tensor = self._output_projection(out, z)
        return result

    def _projected(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Conv inputs [tokens, D] in the order q, k, v; output gate [tokens, HV, V]; gates b, a [tokens, HV]."""
        qkvz, _ = self.in_proj_qkvz(hidden_states)
        ba, _ = self.in_proj_ba(hidden_states)
        if self.gqa_interleaved_layout:
            q, k, v, z, b, a = self.fix_query_key_value_ordering(qkvz, ba)
            return torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], -1), z.contiguous(), b, a
        b, a = self.split_ba(ba)
        mixed, z = qkvz.split([self.geometry.conv.channels, qkvz.shape[-1] - self.geometry.conv.channels], -1)
        return mixed, z.unflatten(-1, (-1, self.head_v_dim)).contiguous(), b, a

    def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
        """Conv inputs [tokens, D] and gates [tokens, HV] -> ``core_attn_out`` [tokens, HV, V], padding behind."""
        self.split((mixed_qkv, a, b), core_attn_out, self.windows, self._stock)

    def _forward_core_decode_spec_fused_norm(
        self,
        mixed_qkv: Tensor,
        b: Tensor,
        a: Tensor,
        output_gate: Tensor,
        core_attn_out: Tensor,
        attn_metadata: Any,
    ) -> None:
        """As ``_forward_core``, without prompts; what goes out is normed and gated."""
        packed, n = packed_windows(attn_metadata), attn_metadata.num_actual_tokens
        mixed, gate, a, b, out = (t[:n] for t in (mixed_qkv, output_gate, a, b, core_attn_out))
        if not self._merged(len(packed.blocks), mixed, gate, a, b, out):
            self._rms_norm_gated_cuda(self.windows(packed, mixed, a, b), gate, out)

    def _merged(self, rows: int, mixed: Tensor, gate: Tensor, a: Tensor, b: Tensor, out: Tensor) -> bool:
        """Fast mode's layer, as far as its kernels serve: the conv with the couplings, the norm with the window."""
        whole = len(mixed) == rows * self.window.max_len
        if self.window.mode is not Mode.FAST or self.serve.kernels(self.device_type) != "triton" or not whole:
            return False
        session, conv = self.bound(), self.conv
        settled = Settled(
            conv=self.geometry.conv, field=conv.pages, pages=session.windows.rows[self.session_index]
        )
        x, z, a, b, room = (t.view(rows, -1, *t.shape[1:]) for t in (mixed, gate, a, b, out))
        if not merges(self.geometry, settled, x, conv.weight):
            return False
        tokens = Unconvolved.of(
            self.geometry, Projected(x=x, z=z, a=a, b=b), settled, conv.weight, conv.bias,
            norm=self._norm, weight=self.norm.weight, step=session.step(rows), out=room,
        )  # fmt: skip
        session.verify(self.session_index, tokens)
        return True

    @cached_property
    def _norm(self) -> TritonNorm:
        return TritonNorm(group=self.head_v_dim, gate=Gate(self.norm.activation), eps=self.norm.eps)

    def _rms_norm_gated_cuda(self, x: Tensor, output_gate: Tensor, out: Tensor) -> None:
        """vLLM's, to the bit, without its copy of a gate that lies inside the projection."""
        if self.norm.activation == "silu":
            gated_norm(x, output_gate, self.norm.weight, self.norm.eps, out)
        else:
            super()._rms_norm_gated_cuda(x, output_gate, out)

    def _stock(self, mixed: Tensor, a: Tensor, b: Tensor, out: Tensor) -> None:
        if self.device_type == "cpu":
            compat.cpu_gdn_attention_core(mixed, b, a, out, self.prefix)
        else:
            super()._forward_core(mixed, b, a, out)
