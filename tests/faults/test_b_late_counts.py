"""B: counts that come late, from another stream."""

import pytest
import torch
from rig import Rig, every_policy, shape
from torch import Tensor

from ssmspec.layout import POLICY_NAMES
from ssmspec.step import Step


@every_policy
def test_a_late_count_and_padding_by_rows_change_nothing(policy: str, backend: str) -> None:
    """B4 (vllm-project/vllm#45100): 72 rows of 4 tokens in buffers of 80; padding goes by rows, not by tokens.

    The counts arrive after the next batch was verified.
    """
    g, slots = shape(num_layers=1), [*range(1, 73)]
    rig = Rig(policy, g, backend=backend, num_slots=76).start(*slots, 73)
    step = Step.empty(80, 4)
    step.stage(slots, [4] * 72)
    ids = [rig.ids(4) for _ in slots]
    rig.verify([*zip(slots, ids, strict=True), *([(0, [])] * 8)], step)
    other, rows = rig.open({73: 2})
    counts = [1 + s % 4 for s in slots]
    rig.accept(step, [*counts, *([9] * 8)])
    rig.accept(other, [1])
    rig.tokens[73] += rows[73][:1]
    for slot, row, n in zip(slots, ids, counts, strict=True):
        rig.tokens[slot] += row[:n]
    rig.check(*slots, 73)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_counts_from_a_side_stream_may_take_their_time(policy: str) -> None:
    """B4: the next step is staged while counts are still being copied; the accept waits for their event alone."""
    want, got = (_from_a_side_stream(policy, cycles) for cycles in (0, 20_000_000))
    assert all(map(torch.equal, want, got))
    assert all(x.isfinite().all() for x in want)


def _from_a_side_stream(policy: str, cycles: int) -> list[Tensor]:
    """Outputs, and then states, of three rows; counts are copied after so many cycles of the GPU's clock."""
    import triton_lives as lives

    g, rows, seen = lives.shape("gdn"), [1, 2, 3], []
    p, gen = lives.policy(policy, g, lives.W), torch.Generator().manual_seed(1)
    lives.start(p, rows, seed=1)
    side, copied, t = torch.cuda.Stream(), torch.cuda.Event(), lives.W.max_len
    steps = [Step.empty(len(rows), t, "cuda") for _ in range(2)]
    for i, counts in enumerate([(2, 1, 4), (1, 3, 2), (4, 4, 1), (3, 2, 2)]):
        sampled, step = lives.ints(*counts), steps[i % 2]
        step.stage(rows, [t] * len(rows))
        if i:
            copied.wait()
            p.accept(steps[1 - i % 2].close())
        for layer in range(g.num_layers):
            seen.append(p.verify(layer, step, lives.tokens(g, len(rows), t, gen)))
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            if cycles:
                torch.cuda._sleep(cycles)
            step.accepted.copy_(sampled, non_blocking=True)
            copied.record(side)
    copied.wait()
    p.accept(steps[1].close())
    p.settle(lives.ints(*rows))
    return [*seen, *(p.checkpoint(layer)[rows].clone() for layer in range(g.num_layers))]
