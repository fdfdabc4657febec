"""M: shapes, parallel ranks, trees."""

import pytest
import torch
from rig import Rig, engine, every_policy, every_recurrence, shape

from ssmspec.geometry import Arch
from ssmspec.runtime import events as ev
from ssmspec.runtime.events import ScriptError
from ssmspec.runtime.lifecycle import LifecycleError


@every_recurrence
@every_policy
@pytest.mark.parametrize(("h", "hv"), [(16, 48), (2, 2), (1, 8)])
def test_value_heads_are_a_multiple_of_key_heads(
    arch: Arch, policy: str, h: int, hv: int, backend: str
) -> None:
    """M2 (flashinfer#3886, vllm-project/vllm#58863)."""
    g = shape(arch, num_layers=1, num_k_heads=h, num_v_heads=hv, head_v=4)
    rig = Rig(policy, g, backend=backend).start(1)
    rig.step({1: 4}, {1: 3})
    rig.step({1: 2}, {1: 2})


def test_other_numbers_of_value_heads_are_refused() -> None:
    """M2: (4, 6), with the nearest legal value."""
    message = "num_v_heads=6 is not a multiple of num_k_heads=4; the nearest legal value is 4"
    with pytest.raises(ValueError, match=message):
        shape(num_k_heads=4, num_v_heads=6)


@every_recurrence
def test_a_value_head_is_served_by_its_own_key_head(arch: Arch, backend: str) -> None:
    """M2: h // (HV // H), not h % H: with the other key head's keys the state is another's."""
    g = shape(arch, num_layers=1)
    rig = Rig("native", g, backend=backend).start(1)
    step, rows = rig.open({1: 1})
    rig.accept(step, [1])
    rig.tokens[1] += rows[1]
    state = rig.look(1)[0][0]  # one token from zero: S = c k^T, so heads of one key head have parallel rows
    k = torch.nn.functional.normalize(state[:, 0], dim=-1)
    same = (k @ k.T).abs()
    assert same[0, 1] > 0.9999
    assert same[2, 3] > 0.9999
    assert same[0, 2] < 0.99


@every_policy
def test_a_commit_that_arrives_a_step_late_counts_once(policy: str, backend: str) -> None:
    """M5 (vllm-project/vllm#44697, #44698, #49355, #46994, #57755): accepts stay one step behind the verifies.

    A slot that was freed meanwhile is in test_a_late_accept_does_not_touch_a_slot_that_was_taken_over.
    """
    e = engine(policy, slots=5, backend=backend, see=(seen := []).append)
    for name in "ab":
        e.play(ev.Admit(request=name, prompt=2))
    e.play(ev.Prefill(chunks={"a": 2, "b": 2}))
    for i in range(4):
        e.play(ev.Verify(windows={"ab"[i % 2]: 4}))
        if i:
            e.play(ev.Accept(accepted={"ab"[(i - 1) % 2]: i}))
    with pytest.raises(LifecycleError, match="the oldest open step holds"):
        e.play(ev.Accept(accepted={"a": 1}))
    e.play(ev.Accept(accepted={"b": 4}))
    wanted = Rig(policy, backend=backend).oracle
    for name in "ab":
        tokens = e.requests[name].tokens
        e.play(ev.Flush(request=name))
        states = torch.stack([s.value for s in seen if s.what == "state" and s.request == name])
        assert torch.equal(states, wanted.after(tokens).state)
    assert len(e.requests["a"].tokens) == 2 + 1 + 3
    assert len(e.requests["b"].tokens) == 2 + 2 + 4


@pytest.mark.parametrize("path", ["[0, 2, 5]", '"0-2-5"', "2.5", "-1", "true"])
def test_an_accepted_path_cannot_be_said(path: str) -> None:
    """M6 (sgl-project/sglang#27463, #11133, vllm-project/vllm#54080, #55688): windows are chains, a count is a prefix."""
    line = '{"event": "accept", "accepted": {"a": PATH}}'.replace("PATH", path)
    with pytest.raises(ScriptError, match=r"line 1: accept: accepted\['a'\]=.* must be a whole number"):
        list(ev.read([line]))


@every_policy
def test_a_lower_bound_of_the_gate_is_used_on_every_path(policy: str, backend: str) -> None:
    """M8 (sgl-project/sglang#32980): prefill, decode, verify, commit and flush of KDA."""
    bounded, plain = shape(Arch.KDA, gate_lower_bound=-0.5), shape(Arch.KDA)
    rig = Rig(policy, bounded, backend=backend).start(1)
    rig.prefill(1, 3)
    for q, a in ((1, 1), (4, 3), (4, 4), (4, 4), (4, 2), (4, 4)):
        rig.step({1: q}, {1: a})
    rig.check(1)
    unbounded = Rig(policy, plain, backend=backend).oracle.after(rig.tokens[1])
    assert not torch.equal(rig.look(1)[0], unbounded.state)
