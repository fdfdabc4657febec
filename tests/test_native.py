"""Native's accept copies columns one after another; none is overwritten before it is read."""

import pytest
import torch
from triton_lives import ON_GPU, W, ints, policy, shape, staged, start, tokens

from ssmspec.step import Step

TRITON = pytest.param("triton", marks=[pytest.mark.interpreter, pytest.mark.gpu])
LEN, ACCEPTED = 3, 2


@pytest.mark.parametrize("backend", ["torch", TRITON])
@pytest.mark.parametrize(
    ("mark", "mark_slot", "next_slot"),
    [
        (1, 5, 1),  # the boundary's state lies in column 0, where the accepted one goes
        (1, 1, 5),  # the boundary stays behind
        (2, 1, 5),
        (2, 5, 5),  # both are one
    ],
)
def test_a_boundary_and_the_accepted_state_are_both_kept(
    mark: int, mark_slot: int, next_slot: int, backend: str
) -> None:
    if backend == "torch" and ON_GPU:
        pytest.skip("the reference has its own run on a CPU")
    g = shape("gdn", num_layers=1)
    p = policy("native", g, backend=backend)
    start(p, [1], seed=1)
    x = tokens(g, 1, W.max_len, torch.Generator().manual_seed(0))

    def step(**rest: list[int]) -> Step:
        return staged(W, [1], [LEN], **rest)

    moved = {"mark": [mark], "mark_slots": [mark_slot], "next_slots": [next_slot]}
    now = step(accepted=[ACCEPTED], force_flush=[1], **moved)
    p.verify(0, now, x)
    after = [p.pool["snapshots"][0][1, t].clone() for t in range(LEN)]
    p.accept(now.close())
    assert torch.equal(p.checkpoint(0)[ints(next_slot)][0], after[ACCEPTED - 1])
    assert torch.equal(p.checkpoint(0)[ints(mark_slot)][0], after[mark - 1])
