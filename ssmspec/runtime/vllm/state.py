"""vLLM's per-model step logic under a policy: stage before the forward pass, commit after sampling."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ssmspec.runtime.rows import Batch
from ssmspec.runtime.vllm import compat
from ssmspec.runtime.vllm.layer import PolicyLayer
from ssmspec.runtime.vllm.rules import STREAMED
from ssmspec.runtime.vllm.session import Session


class ModelState(compat.MambaHybridModelState):  # type: ignore[misc]
    """Keeps ``num_accepted_tokens_gpu`` at 1: after a commit every page starts behind its last accepted token."""

    def __init__(self, vllm_config: Any, model: Any, encoder_cache: Any, device: torch.device) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        self.layers: dict[str, PolicyLayer] = {
            name: layer
            for name, layer in vllm_config.compilation_config.static_forward_context.items()
            if isinstance(layer, PolicyLayer)
        }
        if not self.layers:
            raise RuntimeError("ssmspec: the model has no layer of ours; vLLM did not use our model class")
        first = next(iter(self.layers.values()))
        self.session = Session(first.serve, first.geometry, first.window, self.max_num_reqs, device)
        self.first_name = next(iter(self.layers))
        self.running: set[str] = set()
        self.replaced: str | None = None  # what was just removed while it ran
        self.dummy = True  # until vLLM says that the next batch is a real one

    def remove_request(self, req_id: str) -> None:
        super().remove_request(req_id)
        self.replaced = req_id if req_id in self.running else None
        self.running.discard(req_id)

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        """A request starts or resumes; vLLM first removes any of that name. One that was still running gets more input,
        and has a state that is ahead of what vLLM counts: refused."""
        if new_req_data.req_id == self.replaced:
            raise RuntimeError(STREAMED.format(self.session.serve.policy))
        super().add_request(req_index, new_req_data)
        self.running.add(new_req_data.req_id)
        self.session.admit(req_index)

    def initialize_kv_cache(self, kv_cache_config: Any, block_tables: Any) -> None:
        """vLLM binds pages twice: first to measure its graphs, then for good."""
        super().initialize_kv_cache(kv_cache_config, block_tables)
        layers, names = list(self.layers.values()), list(self.layers)
        groups = {
            gid: [n for n in group.layer_names if n in self.layers]
            for gid, group in enumerate(kv_cache_config.kv_cache_groups)
        }
        group_ids = [gid for gid, members in groups.items() if members]
        if self._align_mode:
            block = kv_cache_config.kv_cache_groups[group_ids[0]].kv_cache_spec.block_size
            self.session.w = replace(self.session.w, align=block)
        for index, layer in enumerate(layers):
            layer.session, layer.session_index = self.session, index
        self.session.bind(
            [[names.index(n) for n in groups[gid]] for gid in group_ids],
            [block_tables.block_tables[gid].gpu for gid in group_ids],
            [layer.state for layer in layers],
            [layer.conv for layer in layers],
            [layer.records for layer in layers],
            [layer.params for layer in layers],
        )
        compat.init_logger("vllm.ssmspec").info("ssmspec: %s", self.session.describe(len(layers)))

    def capture_inner_cudagraphs(self, *args: Any, **kwargs: Any) -> None:
        """vLLM calls this once its own graphs are captured."""
        super().capture_inner_cudagraphs(*args, **kwargs)
        self.session.capture()

    def preprocess_state(self, *args: Any, **kwargs: Any) -> None:
        """vLLM calls this for real batches only."""
        super().preprocess_state(*args, **kwargs)
        self.dummy = False

    def prepare_attn(
        self, input_batch: Any, cudagraph_mode: Any, block_tables: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Also called for the drafter's graphs, whose layers are none of ours."""
        metadata = super().prepare_attn(input_batch, cudagraph_mode, block_tables, *args, **kwargs)
        if self.first_name in metadata:
            batch = self._batch(input_batch, metadata)
            if not self.dummy and self.session.lags:
                self._settle_late(input_batch, batch)
            self.session.stage(batch)
            self.dummy = True
        return metadata

    def postprocess_state(
        self, idx_mapping: Tensor, num_sampled: Tensor, num_computed_tokens: Tensor | None = None
    ) -> None:
        """Replaces vLLM's: there is no accepted offset to remember, and boundary states are written by the commit. One
        count for all rows comes from pipeline ranks alone, which are refused."""
        self.session.commit(num_sampled)

    def _batch(self, input_batch: Any, metadata: Any) -> Batch | None:
        """The speculative rows of this step; None where there are none."""
        chosen = self.layers[self.first_name].rows(metadata[self.first_name], len(input_batch.idx_mapping))
        if chosen is None:
            return None
        tails = input_batch.prefill_runs_as_decode_np
        told = None if tails is None else torch.from_numpy(tails)[chosen]
        return Batch(
            rows=chosen if isinstance(chosen, slice) else self._sent(chosen),
            count=chosen.stop if isinstance(chosen, slice) else len(chosen),
            requests=input_batch.idx_mapping,
            starts=input_batch.query_start_loc,
            ends=input_batch.seq_lens,
            settle=self._sent(told) if told is not None and told.any() else None,
            dummy=self.dummy,
        )

    def _settle_late(self, input_batch: Any, batch: Batch | None) -> None:
        """Make pages exact that vLLM's prompt kernels are about to read.

        Mamba2's windows end at the first prompt of a batch. A request without drafts behind a prompt chunk of the same
        length runs as a prompt of one token.
        """
        if batch is not None and not isinstance(batch.rows, slice):
            return
        first = 0 if batch is None else batch.count
        late = (~input_batch.is_prefilling_np[first:]).nonzero()[0] + first
        if len(late):
            rows = Batch(
                rows=self._sent(torch.from_numpy(late)),
                count=len(late),
                requests=input_batch.idx_mapping,
                starts=input_batch.query_start_loc,
                ends=input_batch.seq_lens,
            )
            self.session.rows.stage(rows)
            self.session.policy.settle(self.session.rows.step(rows.count).slots)

    def _sent(self, x: Tensor) -> Tensor:
        """On the device, without waiting for it."""
        if self.device.type == "cpu":
            return x
        return x.pin_memory().to(self.device, non_blocking=True)
