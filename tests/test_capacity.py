"""Requests that fit follow from the plan and the layout; every limit says that it binds. Ids such as J1 name kinds of
faults seen elsewhere."""

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import nemotron, qwen

from ssmspec import layout
from ssmspec.geometry import DType, Window
from ssmspec.measure import capacity
from ssmspec.measure.capacity import GIB, CapacityResult, Limit, Settings
from ssmspec.measure.capacity_checks import capacity_checks
from ssmspec.measure.planner import CacheMode, plan

ALIGN = CacheMode.ALIGN
MIB = 2**20
K3 = Window(max_len=4)
H200 = Settings(gpu_memory_gib=140)


def pool_of(nbytes: int, **more: object) -> Settings:
    """A GPU with exactly that many bytes for caches and records."""
    return Settings(gpu_memory_gib=nbytes / GIB, gpu_utilization=1, weights_gib=0, **more)  # type: ignore[arg-type]


def of(policy: str, settings: Settings = H200, window: Window = K3) -> CapacityResult:
    return capacity.of(policy, qwen(), window, settings)


def test_every_published_number_is_met_within_its_tolerance() -> None:
    checks = capacity_checks()
    assert [c.name for c in checks if not c.ok] == []
    assert all(c.source for c in checks)
    expected = [c.expected for c in checks]
    assert expected == [192, 544, 528, 1072, 784, 800, 613 / 289, 656 / 233, 702 / 233, 694 / 213, 656]
    assert all(c.tolerance <= 0.011 * c.expected for c in checks)


def test_native_parts_by_hand() -> None:
    """24 layers: 1 + 3 states of 2 MiB, 4 conv windows of 8,192 x 6 x 2 B; 9 KV layers (one drafts) of 4,096 B a token.
    20 blocks of 9 layers x 2,228,224 B; 3 x 4 of the 9-layer blocks serve only 8 layers."""
    parts = of("native").parts
    assert parts.checkpoint == 48 * MIB
    assert parts.snapshots == 144 * MIB
    assert parts.recurrent_state == 192 * MIB
    assert parts.conv == 24 * 4 * 98_304
    assert (parts.records, parts.cursors) == (0, 4)
    assert parts.kv == 9 * 4096 * 4096
    assert parts.total == 20 * 9 * 2_228_224 + 4
    unused_layers, page_tail, kv_tail = 12 * 2_228_224, 24 * 4 * 32_768, 9 * (8 * 544 - 4096) * 4096
    assert parts.padding == unused_layers + page_tail + kv_tail


def test_record_policies_keep_one_state_and_their_layout() -> None:
    """J4: bytes per request split by what they are for; records and cursors are layout's own."""
    for policy in ("recover", "every-step", "checkpointing"):
        parts = of(policy).parts
        fields = layout.of(policy, qwen().geometry, K3)
        assert (parts.checkpoint, parts.snapshots) == (48 * MIB, 0)
        assert parts.records == 24 * sum(f.nbytes for f in fields if f.name.startswith("rec_"))
        assert parts.cursors == sum(f.nbytes for f in fields if f.shared)
        assert parts.total == 11 * 9 * 2_228_224 + of(policy).slot_bytes
    assert (
        of("checkpointing").slot_bytes == 24 * 20 * 20_672 + 8
    )  # 82,688 B for 4 tokens; L + T = 20; two cursors


def test_the_page_of_a_known_deployment_splits_as_reported() -> None:
    """J4 (vllm-project/vllm#55533): 48 layers of 3.25 MiB, K=3. Six pages a layer with prefix caching."""
    model = qwen(layers=48, value_heads=48, kv_layers=16)
    r = capacity.of("native", model, K3, replace(H200, cache_mode=ALIGN))
    assert r.plan.padded_bytes == 3.25 * MIB
    assert (r.parts.checkpoint, r.parts.snapshots) == (48 * 3 * MIB, 5 * 48 * 3 * MIB)
    assert (
        r.parts.total == 3 * 6 * 17 * 3.25 * MIB + 5 * 17 * 3.25 * MIB + 4
    )  # 4,096 tokens are 5 blocks of 832


def test_prefix_caching_keeps_a_state_at_the_boundary_under_every_policy() -> None:
    s = replace(H200, cache_mode=ALIGN, prefill_grid=0)
    assert of("recover", s).parts.snapshots == 48 * MIB
    assert of("native", s).parts.snapshots == (3 + 1) * 48 * MIB


def test_dead_records_of_boundary_pages_are_padding() -> None:
    """F9: with records in the page every boundary state drags a ring along."""
    inside = of("checkpointing", replace(H200, cache_mode=ALIGN, prefill_grid=0, records_in_page=True))
    outside = of("checkpointing", replace(H200, cache_mode=ALIGN, prefill_grid=0))
    assert inside.parts.records == outside.parts.records
    assert inside.parts.padding >= outside.parts.padding + outside.parts.records
    assert inside.slot_bytes == 8


