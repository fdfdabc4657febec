"""A step is closed once; what it says is bounded, and null rows say nothing."""

import pytest
import torch

from ssmspec.step import Step, StepError


def test_counts_are_clamped_to_the_window() -> None:
    """Stale and wild counts: vllm-project/vllm#48475, #50021."""
    commit = Step.of([1, 2, 3], [4, 2, 3], 4, accepted=[-3, 9, 3]).close()
    assert commit.accepted.tolist() == [0, 2, 3]


@pytest.mark.parametrize(("accepted", "row"), [([-1, 1], 0), ([1, 3], 1)])
def test_debug_mode_raises_on_a_count_outside_the_window(accepted: list[int], row: int) -> None:
    step = Step.of([1, 2], [2, 2], 4, accepted=accepted)
    with pytest.raises(StepError, match=rf"accepted={accepted[row]} in row {row} is outside 0..2"):
        step.close(debug=True)


def test_a_second_close_changes_nothing_and_raises_in_debug_mode() -> None:
    step = Step.of([5], [3], 4, accepted=[2], force_flush=[1])
    assert step.close().accepted.tolist() == [2]
    again = step.close()
    assert again.slots.tolist() == again.lens.tolist() == again.accepted.tolist() == [0]
    assert not again.settles.any()
    with pytest.raises(StepError, match="accepted once"):
        step.close(debug=True)


def test_padding_is_null_however_it_is_written() -> None:
    """0 and -1 for the null slot: vllm-project/vllm#33937, flashinfer-ai/flashinfer#2810."""
    commit = Step.of(
        [0, -1, 3], [4, 4, 2], 4, accepted=[4, 4, 1], next_slots=[9, 9, 3], mark=[1, 1, 0]
    ).close()
    assert commit.slots.tolist() == [0, 0, 3]
    assert commit.lens.tolist() == [0, 0, 2]
    assert commit.next_slots.tolist() == [0, 0, 3]
    assert commit.mark_slots.tolist() == [0, 0, 0]


def test_a_boundary_counts_only_where_the_accepted_tokens_reach_it() -> None:
    commit = Step.of(
        [1, 2, 3], [4, 4, 4], 4, accepted=[2, 3, 4], mark=[3, 3, 3], mark_slots=[7, 8, 9]
    ).close()
    assert commit.mark.tolist() == [0, 3, 3]
    assert commit.mark_slots.tolist() == [0, 8, 9]


def test_a_dropped_window_moves_nowhere() -> None:
    commit = Step.of([1], [4], 4, accepted=[0], next_slots=[6], mark=[1], mark_slots=[7]).close()
    assert commit.next_slots.tolist() == [1]
    assert commit.mark_slots.tolist() == [0]


def test_staging_fewer_rows_leaves_null_rows_behind() -> None:
    step = Step.of([1, 2, 3], [4, 4, 4], 4, accepted=[1, 1, 1], force_flush=[1, 1, 1])
    buffers = [t.data_ptr() for t in vars(step).values() if isinstance(t, torch.Tensor)]
    step.stage([5], [2], accepted=[2])
    assert step.slots.tolist() == [5, 0, 0]
    assert step.next_slots.tolist() == [5, 0, 0]
    assert step.lens.tolist() == [2, 0, 0]
    assert not step.force_flush.any()
    assert buffers == [t.data_ptr() for t in vars(step).values() if isinstance(t, torch.Tensor)]
