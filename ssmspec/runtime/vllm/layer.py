"""What every recurrent layer has under a policy: records, pages, and windows that go through our kernels.

Rows without drafts in their past, prompts above all, stay with vLLM's code.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A batch's windows, one after another in its tokens, and where vLLM keeps what lies before them."""

    starts: Tensor  # [B + 1], offsets of their tokens
    blocks: Tensor  # [B, 1, or T under native], pages
    accepted: Tensor  # [B], of the window before; names a column of ``blocks``

    @classmethod
    def of(cls, rows: int, starts: Tensor, blocks: Tensor, accepted: Tensor) -> "Packed":
        """The first ``rows`` of vLLM's buffers."""
        return cls(starts=starts[: rows + 1], blocks=blocks[:rows], accepted=accepted[:rows])


def packed_windows(metadata: Any) -> Packed:
    """Of a batch that GDNAttentionMetadata describes."""
    return Packed.of(
        metadata.num_spec_decodes,
        metadata.spec_query_start_loc,
        metadata.spec_state_indices_tensor,
        metadata.num_accepted_tokens,
    )


def windows_of(metadata: Any) -> slice | Tensor:
    """Which rows are windows. vLLM sorts them to the front, where they are found without an index."""
    mask = metadata.spec_sequence_masks_cpu
    n = int(mask.sum())
    return slice(n) if bool(mask[:n].all()) else mask.nonzero()[:, 0]


def tokens_of(metadata: Any) -> tuple[slice | Tensor, slice | Tensor]:
    """Where the tokens of windows lie, and all others; in front nothing has to be copied to get at them."""
    windows, rest = metadata.spec_token_indx, metadata.non_spec_token_indx
    if isinstance(windows_of(metadata), slice):
        return slice(len(windows)), slice(len(windows), len(windows) + len(rest))
    return windows.long(), rest.long()


def without_windows(metadata: Any, tokens: int) -> Any:
    """The same metadata, of the other ``tokens`` alone."""
    return replace(
        metadata,
        spec_sequence_masks=None,
        num_spec_decodes=0,
        num_spec_decode_tokens=0,
        num_accepted_tokens=None,
        num_actual_tokens=tokens,
    )


