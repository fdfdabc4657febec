"""D: padding rows, null slots, dummy runs: they change nothing, and compute zeros."""

import pytest
import torch
from models import qwen
from rig import Rig, W, engine, every_policy, every_recurrence, shape

from ssmspec.geometry import Arch
from ssmspec.measure import capacity
from ssmspec.pool import NULL_SLOT
from ssmspec.runtime import events as ev
from ssmspec.runtime.slots import Slots
from ssmspec.step import Step

Rows = list[tuple[int, list[int]]]


def padded(policy: str, null: tuple[int, ...], backend: str, poison: int = 0xFF) -> tuple[Rig, torch.Tensor]:
    """Live rows in slots 1 and 3 of a pool with others, and padding -> the rig and the outputs of two steps."""
    rig = Rig(policy, backend=backend, poison=poison).start(1, 3, 5)
    outs = []
    for counts in ([2, 3], [4, 1]):
        rows: Rows = [(1, rig.ids(4)), (3, rig.ids(4)), *((s, []) for s in null)]
        step, out = rig.verify(rows)
        rig.accept(step, counts)
        outs.append(out)
    return rig, torch.cat(outs, 1)


@every_policy
def test_padding_touches_no_slot(policy: str, backend: str) -> None:
    """D1 (lightseekorg/tokenspeed#700): -1 is not clamped to a slot that somebody holds. Slot 0 is nobody's."""
    rig, _ = padded(policy, (-1, -1), backend)
    plain, _ = padded(policy, (), backend)
    live = range(1, rig.pool.num_slots)
    assert torch.equal(rig.bytes(*live), plain.bytes(*live))
    slots = Slots(12)
    assert NULL_SLOT not in [slots.take() for _ in range(slots.free)]


@every_policy
def test_both_ways_to_write_the_null_slot_are_one(policy: str, backend: str) -> None:
    """D2 (flashinfer-ai/flashinfer#2810, #2793, vllm-project/vllm#33937, sgl-project/sglang#21558, #27601)."""
    zero, zero_out = padded(policy, (0, 0), backend)
    minus, minus_out = padded(policy, (-1, -1), backend)
    assert torch.equal(zero_out, minus_out)
    live = range(1, zero.pool.num_slots)
    assert torch.equal(zero.bytes(*live), minus.bytes(*live))


@every_policy
@pytest.mark.parametrize("poison", [0xFF, 0x3E])
def test_padding_rows_compute_zeros_and_disturb_no_row(policy: str, poison: int, backend: str) -> None:
    """D3 (sglang#30974, local-inference-lab/vllm#621): five padding rows with NaN inputs, in a NaN pool."""
    plain, out = padded(policy, (), backend, poison)
    rig, padded_out = padded(policy, (0, -1, 0, -1, -1), backend, poison)
    live = [0, 1, 7, 8]
    assert torch.equal(padded_out[:, live], out)
    assert not padded_out[:, [b for b in range(14) if b not in live]].any()
    assert torch.equal(rig.bytes(*range(1, 12)), plain.bytes(*range(1, 12)))


@every_policy
def test_a_null_row_that_still_carries_tokens_is_skipped(policy: str, backend: str) -> None:
    """D4 (test_recoverssm_gdn_fused.py::test_graph_padding_rows_are_skipped, vllm-project/vllm#59366).

    Windows of 4, 2, 3, the first on the null slot; slots are a strided column among columns of -7.
    """
    outs = {}
    for null in (False, True):
        rig = Rig(policy, backend=backend).start(1, 2, 3)
        table = torch.full((5, 4), -7)
        table[:, 0] = torch.tensor([NULL_SLOT if null else 1, 2, 3, 0, -1])
        step = Step.empty(5, 4)
        step = Step(**{**vars(step), "slots": table[:, 0], "next_slots": table[:, 0].clone()})
        step.lens.copy_(torch.tensor([4, 2, 3, 0, 0]))
        step.accepted.copy_(torch.tensor([4, 1, 2, 0, 0]))
        rows = [(s, rig.ids(n)) for s, n in zip(table[:, 0].tolist(), (4, 2, 3, 0, 0), strict=True)]
        _, outs[null] = rig.verify(rows, step)
        commit = step.close()
        rig.conv.accept(commit)
        rig.policy.accept(commit)
        rig.tokens |= {2: rows[1][1][:1], 3: rows[2][1][:2]}
        rig.check(2, 3)
        if null:
            rig.check(1)  # nothing was accepted there
        assert (table[:, 1:] == -7).all()
    assert not outs[True][:, 0].any()
    assert torch.equal(outs[True][:, 1:], outs[False][:, 1:])


