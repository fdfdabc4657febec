"""Published block sizes and capacities against what the planner computes, each with its source."""

from dataclasses import replace

from ssmspec import layout
from ssmspec.geometry import DType, Geometry, Window
from ssmspec.layout import Field, Layout
from ssmspec.measure import capacity, planner
from ssmspec.measure.capacity import Settings
from ssmspec.measure.checks import Check
from ssmspec.measure.planner import Paging
from ssmspec.model import Model
from ssmspec.presets import PRESETS

MIB = 2**20


def _fp32(name: str) -> Model:
    model = PRESETS[name]
    return replace(model, geometry=replace(model.geometry, state_dtype=DType.FP32))


SMALL, MIDDLE, LARGE = _fp32("qwen3.5-4b"), _fp32("qwen3.5-27b"), _fp32("qwen3.5-122b-a10b")
SUPER = _fp32("nemotron-3-super-120b-a12b")
NARROW = replace(SMALL, name="qwen3.5-4b with 2 KV heads", attention=replace(SMALL.attention, num_kv_heads=2))


def value_head_record(g: Geometry, tokens: int) -> Layout:
    """The record that vllm-project/vllm#58863 appended to the page: V + K + 1 fp32 a token and value head."""
    return (Field("rec_upstream", (g.num_v_heads, tokens, g.head_v + g.head_k + 1), DType.FP32),)


def _state_check() -> Check:
    parts = capacity.of("native", SMALL, Window(max_len=4), Settings(gpu_memory_gib=80, weights_gib=0)).parts
    return Check(
        name="native recurrent state of a request, qwen3.5-4b, fp32 state, T=4",
        expected=192.0,
        got=parts.recurrent_state / MIB,
        unit="MiB",
        source="24 layers x 4 states x 32 x 128 x 128 x 4 B",
        tolerance=0.0,
    )


def _block_checks() -> list[Check]:
    ours = "vLLM 0.33.0 on one H200, mode none, bf16 KV, logs 'Setting attention block size to N tokens'"
    lmcache = "LMCache's Qwen3.5 recipe: unified block size of Qwen3.6-27B on one GPU"
    comment = "jschmied, comment of 2026-09-22 on vllm-project/vllm#54076: Qwen3.8-27B-FP8 with one draft"
    rows = (
        (SMALL, 3, 544, ours),
        (SMALL, 0, 528, ours),
        (NARROW, 3, 1072, ours),
        (MIDDLE, 0, 784, lmcache),
        (MIDDLE, 1, 800, comment),
    )
    return [
        Check(
            name=f"attention block, {model.name}, fp32 state, native, K={drafts}",
            expected=expected,
            got=planner.plan("native", model, Window(max_len=1 + drafts)).block_tokens,
            unit="tokens",
            source=source,
            tolerance=0.0,
        )
        for model, drafts, expected, source in rows
    ]


def _concurrency_check() -> Check:
    drafted, plain = (planner.plan("native", SMALL, Window(max_len=t)) for t in (4, 1))
    return Check(
        name="concurrency at 4,096 tokens without drafts over native K=3, qwen3.5-4b",
        expected=613 / 289,
        got=drafted.request_bytes(4096) / plain.request_bytes(4096),
        unit="x",
        source="vLLM 0.33.0 on one H200 prints 613x and 289x",
        tolerance=0.02,
        note=f"{drafted.blocks(4096)} blocks of {drafted.width} layers against {plain.blocks(4096)} of {plain.width};"
        " the pool is taken as equal, and with drafts it is smaller by the MTP head's weights and buffers",
    )


def _growth_check() -> Check:
    window = Window(max_len=11)
    record = value_head_record(SMALL.geometry, window.max_len)
    bare = planner.plan("recover", SMALL, window).block_tokens
    return Check(
        name=f"attention block {bare} -> with #58863's record in the page, qwen3.5-4b, K=10",
        expected=656,
        got=planner.plan("recover", SMALL, window, Paging(in_page=record)).block_tokens,
        unit="tokens",
        source="vllm-project/vllm#58863: 576 -> 656 on an L40S, vLLM 0.31.0, --prefix-match-unit 16, K not stated",
        tolerance=0.0,
        note="with this record, fp32 state and bf16 KV, K=10 is the only K from 1 to 16 that gives both numbers; K=4"
        " does with 16-bit state and fp8 KV; none of K=1, 3, 5, 7, for which that work reports speeds, does",
    )


def _serving_check(model: Model, ring: int, published: tuple[int, int], source: str) -> Check:
    """Requests of 2,048 tokens that checkpointing holds over native's, B=16, T=4, with their ring in the page."""
    window, context = Window(max_len=4, ring_len=16), 2048
    records = layout.records(replace(model.geometry, record_dtype=DType.BF16), ring, durable=True)
    native = planner.plan("native", model, window)
    theirs = planner.plan("checkpointing", model, window, Paging(in_page=records))
    s = Settings(gpu_memory_gib=192, weights_gib=0, context=context)
    ours = [capacity.of(policy, model, window, s).parts.total for policy in ("native", "checkpointing")]
    blocks = native.blocks(context), theirs.blocks(context)
    return Check(
        name=f"serving capacity of checkpointing over native, {model.name}, T=4, 2,048 tokens, ring of {ring} in the page",
        expected=published[1] / published[0],
        got=native.request_bytes(context) / theirs.request_bytes(context),
        unit="x",
        source=f"{source}: {published[0]} -> {published[1]} requests on one B300",
        tolerance=0.01 * published[1] / published[0],
        note=f"{blocks[0]} blocks a request become {blocks[1]} ({blocks[0] / blocks[1]:.2f}x), each larger by"
        f" {theirs.block_bytes / native.block_bytes - 1:.1%} for a ring of 16-bit records. Our records, fp32, lie beside"
        f" the page, which stays as it is: {ours[0] / ours[1]:.2f}x where max_num_seqs is what fits",
    )


def _serving_checks() -> list[Check]:
    ported, draft = "vllm-project/vllm#49887", "vllm-project/vllm#47576, its first form"
    return [
        _serving_check(LARGE, 32, (233, 656), ported),
        _serving_check(LARGE, 16, (233, 702), draft),
        _serving_check(SUPER, 16, (213, 694), draft),
    ]


def capacity_checks() -> list[Check]:
    """Block sizes as engines printed them, and published capacities."""
    return [_state_check(), *_block_checks(), _concurrency_check(), *_serving_checks(), _growth_check()]