class PolicyLayer:
    """Mixed into one of vLLM's layers, in front of it; ``session`` is set when the pages are bound.

    What it does may run under capture, so nothing here reads the device.
    """

    arch: Arch
    activation: str
    prefix: str

    def serve_policy(self, vllm_config: Any) -> None:
        """Call this once vLLM's own ``__init__`` is through."""
        self.serve = resolve({}, vllm_config.additional_config, {})
        self.window: Window = self.serve.window(vllm_config.num_speculative_tokens)
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
        raise NotImplementedError

    @property
    def params(self) -> LayerParams:
        """vLLM's own tensors, so that weights that are loaded anew are seen."""
        raise NotImplementedError

    def shape(self, heads: tuple[int, int], dims: tuple[int, int], width: int, **rest: Any) -> Geometry:
        """Of (H, HV) heads on this rank and (K, V) dims, with a conv over all of q, k and v."""
        (h, hv), (k, v) = heads, dims
        _, state_dtype = self.get_state_dtype()  # type: ignore[attr-defined]
        act_dtype = self.model_config.dtype  # type: ignore[attr-defined]
        return Geometry(
            arch=self.arch,
            num_layers=1,
            num_k_heads=h,
            num_v_heads=hv,
            head_k=k,
            head_v=v,
            conv=Conv(channels=2 * h * k + hv * v, width=width),
            act_dtype=DType(str(act_dtype).removeprefix("torch.")),
            state_dtype=DType(str(state_dtype).removeprefix("torch.")),
            **rest,
        )

    @property
    def state(self) -> Tensor:
        """[pages, HV, V, K]"""
        state: Tensor = self.kv_cache[1]
        return state

    @property
    def conv(self) -> pages.ConvPages:
        conv1d = self.conv1d  # type: ignore[attr-defined]
        return pages.ConvPages(self.kv_cache[0].transpose(-1, -2), conv1d.weight.squeeze(1), conv1d.bias)

    @cached_property
    def snapshots(self) -> Verify:
        """The verify of vLLM's own policy, a page per token, through our kernels."""
        return kernels.make(self.serve.kernels(self.device_type), self.geometry, self.window).verify

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """One page per request where the policy needs no snapshots."""
        spec = super().get_kv_cache_spec(vllm_config)  # type: ignore[misc]
        return spec if self.serve.policy == "native" else replace(spec, num_speculative_blocks=0)

    def rows(self, metadata: Any, num_requests: int) -> Tensor | slice | None:
        """Which rows of the engine's batch are windows; here by the mask of vLLM's metadata, on the CPU."""
        return None if metadata.spec_sequence_masks_cpu is None else windows_of(metadata)

    def split(
        self,
        inputs: tuple[Tensor, ...],
        out: Tensor,
        ours: Callable[..., Tensor],
        theirs: Callable[..., None],
    ) -> None:
        """A batch that GDNAttentionMetadata describes: ``ours(packed, *inputs)`` of its windows and ``theirs(*inputs, out)``
        of the rest, all [tokens, ..] -> ``out`` [tokens, ..], padding behind."""
        context = compat.get_forward_context()
        metadata = (context.attn_metadata or {}).get(self.prefix)
        if metadata is None or metadata.spec_sequence_masks is None:
            theirs(*inputs, out)
            return
        packed, n = packed_windows(metadata), metadata.num_actual_tokens
        if not metadata.num_prefills:
            out[:n] = ours(packed, *(x[:n] for x in inputs))
            return
        windows, rest = tokens_of(metadata)
        out[windows] = ours(packed, *(x[windows] for x in inputs))
        others = [x[rest] for x in (*inputs, out)]
        with compat.metadata_replaced(context, self.prefix, without_windows(metadata, len(others[0]))):
            theirs(*others)
        if not isinstance(rest, slice):
            out[rest] = others[-1]

    def windows(self, packed: Packed, mixed: Tensor, a: Tensor, b: Tensor | None = None) -> Tensor:
        """Conv inputs [tokens, D] and gates [tokens, HV, ..] of all windows -> outputs [tokens, HV, V]."""
        rows, t, tokens = len(packed.blocks), self.window.max_len, len(mixed)
        mixed = self.convolved(packed, mixed)
        if tokens == rows * t:  # every window is T long, as in all captured batches
            x = self._each(lambda tensor: tensor.view(rows, t, *tensor.shape[1:]), mixed, a, b)
            return self._verified(packed, *x).flatten(0, 1)
        starts = packed.starts.long()
        at = (starts[:-1, None] + torch.arange(t, device=mixed.device)).clamp(max=tokens - 1)
        outs = self._verified(packed, *self._each(lambda tensor: tensor[at], mixed, a, b)).flatten(0, 1)
        token = torch.arange(tokens, device=mixed.device)
        row = torch.searchsorted(starts[1:], token, right=True)
        return outs[row * t + token - starts[row]]

    @staticmethod
    def _each(change: Callable[[Tensor], Tensor], mixed: Tensor, a: Tensor, b: Tensor | None) -> Any:
        return change(mixed), change(a), None if b is None else change(b)

    def convolved(self, packed: Packed, mixed: Tensor) -> Tensor:
        """vLLM's conv over packed windows; the longest it may meet is T, however many pages a row has."""
        conv = self.conv
        convolved: Tensor = compat.causal_conv1d_update(
            mixed,
            conv.pages,
            conv.weight,
            conv.bias,
            self.activation,
            conv_state_indices=packed.blocks[:, 0],
            num_accepted_tokens=packed.accepted,
            query_start_loc=packed.starts,
            max_query_len=self.window.max_len,
            validate_data=False,
        )
        return convolved

    def bound(self) -> Session:
        if self.session is None:
            raise RuntimeError(
                f"ssmspec: no session was bound to {self.prefix}; vLLM did not load our model state"
            )
        return self.session

    def _verified(self, packed: Packed, mixed: Tensor, a: Tensor, b: Tensor | None) -> Tensor:
        """Conv outputs [B, T, D], gates [B, T, HV, ..] -> outputs [B, T, HV, V]."""
        tokens = Tokens.unpack(self.geometry, mixed, a, b)
        if self.serve.policy != "native":
            return self.bound().verify(self.session_index, tokens)
        blocks = packed.blocks.long()
        start = blocks.gather(1, packed.accepted.long()[:, None] - 1)[:, 0]
        layer = Layer(params=self.params, state=self.state, read=None, records={})
        return self.snapshots(layer, tokens, start, packed.starts.long().diff(), snapshots=blocks)