def test_the_read_copy_is_part_of_the_checkpoint() -> None:
    model = replace(qwen(), geometry=replace(qwen().geometry, read_dtype=DType.FP16))
    r = capacity.of("checkpointing", model, K3, H200)
    assert r.parts.checkpoint == 24 * (2 + 1) * MIB


def test_ring_bytes_are_in_the_budget() -> None:
    """J7 (sgl-project/sglang#28451): a budget that its states and KV fill exactly holds fewer requests with a ring."""
    p = plan("checkpointing", qwen(), K3)
    full = 10 * p.request_bytes(4096) + p.block_bytes  # and the null block
    r = of("checkpointing", pool_of(full))
    assert (r.requests, r.limit) == (9, Limit.MEMORY)
    assert of("checkpointing", pool_of(full + 10 * r.slot_bytes)).requests == 10
    assert of("checkpointing", pool_of(full + 10 * r.slot_bytes - 1)).requests == 9
    assert of("checkpointing", pool_of(p.request_bytes(4096))).requests == 0
    assert (
        of(
            "native", pool_of(10 * plan("native", qwen(), K3).request_bytes(4096) + 40, max_num_seqs=10)
        ).requests
        == 9
    )


def test_records_are_reserved_for_max_num_seqs_whatever_the_load() -> None:
    few, many = (of("checkpointing", replace(H200, max_num_seqs=n)) for n in (64, 512))
    assert many.slots == 512
    assert (few.num_blocks - many.num_blocks) * few.plan.block_bytes == pytest.approx(
        448 * few.slot_bytes, abs=few.plan.block_bytes
    )


def test_the_binding_limit_is_named() -> None:
    assert of("native", replace(H200, max_num_seqs=64)).limit is Limit.MAX_NUM_SEQS
    assert of("native", replace(H200, max_num_seqs=64)).requests == 64
    assert of("native").limit is Limit.MEMORY
    assert of("native", replace(H200, max_num_seqs=1000)).limit is Limit.MEMORY


def test_more_sequences_than_state_blocks_are_refused_with_the_largest_legal_number() -> None:
    """J1 (vllm-project/vllm#49064, #34094): FULL graphs need max_num_seqs <= num_blocks; 983 blocks were seen on one GPU.
    The error text of config/compilation.py:1516-1532 names the same number."""
    block = plan("native", qwen(), K3).block_bytes
    r = of("native", pool_of(984 * block - 1, max_num_seqs=1024))
    assert (r.num_blocks, r.limit, r.largest_max_num_seqs) == (983, Limit.STATE_BLOCKS, 983)
    assert "max_num_seqs=1024 exceeds 983 blocks; at most 983" in r.explain()


@given(
    nbytes=st.integers(10**9, 2 * 10**11),
    policy=st.sampled_from(layout.POLICY_NAMES),
    in_page=st.booleans(),
)
def test_the_largest_legal_number_is_the_largest(nbytes: int, policy: str, in_page: bool) -> None:
    """J1: at the number that is printed FULL graphs start, and at one more they do not."""
    s = pool_of(nbytes, records_in_page=in_page)
    largest = of(policy, s).largest_max_num_seqs
    if largest:
        assert of(policy, replace(s, max_num_seqs=largest)).limit is not Limit.STATE_BLOCKS
    assert of(policy, replace(s, max_num_seqs=largest + 1)).limit is Limit.STATE_BLOCKS


@given(
    nbytes=st.integers(10**9, 2 * 10**11),
    policy=st.sampled_from(layout.POLICY_NAMES),
    in_page=st.booleans(),
    mode=st.sampled_from(CacheMode),
)
def test_what_fits_fits_and_one_more_does_not(
    nbytes: int, policy: str, in_page: bool, mode: CacheMode
) -> None:
    r = of(policy, pool_of(nbytes, records_in_page=in_page, cache_mode=mode))
    assert r.parts.total == r.plan.request_bytes(4096) + r.slot_bytes
    assert r.parts.padding >= 0
    assert r.slots == r.requests
    taken = r.requests * r.parts.total + r.plan.block_bytes  # and the null block
    assert taken <= r.budget < taken + r.parts.total or r.requests == 0


