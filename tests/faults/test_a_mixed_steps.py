"""A: which state is the accepted one. Steps without drafts, mixed with steps that have them."""

import pytest
import torch
from rig import Rig, engine, every_policy, every_recurrence, shape

from ssmspec import kernels
from ssmspec.geometry import Arch, DType, Window
from ssmspec.runtime import events as ev
from ssmspec.runtime.lifecycle import LifecycleError


@every_policy
@every_recurrence
@pytest.mark.parametrize("accepted", [1, 3, 4])
def test_a_step_without_drafts_continues_from_the_accepted_token(
    arch: Arch, policy: str, accepted: int, backend: str
) -> None:
    """A1 (vllm-project/vllm#40875, #39273, #52942). The oracle has S* after 3 tokens, then 4."""
    rig = Rig(policy, shape(arch), backend=backend).start(1)
    rig.step({1: 4}, {1: accepted})
    rig.step({1: 1}, {1: 1})
    rig.check(1)


@every_policy
@pytest.mark.parametrize("state", [DType.FP32, DType.BF16], ids=str)
@pytest.mark.parametrize("lens", [(1, 1, 1), (1, 1, 3)], ids=["decode", "mixed"])
def test_every_backend_restores_from_the_accepted_token(
    policy: str, state: DType, lens: tuple[int, ...], backend: str
) -> None:
    """A2 (vllm-project/vllm#55504). Previous counts 3, 1, 2; in bf16 native is the measure, as it rounds at steps' ends."""
    g = shape(state_dtype=state)
    ours, native = Rig(policy, g, backend=backend), Rig("native", g, backend=backend)
    seen = []
    for rig in (ours, native):
        rig.start(1, 2, 3)
        step, _ = rig.verify([(s, rig.ids(4)) for s in (1, 2, 3)])
        rig.accept(step, [3, 1, 2])
        step, outs = rig.verify([(s, rig.ids(n)) for s, n in zip((1, 2, 3), lens, strict=True)])
        rig.accept(step, lens)
        seen.append([outs, *(t for s in (1, 2, 3) for t in rig.look(s))])
    assert all(map(torch.equal, *seen))


def test_a_backend_that_is_not_there_is_refused() -> None:
    """A2: no backend is chosen by a fallback."""
    with pytest.raises(ValueError, match="backend='fused' is not one of torch"):
        kernels.make("fused", shape(), Window(max_len=4))


@every_recurrence
def test_the_accepted_state_is_committed(arch: Arch, backend: str) -> None:
    """A3 (sgl-project/sglang#26351): recover's slot leaves the checkpoint and equals S*."""
    rig = Rig("recover", shape(arch), backend=backend).start(1)
    rig.prefill(1, 3)
    before = rig.settled(1)[0]
    rig.step({1: 4}, {1: 2})
    rig.check(1, settled=True)
    assert not torch.equal(rig.settled(1)[0], before)


@every_policy
def test_a_missing_commit_is_an_error_at_the_next_verify(policy: str, backend: str) -> None:
    """A3: silence would leave the state at the checkpoint of before."""
    e = engine(policy, w=Window(max_len=4), slots=4, backend=backend)
    e.play(ev.Admit(request="a", prompt=1))
    e.play(ev.Prefill(chunks={"a": 1}))
    e.play(ev.Verify(windows={"a": 2}))
    with pytest.raises(LifecycleError, match="'a': the request is verifying; its window is still open"):
        e.play(ev.Verify(windows={"a": 2}))


@every_recurrence
def test_rows_without_drafts_stay_on_the_ring(arch: Arch, backend: str) -> None:
    """A4 (vllm-project/vllm#49847, #49887): L=16, histories 5 and 9, nobody drafted."""
    rig = Rig("checkpointing", shape(arch), backend=backend).start(1, 2)
    rig.step({1: 4, 2: 4}, {1: 2, 2: 4})
    rig.step({1: 4, 2: 4}, {1: 3, 2: 4})
    rig.step({2: 1}, {2: 1})
    assert (rig.cursors(1)["count"], rig.cursors(2)["count"]) == (5, 9)
    before = rig.settled(1)[0], rig.settled(2)[0]
    rig.step({1: 1, 2: 1}, {1: 1, 2: 1})
    assert (rig.cursors(1)["count"], rig.cursors(2)["count"]) == (6, 10)
    assert torch.equal(rig.settled(1)[0], before[0])
    assert torch.equal(rig.settled(2)[0], before[1])


@every_policy
@pytest.mark.parametrize("arch", [Arch.GDN, Arch.KDA])
def test_gates_follow_their_row(arch: Arch, policy: str, backend: str) -> None:
    """A6 (vllm-project/vllm#51812, #54928): five prompt tokens and a window of four, in both orders.

    The oracle ran each row alone.
    """
    for order in ((1, 2), (2, 1)):
        rig = Rig(policy, shape(arch), backend=backend).start(1, 2)
        for slot in order:
            if slot == 1:
                rig.prefill(1, 5)
            else:
                rig.step({2: 4}, {2: 3})
        rig.step(dict.fromkeys(order, 4), {1: 2, 2: 4})


@every_policy
def test_plain_and_speculative_rows_share_a_batch(policy: str, backend: str) -> None:
    """A7 (vllm-project/vllm#36122, #36239)."""
    rig = Rig(policy, backend=backend).start(1, 2)
    rig.step({1: 1, 2: 4}, {1: 1, 2: 3})
    rig.step({1: 4, 2: 1}, {1: 4, 2: 1})
