"""The Mamba2 layer of Nemotron-H under a policy."""

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ssmspec.geometry import Arch, Geometry
from ssmspec.kernels.base import LayerParams
from ssmspec.runtime.vllm import compat
from ssmspec.runtime.vllm.layer import Packed, PolicyLayer


class Mamba2(PolicyLayer, compat.MambaMixer2):  # type: ignore[misc]
    """vLLM's ``forward`` projects, calls ``conv_ssm_forward`` through a custom op, gates and norms, and projects again."""

    arch = Arch.MAMBA2

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.serve_policy(compat.get_current_vllm_config())
        self.A_log = torch.empty_like(self.A.data)  # vLLM keeps -exp(A_log) alone
        theirs = self.A.weight_loader

        def load(param: Tensor, loaded: Tensor) -> None:
            theirs(param, loaded)
            if not param.is_meta:  # a reload counts what it loads before it has room for it
                self._take(param)

        self.A.weight_loader = load

    def _take(self, A: Tensor) -> None:
        """A is negative; but for dummy weights, which then do not decay."""
        self.A_log.copy_(A.detach().neg().clamp(min=torch.finfo(torch.float32).tiny).log())

    @property
    def geometry(self) -> Geometry:
        heads = (self.n_groups // self.tp_size, self.num_heads // self.tp_size)
        return self.shape(heads, (self.ssm_state_size, self.head_dim), self.conv_kernel_size)

    @cached_property
    def params(self) -> LayerParams:
        """vLLM's own tensors, but for A_log; weights that are loaded anew are seen in all of them."""
        self._take(self.A)
        dt_bias, D = self.dt_bias.detach(), self.D.detach()
        return LayerParams(index=self.session_index, A_log=self.A_log, dt_bias=dt_bias, D=D)

    def rows(self, metadata: Any, num_requests: int) -> slice | None:
        """vLLM sorts windows to the front; padding may stand behind them."""
        n = min(metadata.num_decodes, num_requests)
        return slice(n) if n else None

    def conv_ssm_forward(self, projected_states: Tensor, output: Tensor) -> None:
        """Output gate, conv inputs and dt [tokens, .] -> ``output`` [tokens, HV * V], padding behind."""
        context = compat.get_forward_context()
        metadata = (context.attn_metadata or {}).get(self.prefix)
        if metadata is None or not metadata.num_decodes:
            super().conv_ssm_forward(projected_states, output)
            return
        n = metadata.num_decode_tokens
        gate, channels = self.tped_intermediate_size, self.tped_conv_size
        mixed, dt = projected_states[:n, gate : gate + channels], projected_states[:n, gate + channels :]
        packed = Packed.of(
            metadata.num_decodes,
            metadata.query_start_loc_d,
            metadata.state_indices_tensor_d,
            metadata.num_accepted_tokens,
        )
        output[:n] = self.windows(packed, mixed, dt).flatten(1)
        if metadata.num_prefills:
            alone = replace(metadata, num_decodes=0, num_decode_tokens=0)
            with compat.metadata_replaced(context, self.prefix, alone):
                super().conv_ssm_forward(projected_states[n:], output[n:])