def test_the_formula_is_printed_with_its_numbers() -> None:
    """J12 (kaito-project/kaito#2052, vllm-project/vllm#37429)."""
    text = of("native", replace(H200, max_num_seqs=256)).explain()
    for step in (
        "conv [8192, 6] bfloat16 98,304 + state [32, 128, 128] float32 2,097,152 = 2,195,456 B",
        "16 tokens x ceil(2,195,456 / (16 x 4,096 B of KV)) = 544 tokens = 2,228,224 B a page (1.49% padding)",
        "256 slots x 4 B",
        "(9 layers x 2,228,224 B)",
        "1 x ceil(4,096 / 544) KV + 3 x 4 state = 20 blocks",
        "256 requests (max_num_seqs binds;",
    ):
        assert step in text


def test_concurrency_is_vllms_own_figure() -> None:
    """num_blocks / blocks per request, the null block included (v1/core/kv_cache_utils.py:1061-1093)."""
    p = plan("native", qwen(), K3)
    assert of("native", pool_of(30 * p.block_bytes + 100)).concurrency == 1.5


def test_unknown_weights_are_said_to_be_counted_as_nothing() -> None:
    r = capacity.of("recover", nemotron(), K3, H200)
    assert r.notes == ("weights of nemotron unknown, counted as 0: pass --weights-gib",)
    assert r.notes[0] in r.explain()
    assert capacity.of("recover", nemotron(), K3, replace(H200, weights_gib=15)).notes == ()


def test_weights_are_shared_by_the_ranks() -> None:
    one, two = (of("native", replace(H200, weights_gib=20, tp=tp)) for tp in (1, 2))
    assert two.budget - one.budget == 10 * GIB
    assert two.parts.recurrent_state == one.parts.recurrent_state // 2


def test_reuse_is_split_into_what_drafting_and_the_page_cost() -> None:
    """F8, F9: without drafts the block is 576 tokens on the grid of 64 (2,146,304 B are 524), with the ring in the page
    640 (2,608,896 B are 636.9), with the ring beside it 576 still (2,195,456 B are 536)."""
    beside = replace(H200, cache_mode=ALIGN)
    r = capacity.reuse("checkpointing", qwen(), K3, replace(beside, records_in_page=True), 2500)
    assert (r.tokens, r.lost_to_drafting, r.lost_to_page) == (1280, 640, 2304 - 1920)
    r = capacity.reuse("checkpointing", qwen(), K3, beside, 2500)
    assert (r.tokens, r.lost_to_drafting, r.lost_to_page) == (1728, 576, 0)
    r = capacity.reuse(
        "checkpointing", qwen(), K3, beside, 2500, drafting=False
    )  # n-gram drafts read no hidden state
    assert (r.tokens, r.lost_to_drafting) == (2304, 0)


@pytest.mark.parametrize(("weights", "tp", "least"), [(200, 1, 2), (500, 1, 4), (500, 2, 4), (3000, 1, None)])
def test_weights_that_do_not_fit_name_the_fewest_ranks_that_hold_them(
    weights: float, tp: int, least: int | None
) -> None:
    """126 GiB may be used; H=16 and HV=32 heads are shared by 1, 2, 4, 8 or 16 ranks, whose share of 3000 is 187.5."""
    with pytest.raises(capacity.DoesNotFit) as refused:
        of("native", replace(H200, weights_gib=weights, tp=tp))
    said = str(refused.value)
    assert f"(tp={tp})" in said
    if least is None:
        assert "needs tp" not in said
    else:
        assert said.endswith(f"; or it needs tp={least} or more (the smallest legal)")
        of("native", replace(H200, weights_gib=weights, tp=least))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"gpu_memory_gib": 8},
            r"gpu_memory_gib=8 x gpu_utilization=0.9 = 7.20 GiB does not hold 8.00 GiB of weights",
        ),
        ({"weights_gib": 200.0}, r"does not hold 200.00 GiB .* gpu_memory_gib is above 222.22"),
        ({"gpu_utilization": 1.5}, r"gpu_utilization=1.5 is not within 0..1"),
        ({"overhead_gib": -1}, r"overhead_gib=-1 must not be negative"),
        ({"context": 0}, r"context=0 must be positive"),
        ({"max_num_seqs": 0}, r"max_num_seqs=0 must be positive"),
        ({"max_num_seqs": 50_000}, r"max_num_seqs=50000 reserves .* the nearest legal value is \d+"),
        ({"tp": 0}, r"tp=0 must be at least 1"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_numbers(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        of("checkpointing", replace(H200, **change))  # type: ignore[arg-type]


def test_a_context_beyond_the_models_is_refused() -> None:
    model = replace(qwen(), max_context=2048)
    with pytest.raises(
        ValueError, match=r"context=4096 exceeds the max_context=2048 of qwen; .* value is 2048"
    ):
        capacity.of("native", model, K3, H200)


def test_capacity_leaves_torch_unimported() -> None:
    code = (
        "import sys; from ssmspec.measure import capacity, capacity_checks; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
