"""B: what the accepted count means, its bounds, and that it is applied once, to the right row."""

import pytest
import torch
from rig import Rig, engine, every_policy, every_recurrence, index, record_policies, shape

from ssmspec.geometry import Arch, Window
from ssmspec.policies.native import LOST
from ssmspec.runtime import events as ev
from ssmspec.runtime.lifecycle import LifecycleError
from ssmspec.step import Step, StepError


@record_policies
@every_recurrence
def test_a_dropped_window_changes_nothing(arch: Arch, policy: str, backend: str) -> None:
    """B1 (vllm-project/vllm#56419): counts 0 and 3."""
    rig = Rig(policy, shape(arch), backend=backend).start(1, 2)
    rig.step({1: 4, 2: 4}, {1: 2, 2: 1})
    settled, (state, conv) = rig.settled(1)[0], rig.look(1)
    step, rows = rig.open({1: 4, 2: 4})
    folded = torch.equal(rig.settled(1)[0], settled)
    rig.accept(step, [0, 3])
    rig.tokens[2] += rows[2][:3]
    rig.check(1, 2)
    assert torch.equal(rig.look(1)[0], state)
    assert torch.equal(rig.look(1)[1], conv)
    assert folded == (policy != "every-step"), "every-step folds the last step, whatever becomes of this one"
    rig.step({1: 4, 2: 4}, {1: 1, 2: 4})


@every_recurrence
def test_a_dropped_window_costs_native_its_row_and_no_other(arch: Arch, backend: str) -> None:
    """B1: native has overwritten the state that the window started from, so the row is marked."""
    rig = Rig("native", shape(arch), backend=backend).start(1, 2)
    step, rows = rig.open({1: 4, 2: 4})
    rig.accept(step, [0, 3])
    rig.tokens[2] += rows[2][:3]
    assert rig.cursors(1)["winner"] == LOST
    rig.check(2)
    step, outs = rig.verify([(1, rig.ids(4)), (2, rig.ids(4))])
    assert not outs[:, 0].any(), "a lost row computes nothing"
    rig.policy.settle(index(1))
    assert rig.cursors(1)["winner"] == LOST


def test_a_lost_row_is_refused_by_name_until_it_starts_over(backend: str) -> None:
    """B1: what a caller does after an exception between verify and accept, where the policy is native."""
    seen = []
    e = engine("native", w=Window(max_len=4), slots=4, backend=backend, see=seen.append)
    e.play(ev.Admit(request="a", prompt=3))
    e.play(ev.Prefill(chunks={"a": 3}))
    e.play(ev.Flush(request="a"))
    e.play(ev.Verify(windows={"a": 4}))
    e.play(ev.Accept(accepted={"a": 0}))
    for event in (
        ev.Verify(windows={"a": 1}),
        *(kind(request="a") for kind in (ev.Flush, ev.Offload, ev.Move, ev.Free)),
        ev.Fork(request="a", to="b"),
    ):
        with pytest.raises(LifecycleError, match="'a': the request is lost; native has overwritten"):
            e.play(event)
    e.play(ev.Preempt(request="a"))
    e.play(ev.Resume(request="a"))
    e.play(ev.Prefill(chunks={"a": 3}))
    e.play(ev.Flush(request="a"))
    states = [s.value for s in seen if s.what == "state"]
    assert torch.equal(torch.stack(states[:2]), torch.stack(states[2:]))


@record_policies
@pytest.mark.parametrize("history", [0, 5, 13])
def test_a_dropped_window_leaves_all_that_follows_bit_equal(policy: str, history: int, backend: str) -> None:
    """B1, E14: 13 + 4 > L, so the dropped window folds the ring. In exact mode that shows nowhere."""
    ran, never = (Rig(policy, backend=backend).start(1) for _ in range(2))
    for rig in (ran, never):
        for n in [4] * (history // 4) + [history % 4] * (history % 4 > 0):
            rig.step({1: 4}, {1: n})
    step, _ = ran.open({1: 4})
    ran.accept(step, [0])
    never.ids(4)
    for n in (2, 4, 1, 3, 4):
        for rig in (ran, never):
            rig.step({1: 4}, {1: n})
        assert all(map(torch.equal, ran.look(1), never.look(1)))


@every_policy
def test_counts_out_of_range_are_clamped_and_raise_in_debug_mode(policy: str, backend: str) -> None:
    """B2 (vllm-project/vllm#48475, #50021): counts -3 and 9 of windows of 4 and 2."""
    rig = Rig(policy, backend=backend).start(1, 2)
    step, rows = rig.open({1: 4, 2: 2})
    before = rig.look(1) if policy != "native" else None
    with pytest.raises(StepError, match=r"accepted=-3 in row 0 is outside 0\.\.4"):
        _staged(step, [-3, 9]).close(debug=True)
    with pytest.raises(StepError, match=r"accepted=9 in row 1 is outside 0\.\.2"):
        _staged(step, [1, 9]).close(debug=True)
    commit = rig.accept(step, [-3, 9])
    assert commit.accepted.tolist() == [0, 2]
    rig.tokens[2] += rows[2]
    rig.check(2)
    if before:
        assert all(map(torch.equal, rig.look(1), before))


def _staged(step: Step, accepted: list[int]) -> Step:
    step.stage(step.slots.tolist(), step.lens.tolist(), accepted=accepted)
    return step


@every_policy
def test_the_count_includes_the_bonus_token(policy: str, backend: str) -> None:
    """B3 (mlx-swift-lm#143): two accepted drafts make three accepted tokens."""
    rig = Rig(policy, backend=backend).start(1)
    drafts = 2
    rig.step({1: 4}, {1: 1 + drafts})
    assert len(rig.tokens[1]) == 3
    rig.check(1)


@every_policy
def test_a_count_stays_with_its_request_when_the_batch_is_condensed(policy: str, backend: str) -> None:
    """B5 (vllm-ascend#13863, #13864, vllm-project/vllm#43894): counts 1, 2, 4; row 0 ends before they are applied."""
    seen = []
    e = engine(policy, w=Window(max_len=4), slots=8, backend=backend, see=seen.append)
    for name in "abc":
        e.play(ev.Admit(request=name, prompt=1))
    e.play(ev.Prefill(chunks=dict.fromkeys("abc", 1)))
    e.play(ev.Verify(windows=dict.fromkeys("abc", 4)))
    window = {r: e.requests[r].prompt + e.requests[r].window for r in "bc"}
    e.play(ev.Abort(request="a"))
    e.play(ev.Accept(accepted={"b": 2, "c": 4}))
    for name, n in (("b", 2), ("c", 4)):
        assert e.requests[name].tokens == window[name][: 1 + n]
        e.play(ev.Flush(request=name))
    wanted = Rig(policy, backend=backend).oracle
    for s in seen:
        if s.what == "state":
            assert torch.equal(s.value, wanted.after(window[s.request][: s.tokens]).state[s.layer])


@every_policy
@every_recurrence
def test_prefill_counts_prompt_tokens_only(arch: Arch, policy: str, backend: str) -> None:
    """B7 (vllm-project/vllm#30618, #30631, #30632): 7 prompt tokens scheduled together with 3 drafts."""
    rig = Rig(policy, shape(arch), backend=backend).start(1)
    rig.prefill(1, 7, behind=3)
    rig.check(1, settled=True)
    rig.step({1: 4}, {1: 2})