@every_policy
def test_a_dummy_run_over_used_buffers_changes_nothing(policy: str, backend: str) -> None:
    """D6 (vllm-project/vllm#37728, #49757): a warm-up over a closed step, while another window is open in its slot."""
    rig = Rig(policy, backend=backend).start(5)
    step, rows = rig.open({5: 4})
    rig.accept(step, [3])
    rig.tokens[5] += rows[5][:3]
    pending, rows = rig.open({5: 3})
    before = rig.bytes(*range(1, 12))
    assert step.slots.tolist() == [5], "a closed step keeps its rows"
    rig.verify([(5, rig.ids(4))], step)
    assert torch.equal(rig.bytes(*range(1, 12)), before)
    rig.accept(pending, [2])
    rig.tokens[5] += rows[5][:2]
    rig.check(5)


@every_policy
def test_a_full_pool_has_room_for_padding(policy: str, backend: str) -> None:
    """D7 (NVIDIA/TensorRT-LLM#13151, #13278, #9873): 4 requests, 4 slots beside the null slot, a bucket of 8."""
    e = engine(policy, slots=5, backend=backend)
    names = "abcd"
    for name in names:
        e.play(ev.Admit(request=name, prompt=1))
    e.play(ev.Prefill(chunks=dict.fromkeys(names, 1)))
    e.play(ev.Verify(windows=dict.fromkeys(names, 4), padding=4))
    e.play(ev.Accept(accepted=dict.fromkeys(names, 2)))
    for name in names:
        e.play(ev.Free(request=name))
    e.check_integrity()
    assert e.cache.slots.free == 4


def test_the_planner_counts_the_null_block() -> None:
    """D7: of n blocks one is nobody's."""
    s = capacity.Settings(gpu_memory_gib=20, weights_gib=8)
    r = capacity.of("native", qwen(), W, s)
    assert r.requests == (r.num_blocks - 1) // r.blocks_per_request


@every_policy
def test_no_recurrent_layers_is_no_work(policy: str, backend: str) -> None:
    """D7 (NVIDIA/TensorRT-LLM#14003): a pipeline rank without recurrent layers."""
    e = engine(policy, g=shape(num_layers=0), slots=4, backend=backend)
    for event in (
        ev.Admit(request="a", prompt=3),
        ev.Prefill(chunks={"a": 3}),
        ev.Verify(windows={"a": 4}, padding=2),
        ev.Accept(accepted={"a": 3}),
        ev.Offload(request="a"),
        ev.Restore(request="a"),
        ev.Free(request="a"),
    ):
        e.play(event)


@every_policy
@every_recurrence
def test_buffers_refreshed_in_place_are_as_good_as_new_ones(arch: Arch, policy: str, backend: str) -> None:
    """D9 (spiritbuun/buun-llama-cpp#116, sgl-project/sglang#19415, #28484): 20 steps with changing slots, counts, marks.

    What a captured graph holds are the buffers; none may keep a value of the step before.
    """
    g = shape(arch, num_layers=1)
    fresh, reused = (
        Rig(policy, g, backend=backend).start(1, 2, 3),
        Rig(policy, g, backend=backend).start(1, 2, 3),
    )
    buffers = Step.empty(4, 4)
    pointers = [t.data_ptr() for t in vars(buffers).values() if isinstance(t, torch.Tensor)]
    for i in range(20):
        slots = [1 + i % 3, 1 + (i + 1) % 3][: 1 + i % 2]
        lens = [1 + (i + b) % 4 for b in range(len(slots))]
        counts = [1 + (i * b) % n for b, n in enumerate(lens)]
        rest = {"mark": [1], "mark_slots": [7]} if i % 5 == 0 else {}
        rest |= {"force_flush": [1]} if i % 4 == 0 else {}
        outs = []
        for rig, step in ((fresh, Step.empty(4, 4)), (reused, buffers)):
            step.stage(slots, lens)
            rows: Rows = [(s, rig.ids(n)) for s, n in zip(slots, lens, strict=True)]
            outs.append(rig.verify([*rows, *[(0, [])] * (4 - len(rows))], step)[1])
            step.stage(slots, lens, accepted=counts, **rest)
            commit = step.close()
            rig.conv.accept(commit)
            rig.policy.accept(commit)
        assert torch.equal(*outs)
    assert torch.equal(fresh.bytes(*range(1, 12)), reused.bytes(*range(1, 12)))
    assert pointers == [t.data_ptr() for t in vars(buffers).values() if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize(("slots", "lens"), [([1, 2, 3], [4, 4]), ([1], [4, 4]), ([1, 2, 3, 4, 5], [1] * 5)])
def test_row_counts_that_disagree_are_refused(slots: list[int], lens: list[int]) -> None:
    """D10 ("ReplaySSM prefill source/state row count mismatch"), A5: the error has every row count."""
    with pytest.raises(
        ValueError, match=rf"slots has {len(slots)} rows, lens has {len(lens)} rows, .* hold 4"
    ):
        Step.empty(4, 4).stage(slots, lens)
