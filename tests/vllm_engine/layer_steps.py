"""Plays windows through one Gated DeltaNet layer of the CUDA build of vLLM, on a CPU: its layer, metadata builder and kernels
under Triton's interpreter, or ours in their place. Run as a script; writes the outputs.

Only the conv is a reference in torch, since the interpreter does not run vLLM's.
"""

import json
import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
REQUESTS, T = 3, 4


def conv_update(x: Tensor, state: Tensor, weight: Tensor, *rest: Any, **how: Any) -> Tensor:
    """As vLLM's causal_conv1d_update: reads behind the accepted inputs, keeps the window's own behind one fewer."""
    history, starts = weight.shape[1] - 1, how["query_start_loc"].tolist()
    assert how["max_query_len"] == T
    for i, block in enumerate(how["conv_state_indices"].tolist()):
        first, last, at = starts[i], starts[i + 1], int(how["num_accepted_tokens"][i]) - 1
        if block <= 0 or first == last:
            continue
        seen = torch.cat([state[block, :, at : at + history], x[first:last].T], 1)
        mixed = torch.nn.functional.conv1d(seen[None].float(), weight[:, None].float(), groups=len(seen))[0]
        x[first:last] = torch.nn.functional.silu(mixed).T.to(x.dtype)
        state[block, :, : seen.shape[1] - 1] = seen[:, 1:]
    return x


def stock_modules() -> tuple[Any, Any]:
    """vLLM's conv and layer as they are on CUDA: on a CPU its module would take other kernels."""
    import vllm.platforms

    platform = type(vllm.platforms.current_platform)
    is_cpu, platform.is_cpu = platform.is_cpu, lambda self: False
    import vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn as layer
    import vllm.model_executor.layers.mamba.ops.causal_conv1d as conv

    platform.is_cpu = is_cpu
    conv.causal_conv1d_update = layer.causal_conv1d_update = conv_update
    return conv, layer


def engine_config(model: str, policy: str) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    from ssmspec.runtime.vllm import compat, config

    compat.DEVICES["0.33.0"] = "cpu"
    config.BEST["cpu"] = "triton"
    asked = {"policy": policy, "backend": "triton" if policy == "native" else "engine"}
    return EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        max_model_len=768,
        max_num_seqs=REQUESTS,
        max_num_batched_tokens=192,
        enforce_eager=True,
        enable_prefix_caching=False,
        speculative_config={"method": "mtp", "num_speculative_tokens": T - 1},
        additional_config={"gdn_prefill_backend": "triton"}
        | ({} if policy == "stock" else {"ssmspec": asked}),
    ).create_engine_config()


