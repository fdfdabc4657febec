"""B: what the accepted count means, its bounds, and that it is applied once, to the right row."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numeric import near
from rig import RING_POLICIES, Rig, engine, every_policy, every_recurrence, index, record_policies, shape

from ssmspec import layout
from ssmspec.geometry import Arch, Mode, Window
from ssmspec.kernels.base import Kernels
from ssmspec.kernels.cursors import advance
from ssmspec.policies import POLICIES
from ssmspec.policies.native import LOST
from ssmspec.pool import StatePool
from ssmspec.runtime import events as ev
from ssmspec.runtime.content import layer_params
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


def _ring(policy: str, w: Window) -> tuple[StatePool, object]:
    """A policy whose kernels do nothing: cursors alone are looked at."""
    g = shape(num_layers=0)
    pool = StatePool.allocate(layout.of(policy, g, w), 0, 3)
    none = Kernels(lambda *a, **k: torch.empty(0), lambda *a: None, advance)
    return pool, POLICIES[policy](g, w, pool, none, layer_params(g, 0))


def _moved(policy: str, base: int, count: int, q: int, a: int) -> tuple[int, int]:
    """Cursors after a window of q tokens of which a are accepted; L=16, T=4, R=20."""
    pool, p = _ring(policy, Window(max_len=4, ring_len=16))
    pool["base"][1], pool["count"][1] = base, count
    p.accept(Step.of([1], [q], 4, accepted=[a]).close())
    return int(pool["base"][1]), int(pool["count"][1])


@pytest.mark.parametrize(
    ("base", "count", "q", "a", "moved"),
    [
        (0, 13, 4, 2, (13, 2)),  # 17 > 16: folded, o moves by h, h becomes a
        (0, 13, 1, 1, (0, 14)),  # the row's real length decides, not T
        (0, 12, 4, 4, (0, 16)),
        (18, 5, 4, 1, (18, 6)),
        (18, 14, 4, 3, (12, 3)),  # 18 + 14 = 32, less R
        (18, 5, 4, 0, (18, 5)),  # a dropped window freezes both
        (0, 13, 4, 0, (13, 0)),  # and still folds
    ],
)
def test_cursors_move_as_published(base: int, count: int, q: int, a: int, moved: tuple[int, int]) -> None:
    """B8 (tests/kernels/mamba/test_replayssm_spec_flashinfer_cursors.py, vllm-project/vllm)."""
    assert _moved("checkpointing", base, count, q, a) == moved


def test_a_flush_wraps_by_the_capacity() -> None:
    """B8: o=18 and h=5 flush to o=3. Every-step replays at each step; T=10 gives the same R=20."""
    pool, p = _ring("every-step", Window(max_len=10, ring_len=10))
    pool["base"][1], pool["count"][1] = 18, 5
    p.accept(Step.of([1], [10], 10, accepted=[2]).close())
    assert (int(pool["base"][1]), int(pool["count"][1])) == (3, 2)


@pytest.mark.parametrize("policy", RING_POLICIES)
def test_the_published_sequence_of_counts(policy: str, backend: str) -> None:
    """B8: L=16, T=4, accepted 4,1,4,2,4,4,3,4,1,4,4,4."""
    rig = Rig(policy, backend=backend).start(1)
    for n in (4, 1, 4, 2, 4, 4, 3, 4, 1, 4, 4, 4):
        rig.step({1: 4}, {1: n})
        rig.check(1)


@pytest.mark.parametrize("policy", RING_POLICIES)
@given(
    st.integers(1, 8),
    st.integers(0, 20),
    st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), max_size=30),
)
def test_cursors_stay_in_the_ring(policy: str, t: int, more: int, steps: list[tuple[int, int]]) -> None:
    """B8: 0 <= h <= L, 0 <= o < R, h + q <= R; a reset empties the ring. R need not be a power of two."""
    w = Window(max_len=t, ring_len=t + more)
    pool, p = _ring(policy, w)
    ring = layout.ring(policy, w)
    for q, a in steps:
        q = min(q, t)
        p.accept(Step.of([1], [q], t, accepted=[min(a, q)]).close())
        base, count = int(pool["base"][1]), int(pool["count"][1])
        assert 0 <= count <= max(ring.limit, t)
        assert 0 <= base < ring.capacity
        pending = 0 if count + t > ring.limit else count
        assert max(count, pending + t) <= ring.capacity
    p.reset(index(1))
    assert (int(pool["base"][1]), int(pool["count"][1])) == (0, 0)


@every_recurrence
def test_each_count_is_applied_once(arch: Arch, backend: str) -> None:
    """B9 (TheTom/llama-cpp-turboquant#345, #352): counts 2, 4, 1, then a settle and another."""
    rig = Rig("every-step", shape(arch), backend=backend).start(1)
    for n in (2, 4, 1):
        rig.step({1: 4}, {1: n})
        assert rig.cursors(1)["count"] == n
    for _ in range(2):
        rig.policy.settle(index(1))
        rig.check(1, settled=True)


@pytest.mark.parametrize("policy", RING_POLICIES)
def test_a_shrinking_window_leaves_no_stale_record(policy: str, backend: str) -> None:
    """B11 (TheTom/llama-cpp-turboquant#352): windows of 4, 4, 1, 4 with counts 4, 2, 1, 3."""
    exact = Rig(policy, backend=backend).start(1)
    fast = Rig(policy, w=Window(max_len=4, ring_len=16, mode=Mode.FAST), backend=backend).start(1)
    for q, a in ((4, 4), (4, 2), (1, 1), (4, 3)):
        exact.step({1: q}, {1: a})
        exact.check(1)
        step, _ = fast.verify([(1, fast.ids(q))])
        fast.accept(step, [a])
        assert near(fast.look(1)[0], exact.look(1)[0])
