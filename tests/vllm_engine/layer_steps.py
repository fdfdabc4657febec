"""Plays windows through one recurrent layer of the CUDA build of vLLM, on a CPU: its layer, metadata builder and kernels
under Triton's interpreter, or ours in their place. Run as a script; writes the outputs.

Only the conv is a reference in torch, since the interpreter does not run vLLM's.
"""

import importlib
import json
import os
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from layer_families import FAMILIES, LAYER
from torch import Tensor

os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
REQUESTS, T = 3, 4


def conv_update(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any, **how: Any
) -> Tensor:
    """As vLLM's causal_conv1d_update: reads behind the accepted inputs, keeps the window's own behind one fewer."""
    history, starts = weight.shape[1] - 1, how["query_start_loc"].tolist()
    assert how["max_query_len"] == T
    out = how.get("out", x)
    for i, block in enumerate(how["conv_state_indices"].view(len(starts) - 1, -1)[:, 0].tolist()):
        first, last, at = starts[i], starts[i + 1], int(how["num_accepted_tokens"][i]) - 1
        if block <= 0 or first == last:
            continue
        seen = torch.cat([state[block, :, at : at + history], x[first:last].T], 1)
        mixed = torch.nn.functional.conv1d(
            seen[None].float(),
            weight[:, None].float(),
            None if bias is None else bias.float(),
            groups=len(seen),
        )[0]
        out[first:last] = torch.nn.functional.silu(mixed).T.to(x.dtype)
        state[block, :, : seen.shape[1] - 1] = seen[:, 1:]
    return out


def stock_module(name: str) -> Any:
    """The module of vLLM's layer as it is on CUDA: on a CPU it would take other kernels."""
    import vllm.platforms

    platform = type(vllm.platforms.current_platform)
    is_cpu, platform.is_cpu = platform.is_cpu, lambda self: False
    module = importlib.import_module(f"vllm.model_executor.layers.mamba.{name}")
    conv = importlib.import_module("vllm.model_executor.layers.mamba.ops.causal_conv1d")
    platform.is_cpu = is_cpu
    conv.causal_conv1d_update = module.causal_conv1d_update = conv_update
    return module


def engine_config(model: str, policy: str, method: str, mode: str) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    from ssmspec.runtime.vllm import compat, config, refusals

    compat.DEVICES["0.33.0"], refusals.ON_DEVICE["cpu"] = "cpu", ()
    config.BEST["cpu"] = "triton"
    asked = {"policy": policy, "mode": mode, "backend": "triton" if policy == "native" else "engine"}
    return EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        max_model_len=768,
        max_num_seqs=REQUESTS,
        max_num_batched_tokens=192,
        enforce_eager=True,
        enable_prefix_caching=False,
        speculative_config={"method": method, "num_speculative_tokens": T - 1},
        additional_config={"gdn_prefill_backend": "triton"}
        | ({} if policy == "stock" else {"ssmspec": asked}),
    ).create_engine_config()


@dataclass(frozen=True, kw_only=True)
class Rows:
    """One batch of windows."""

    requests: list[int]
    lens: list[int]
    computed: list[int]
    accepted: list[int]  # of the windows before
    prompt: int | None = None  # which of the rows is one, at most

    def windows(self) -> "Rows":
        """The others."""
        kept = [i for i in range(len(self.lens)) if i != self.prompt]
        fields = {n: getattr(self, n) for n in ("requests", "lens", "computed", "accepted")}
        return Rows(**{name: [field[i] for i in kept] for name, field in fields.items()})

    @property
    def ends(self) -> list[int]:
        return [c + n for c, n in zip(self.computed, self.lens, strict=True)]


