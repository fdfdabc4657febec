"""The Gated DeltaNet layer under a policy. Rows without drafts in their past, prompts above all, stay with vLLM's code."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ssmspec import kernels, layout
from ssmspec.geometry import Arch, Conv, DType, Geometry, Window
from ssmspec.kernels.base import Layer, LayerParams, Tokens
from ssmspec.runtime.vllm import compat, pages
from ssmspec.runtime.vllm.config import resolve
from ssmspec.runtime.vllm.session import Session


class GatedDeltaNet(compat.QwenGatedDeltaNetAttention):  # type: ignore[misc]
    """Takes the place of vLLM's layer inside our model classes; ``session`` is set when the pages are bound."""

    def __init__(self, config: Any, vllm_config: Any, prefix: str = "", **options: Any) -> None:
        super().__init__(config, vllm_config, prefix, **options)
        self.serve = resolve({}, vllm_config.additional_config, {})
        self.window: Window = self.serve.window(self.num_spec)
        self.session: Session | None = None
        self.session_index = -1
        requests = vllm_config.scheduler_config.max_num_seqs
        # here, so that vLLM's memory profiling counts them
        self.records = pages.allocate_records(
            layout.of(self.serve.policy, self.geometry, self.window),
            requests + 1,
            torch.device(vllm_config.device_config.device_type),
        )

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

    @property
    def params(self) -> LayerParams:
        return LayerParams(index=self.session_index, A_log=self.A_log, dt_bias=self.dt_bias)

    @property
    def state(self) -> Tensor:
        """[blocks, HV, V, K]. vLLM's CPU kernels keep the K index outside in the same bytes."""
        blocks, hv, v, k = self.kv_cache[1].shape
        transposed: Tensor = self.kv_cache[1].view(blocks, hv, k, v)
        return transposed.mT

    @property
    def conv(self) -> pages.ConvPages:
        return pages.ConvPages(
            self.kv_cache[0].transpose(-1, -2), compat.unpacked_conv_weight(self), self.conv1d.bias
        )

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """One page per request where the policy needs no snapshots."""
        spec = super().get_kv_cache_spec(vllm_config)
        return spec if self.serve.policy == "native" else replace(spec, num_speculative_blocks=0)

    def forward_cpu(self, hidden_states: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        mixed, z, b, a = self._projected(hidden_states)
        out = torch.zeros_like(z)
        self._core(mixed, b, a, out)
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

    def _core(self, mixed: Tensor, b: Tensor, a: Tensor, out: Tensor) -> None:
        context = compat.get_forward_context()
        metadata = (context.attn_metadata or {}).get(self.prefix)
        if metadata is None:  # a profiling run
            return
        if metadata.spec_sequence_masks is None:
            self._stock(mixed, b, a, out)
            return
        prompts = metadata.num_prefills > 0
        spec = metadata.spec_token_indx.long() if prompts else torch.arange(mixed.shape[0])
        out[spec] = self._speculative(metadata, mixed[spec], b[spec], a[spec])
        if prompts:
            rest = metadata.non_spec_token_indx.long()
            theirs = torch.zeros_like(out[rest])
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
            out[rest] = theirs

    def _stock(self, mixed: Tensor, b: Tensor, a: Tensor, out: Tensor) -> None:
        compat.cpu_gdn_attention_core(mixed, b, a, out, self.prefix)

    def _speculative(self, metadata: Any, mixed: Tensor, b: Tensor, a: Tensor) -> Tensor:
        """The rows' windows, one after another [tokens, .] -> outputs [tokens, HV, V]."""
        starts = metadata.spec_query_start_loc[: metadata.num_spec_decodes + 1].long()
        lens = starts.diff()
        t = torch.arange(self.window.max_len)
        at = (starts[:-1, None] + t).clamp(max=mixed.shape[0] - 1)
        if self.serve.policy == "native":
            outs = self._snapshots(metadata, lens, mixed[at], b[at], a[at])
        elif self.session is None:
            raise RuntimeError(
                f"ssmspec: no session was bound to {self.prefix}; vLLM did not load our model state"
            )
        else:
            outs = self.session.verify(self.session_index, mixed[at], a[at], b[at])
        return outs[t < lens[:, None]]

    def _snapshots(self, metadata: Any, lens: Tensor, mixed: Tensor, b: Tensor, a: Tensor) -> Tensor:
        """vLLM's own policy, a page per token, through our kernels: what the others are compared with."""
        n = metadata.num_spec_decodes
        blocks = metadata.spec_state_indices_tensor[:n].long()
        offsets = metadata.num_accepted_tokens[:n].long() - 1
        x = Tokens.unpack(self.geometry, self.conv.verify(blocks[:, 0], offsets, mixed), a, b)
        start = blocks.gather(1, offsets[:, None])[:, 0]
        layer = Layer(params=self.params, state=self.state, read=None, records={})
        verify = kernels.make("torch", self.geometry, self.window).verify
        return verify(layer, x, start, lens, snapshots=blocks)