class Layer:
    """One layer with pages, its metadata builder, and, under a policy, the session beside it."""

    def __init__(self, config: Any, policy: str, kind: str, stock: Any) -> None:
        from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder

        from ssmspec.runtime.vllm.layer import GatedDeltaNet
        from ssmspec.runtime.vllm.session import Session

        staged, self.gated = kind != "ragged", kind == "gated"
        self.config, self.policy, self.staged = config, policy, staged
        make = stock.QwenGatedDeltaNetAttention if policy == "stock" else GatedDeltaNet
        torch.set_default_dtype(torch.bfloat16)
        layer = self.layer = make(config.model_config.hf_text_config, config, prefix="layers.0")
        torch.set_default_dtype(torch.float32)
        layer.device_type = "cuda"
        if self.gated:  # as where vLLM's fused kernel is built; the norm is left out, the gate is 2
            layer.gdn_decode_kernel, stock.supports_fused_mtp_decode = "cuda", lambda: True
            layer._rms_norm_gated_cuda = lambda x, gate, out: out.copy_(x * gate)
        layer.A_log.data.uniform_(-4, -1)
        layer.dt_bias.data.uniform_(-2, 0)
        layer.conv1d.weight.data.normal_(0, 0.3)
        config.cache_config.mamba_block_size = 2048
        spec = layer.get_kv_cache_spec(config)
        self.builder = GDNAttentionMetadataBuilder(spec, ["layers.0"], config, torch.device("cpu"))
        self.builder.use_full_cuda_graph = staged
        pages = 1 + spec.num_speculative_blocks
        self.table = torch.arange(1, 1 + REQUESTS * pages, dtype=torch.int32).view(REQUESTS, pages)
        raw = torch.zeros(1 + REQUESTS * pages, 1, 1, spec.page_size_bytes, dtype=torch.int8)
        layer.bind_kv_cache(raw)
        for r in range(REQUESTS):
            for state in layer.kv_cache:
                state[1 + r * pages] = torch.randn(state.shape[1:]) * 0.1
        self.session = None
        if policy not in ("stock", "native"):
            self.session = Session(layer.serve, layer.geometry, layer.window, REQUESTS, torch.device("cpu"))
            layer.session, layer.session_index = self.session, 0
            self.session.bind(
                [[0]], [self.table], [layer.state], [layer.conv], [layer.records], [layer.params]
            )

    def step(self, rows: list[int], lens: list[int], computed: list[int], accepted: list[int]) -> Tensor:
        """One batch of windows; where metadata is staged for a graph, padded by a null row."""
        from vllm.forward_context import set_forward_context
        from vllm.v1.attention.backend import CommonAttentionMetadata

        pad, layer = int(self.staged), self.layer
        starts = torch.tensor([0, *lens, *[0] * pad]).cumsum(0).int()
        ends = torch.tensor([c + n for c, n in zip(computed, lens, strict=True)] + [0] * pad).int()
        tokens, batch = sum(lens) + pad * T, len(rows) + pad
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=ends,
            seq_lens_cpu_upper_bound=ends,
            max_seq_len=768,
            num_reqs=batch,
            num_actual_tokens=tokens,
            max_query_len=T,
            block_table_tensor=torch.cat([self.table[rows], self.table.new_zeros(pad, self.table.shape[1])]),
            slot_mapping=torch.zeros(tokens, dtype=torch.int64),
            causal=True,
            is_prefilling=torch.zeros(batch, dtype=torch.bool),
        )
        offsets = [1] * len(rows) if self.session else accepted
        metadata = self.builder.build(
            0,
            common,
            num_accepted_tokens=torch.tensor([*offsets, *[1] * pad]).int(),
            num_decode_draft_tokens_cpu=torch.tensor([*(n - 1 for n in lens), *[-1] * pad]).int(),
        )
        if self.staged:  # a graph was captured with this many
            metadata.num_spec_decodes = batch
        self._stage(rows, lens, computed, batch)
        inputs = torch.randn(tokens, layer.conv_dim + 64).bfloat16()[
            :, : layer.conv_dim
        ]  # a view, as in the model
        b, a = torch.randn(2, tokens, layer.num_v_heads).bfloat16()
        out = torch.zeros(tokens, layer.num_v_heads, layer.head_v_dim).bfloat16()
        with set_forward_context({"layers.0": metadata}, self.config, num_tokens=tokens):
            if self.gated:
                layer._forward_core_fused_norm(inputs, b, a, out + 2, out)
            else:
                layer._forward_core(inputs, b, a, out)
        return out[: sum(lens)]

    def _stage(self, rows: list[int], lens: list[int], computed: list[int], batch: int) -> None:
        from ssmspec.runtime.vllm.rows import Batch

        if self.session:
            ends = [c + n for c, n in zip(computed, lens, strict=True)]
            self.session.stage(
                Batch(
                    rows=slice(len(rows)),
                    count=len(rows),
                    requests=torch.tensor(rows),
                    starts=torch.tensor([0, *lens]).cumsum(0),
                    ends=torch.tensor(ends),
                )
            )
            self.sent, self.session.staged = self.session.staged, SimpleNamespace(count=batch)  # type: ignore[assignment]

    def accept(self, counts: list[int]) -> None:
        if self.session:
            self.session.staged = self.sent
            self.session.commit(torch.tensor(counts))


def main(folder: Path, policy: str, kind: str, steps: int) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    _, stock = stock_modules()
    config = engine_config(str(folder), policy)
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/{policy}.{kind}.store", 0, "gloo")
        initialize_model_parallel(1, 1)
        torch.manual_seed(0)
        layer, rng = Layer(config, policy, kind, stock), random.Random(0)
        computed, accepted, outs = [10] * REQUESTS, [1] * REQUESTS, []
        for step in range(steps):
            torch.manual_seed(step)
            rows = rng.sample(range(REQUESTS), rng.randint(1, REQUESTS))
            lens = [rng.randint(1, T) if kind == "ragged" else T for _ in rows]
            outs.append(layer.step(rows, lens, [computed[r] for r in rows], [accepted[r] for r in rows]))
            counts = [rng.randint(1, n) for n in lens]
            layer.accept(counts)
            for r, n in zip(rows, counts, strict=True):
                computed[r], accepted[r] = computed[r] + n, n
    result = {"layer": type(layer.layer).__name__, "outs": [out.float().tolist() for out in outs]}
    (folder / f"{policy}.{kind}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