class Layer:
    """One layer with pages, its metadata builder, and, under a policy, the session beside it."""

    def __init__(self, config: Any, policy: str, family: str, kind: str) -> None:
        from ssmspec.runtime.vllm.session import Session

        self.config, self.policy, self.staged = config, policy, kind in ("staged", "gated", "fast")
        self.behind = kind == "behind"
        self.family = FAMILIES[family]
        module = stock_module(self.family.module)
        torch.set_default_dtype(torch.bfloat16)
        layer = self.layer = self.family.make(module, config, policy == "stock", kind in ("gated", "fast"))
        torch.set_default_dtype(torch.float32)
        config.cache_config.mamba_block_size = 2048
        spec = layer.get_kv_cache_spec(config)
        self.builder = self.family.builder()(spec, [LAYER], config, torch.device("cpu"))
        self.family.stage_for_graphs(self.builder, self.staged)
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

    def step(self, rows: Rows) -> Tensor:
        """The windows' outputs; where metadata is staged for a graph, padded by a null row."""
        from vllm.forward_context import set_forward_context

        pad = int(self.staged)
        tokens, batch = sum(rows.lens) + pad * T, len(rows.requests) + pad
        offsets = [1] * len(rows.requests) if self.session else rows.accepted
        metadata = self.builder.build(
            0,
            self._common(rows, tokens, pad),
            num_accepted_tokens=torch.tensor([*offsets, *[1] * pad]).int(),
            num_decode_draft_tokens_cpu=torch.tensor(
                [*(-1 if i == rows.prompt else n - 1 for i, n in enumerate(rows.lens)), *[-1] * pad]
            ).int(),
        )
        if self.staged:  # a graph was captured with this many
            self.family.widen(metadata, batch)
        self._stage(rows.windows(), batch - (rows.prompt is not None))
        with set_forward_context({LAYER: metadata}, self.config, num_tokens=tokens):
            return self.family.play(self.layer, tokens)[: sum(rows.lens)]

    def _common(self, rows: Rows, tokens: int, pad: int) -> Any:
        from vllm.v1.attention.backend import CommonAttentionMetadata

        starts = torch.tensor([0, *rows.lens, *[0] * pad]).cumsum(0).int()
        ends = torch.tensor([*rows.ends, *[0] * pad]).int()
        batch = len(rows.requests) + pad
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=ends,
            seq_lens_cpu_upper_bound=ends,
            max_seq_len=768,
            num_reqs=batch,
            num_actual_tokens=tokens,
            max_query_len=max(T, *rows.lens),
            block_table_tensor=torch.cat(
                [self.table[rows.requests], self.table.new_zeros(pad, self.table.shape[1])]
            ),
            slot_mapping=torch.zeros(tokens, dtype=torch.int64),
            causal=True,
            is_prefilling=torch.arange(batch) == (-1 if rows.prompt is None else rows.prompt),
        )

    def _stage(self, rows: Rows, batch: int) -> None:
        from ssmspec.runtime.rows import Batch

        if self.session:
            self.session.stage(
                Batch(
                    rows=slice(len(rows.requests)),
                    count=len(rows.requests),
                    requests=torch.tensor(rows.requests),
                    starts=torch.tensor([0, *rows.lens]).cumsum(0),
                    ends=torch.tensor(rows.ends),
                )
            )
            self.sent, self.session.staged = self.session.staged, SimpleNamespace(count=batch)  # type: ignore[assignment]

    def mixed_step(self, rows: Rows, prompt: int) -> Tensor:
        """The windows' outputs in a batch where a prompt's chunk of that many tokens stands before one of them, or behind;
        the chunk's must be what vLLM's own method makes of its tokens."""
        at = self.family.mix(self.layer)
        if self.behind:
            at = len(rows.lens)
        before = sum(rows.lens[:at])

        def put(into: list[int], value: int) -> list[int]:
            return [*into[:at], value, *into[at:]]

        mixed = Rows(
            requests=put(rows.requests, REQUESTS - 1),
            lens=put(rows.lens, prompt),
            computed=put(rows.computed, 10),
            accepted=put(rows.accepted, 1),
            prompt=at,
        )
        outs = self.step(mixed)
        chunk = slice(before, before + prompt)
        played = self.layer.played(*self.layer.inputs).reshape(outs.shape)
        assert torch.equal(outs[chunk], played[chunk])
        return torch.cat([outs[:before], outs[before + prompt :]])

    def accept(self, counts: list[int]) -> None:
        if self.session:
            self.session.staged = self.sent
            self.session.commit(torch.tensor(counts))


def main(folder: Path, family: str, policy: str, kind: str, steps: int) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    mode = "fast" if kind == "fast" else "exact"
    config = engine_config(str(folder), policy, FAMILIES[family].drafting, mode)
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/{policy}.{kind}.store", 0, "gloo")
        initialize_model_parallel(1, 1)
        torch.manual_seed(0)
        layer, rng = Layer(config, policy, family, kind), random.Random(0)
        computed, accepted, outs = [10] * REQUESTS, [1] * REQUESTS, []
        for step in range(steps):
            torch.manual_seed(step)
            mixed = kind in ("mixed", "behind")  # the last request is a prompt there
            rows = [0, 1] if mixed else rng.sample(range(REQUESTS), rng.randint(1, REQUESTS))
            lens = [T if layer.staged else rng.randint(1, T) for _ in rows]
            sent = Rows(
                requests=rows,
                lens=lens,
                computed=[computed[r] for r in rows],
                accepted=[accepted[r] for r in rows],
            )
            outs.append(layer.mixed_step(sent, 5 + step) if mixed else layer.step(sent))
            counts = [rng.randint(1, n) for n in lens]
            layer.accept(counts)
            for r, n in zip(rows, counts, strict=True):
                computed[r], accepted[r] = computed[r] + n, n
    result = {"layer": type(layer.layer).__name__, "outs": [out.float().tolist() for out in outs]}
    (folder / f"{policy}.{kind}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))
