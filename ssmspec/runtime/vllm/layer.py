"""The Gated DeltaNet layer under a policy. Rows without drafts in their past, prompts above all, stay with vLLM's code."""

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ssmspec import kernels, layout
from ssmspec.geometry import Arch, Conv, DType, Geometry, Window
from ssmspec.kernels.base import Layer, LayerParams, Tokens, Verify
from ssmspec.runtime.vllm import compat, pages
from ssmspec.runtime.vllm.config import resolve
from ssmspec.runtime.vllm.session import Session


class GatedDeltaNet(compat.QwenGatedDeltaNetAttention):  # type: ignore[misc]
    """Takes the place of vLLM's layer inside our model classes; ``session`` is set when the pages are bound.

    On CUDA vLLM's custom ops call ``_forward_core``, or for a batch of windows alone what takes its fused kernel, if it
    would. They may run under capture, so nothing here reads the device.
    """

    def __init__(self, config: Any, vllm_config: Any, prefix: str = "", **options: Any) -> None:
        super().__init__(config, vllm_config, prefix, **options)
        self.serve = resolve({}, vllm_config.additional_config, {})
        self.window: Window = self.serve.window(self.num_spec)
        self.session: Session | None = None
        self.session_index = -1
        self.device_type: str = vllm_config.device_config.device_type
        requests = vllm_config.scheduler_config.max_num_seqs
        # here, so that vLLM's memory profiling counts them
        self.records = pages.allocate_records(
            layout.of(self.serve.policy, self.geometry, self.window),
            requests + 1,
            torch.device(self.device_type),
        )

    @property
    def kv_cache(self) -> Any:
        """The pages of this layer, as vLLM sets them."""
        return self._kv_cache

    @kv_cache.setter
    def kv_cache(self, pages: Any) -> None:
        """vLLM measures its graphs with pages that it frees again: nothing of ours may hold on to them."""
        self._kv_cache = pages
        session = self.__dict__.get("session")
        if session is not None:
            session.release()

    @property
    def geometry(self) -> Geometry:
        """This rank's share of the layer."""
        h, hv = self.num_k_heads // self.tp_size, self.num_v_heads // self.tp_size
        conv_dtype, state_dtype = self.get_state_dtype()
        return Geometry(
            arch=Arch.GDN,
            num_layers=1,
            num_k_heads=h,
            num_v_heads=hv,
            head_k=self.head_k_dim,
            head_v=self.head_v_dim,
            conv=Conv(channels=2 * h * self.head_k_dim + hv * self.head_v_dim, width=self.conv_kernel_size),
            act_dtype=DType(str(conv_dtype).removeprefix("torch.")),
            state_dtype=DType(str(state_dtype).removeprefix("torch.")),
        )

    @cached_property
    def params(self) -> LayerParams:
        """vLLM's own tensors, so that weights that are loaded anew are seen; dt_bias is in the model's dtype."""
        return LayerParams(index=self.session_index, A_log=self.A_log.detach(), dt_bias=self.dt_bias.detach())

    @property
    def state(self) -> Tensor:
        """[pages, HV, V, K]. vLLM's CPU kernels keep the K index outside in the same bytes."""
        state: Tensor = self.kv_cache[1]
        if self.device_type != "cpu":
            return state
        blocks, hv, v, k = state.shape
        return state.view(blocks, hv, k, v).mT

    @property
    def conv(self) -> pages.ConvPages:
        weight = (
            compat.unpacked_conv_weight(self) if self.device_type == "cpu" else self.conv1d.weight.squeeze(1)
        )
        return pages.ConvPages(self.kv_cache[0].transpose(-1, -2), weight, self.conv1d.bias)

    @cached_property
    def snapshots(self) -> Verify:
        """The verify of vLLM's own policy, a page per token, through our kernels."""
        return kernels.make(self.serve.kernels(self.device_type), self.geometry, self.window).verify

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """One page per request where the policy needs no snapshots."""
        spec = super().get_kv_cache_spec(vllm_config)
        return spec if self.serve.policy == "native" else replace(spec, num_speculative_blocks=0)

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
        context = compat.get_forward_context()
        metadata = (context.attn_metadata or {}).get(self.prefix)
        if metadata is None and self.device_type == "cpu":  # a profiling run
            return
        if metadata is None or metadata.spec_sequence_masks is None:
            self._stock(mixed_qkv, b, a, core_attn_out)
            return
        n = metadata.num_actual_tokens
        mixed, b, a = mixed_qkv[:n], b[:n], a[:n]
        if not metadata.num_prefills:
            core_attn_out[:n] = self._speculative(metadata, mixed, b, a)
            return
        spec, rest = metadata.spec_token_indx.long(), metadata.non_spec_token_indx.long()
        core_attn_out[spec] = self._speculative(metadata, mixed[spec], b[spec], a[spec])
        theirs = torch.zeros_like(core_attn_out[rest])
        alone = replace(
            metadata,
            spec_sequence_masks=None,
            num_spec_decodes=0,
            num_spec_decode_tokens=0,
            num_accepted_tokens=None,
            num_actual_tokens=len(rest),
        )
        with compat.metadata_replaced(context, self.prefix, alone):
            self._stock(mixed[rest], b[rest], a[rest], theirs)
        core_attn_out[rest] = theirs

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
        n = attn_metadata.num_actual_tokens
        outs = self._speculative(attn_metadata, mixed_qkv[:n], b[:n], a[:n])
        self._rms_norm_gated_cuda(outs, output_gate[:n], core_attn_out[:n])

    def _stock(self, mixed: Tensor, b: Tensor, a: Tensor, out: Tensor) -> None:
        if self.device_type == "cpu":
            compat.cpu_gdn_attention_core(mixed, b, a, out, self.prefix)
        else:
            super()._forward_core(mixed, b, a, out)

    def _speculative(self, metadata: Any, mixed: Tensor, b: Tensor, a: Tensor) -> Tensor:
        """The rows' windows, one after another [tokens, .] -> outputs [tokens, HV, V]."""
        rows, t, tokens = metadata.num_spec_decodes, self.window.max_len, mixed.shape[0]
        starts = metadata.spec_query_start_loc[: rows + 1]
        blocks = metadata.spec_state_indices_tensor[:rows]
        accepted = metadata.num_accepted_tokens[:rows]
        if self.device_type != "cpu":
            mixed = self._convolved(mixed, blocks[:, 0], accepted, starts)
        whole = tokens == rows * t  # every window is T long, as in all captured batches
        if whole:
            x = [tensor.view(rows, t, -1) for tensor in (mixed, a, b)]
        else:
            starts = starts.long()
            at = (starts[:-1, None] + torch.arange(t, device=mixed.device)).clamp(max=tokens - 1)
            x = [tensor[at] for tensor in (mixed, a, b)]
        if self.device_type == "cpu":
            x[0] = self.conv.verify(blocks[:, 0].long(), accepted.long() - 1, x[0])
        outs = self._verified(metadata, *x).flatten(0, 1)
        if whole:
            return outs
        token = torch.arange(tokens, device=mixed.device)
        row = torch.searchsorted(starts[1:], token, right=True)
        return outs[row * t + token - starts[row]]

    def _convolved(self, mixed: Tensor, blocks: Tensor, accepted: Tensor, starts: Tensor) -> Tensor:
        """vLLM's conv over packed windows; the longest it may meet is T, however many pages a row has."""
        conv = self.conv
        convolved: Tensor = compat.causal_conv1d_update(
            mixed,
            conv.pages,
            conv.weight,
            conv.bias,
            self.activation,
            conv_state_indices=blocks,
            num_accepted_tokens=accepted,
            query_start_loc=starts,
            max_query_len=self.window.max_len,
            validate_data=False,
        )
        return convolved

    def _verified(self, metadata: Any, mixed: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Conv outputs [B, T, D], gates [B, T, HV] -> outputs [B, T, HV, V]."""
        if self.serve.policy != "native":
            if self.session is None:
                raise RuntimeError(
                    f"ssmspec: no session was bound to {self.prefix}; vLLM did not load our model state"
                )
            return self.session.verify(self.session_index, mixed, a, b)
        rows = metadata.num_spec_decodes
        blocks = metadata.spec_state_indices_tensor[:rows].long()
        offsets = metadata.num_accepted_tokens[:rows].long() - 1
        start = blocks.gather(1, offsets[:, None])[:, 0]
        lens = metadata.spec_query_start_loc[: rows + 1].long().diff()
        layer = Layer(params=self.params, state=self.state, read=None, records={})
        return self.snapshots(layer, Tokens.unpack(self.geometry, mixed, a, b), start, lens, snapshots=blocks)
