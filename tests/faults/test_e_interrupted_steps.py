"""E: steps that fail in the middle, requests that sit one out, accepts that come twice or may not come."""

from dataclasses import replace

import pytest
import torch
from numeric import near
from rig import Rig, decoding, engine, every_policy, every_recurrence, record_policies, shape

from ssmspec.geometry import Arch, Mode, Window
from ssmspec.kernels.base import Layer
from ssmspec.runtime import events as ev
from ssmspec.runtime.lifecycle import LifecycleError
from ssmspec.step import StepError


class Fault(Exception):
    pass


@every_policy
def test_a_request_that_sits_out_a_step_is_accepted_once(policy: str, backend: str) -> None:
    """E12 (vllm-project/vllm#49847): verified at step 1 with a count of 3, absent at step 2, back at step 3."""
    rig = Rig(policy, backend=backend).start(1, 2)
    rig.step({1: 4, 2: 4}, {1: 3, 2: 2})
    rig.step({2: 4}, {2: 4})
    rig.step({2: 2, 1: 4}, {1: 1, 2: 1})
    rig.check(1, 2)


@record_policies
@every_recurrence
@pytest.mark.parametrize("mode", [*Mode])
def test_a_fault_between_verify_and_accept_costs_the_window_alone(
    arch: Arch, policy: str, mode: Mode, backend: str
) -> None:
    """E14 (Rapid-MLX#1464, jundot/omlx#3232): the caller drops the window and goes on as if it had never run.

    In fast mode a dropped window may have folded the ring, so that later outputs sum in another order; states,
    which sequential replay makes, stay bit-equal.
    """
    w, rigs = Window(max_len=4, ring_len=8, mode=mode), []
    for faulty in (True, False):
        rig = Rig(policy, shape(arch), w, backend=backend).start(1)
        rigs.append(rig)
        for n in (4, 3):
            rig.accept(rig.verify([(1, rig.ids(4))])[0], [n])
        try:
            step, _ = rig.verify([(1, rig.ids(4))]) if faulty else (None, rig.ids(4))
            raise Fault
        except Fault:
            if step is not None and faulty:
                rig.accept(step, [0])
    for _ in range(3):
        outs, looks = [], []
        for rig in rigs:
            looks.append(rig.look(1))
            step, out = rig.verify([(1, rig.ids(3))])
            rig.accept(step, [2])
            outs.append(out)
        if mode is Mode.EXACT or policy != "checkpointing":
            assert torch.equal(*outs)
            assert all(map(torch.equal, *looks))
        else:
            assert near(looks[0][0], looks[1][0])


@every_policy
def test_a_fault_inside_verify_costs_its_rows_their_state_and_no_other(policy: str, backend: str) -> None:
    """E14: layer 0 may have folded its ring and layer 1 not, so the window can be neither dropped nor repeated."""
    e = engine(policy, [*decoding("a"), *decoding("b")], backend, see=(seen := []).append)
    for _ in range(2):
        e.play(ev.Verify(windows={"a": 4, "b": 4}))
        e.play(ev.Accept(accepted={"a": 3, "b": 2}))
    kernels = e.layers.policy.kernels

    def verify(layer: Layer, *args: object, **kwargs: object) -> torch.Tensor:
        if layer.params.index:
            raise Fault
        return kernels.verify(layer, *args, **kwargs)  # type: ignore[arg-type]

    e.layers.policy.kernels = replace(kernels, verify=verify)
    with pytest.raises(Fault):
        e.play(ev.Verify(windows={"a": 4}))
    e.layers.policy.kernels = kernels
    with pytest.raises(LifecycleError, match="no window is open"):
        e.play(ev.Accept(accepted={"a": 0}))
    with pytest.raises(LifecycleError, match=r"'a': the request is lost; .* preempt and resume it"):
        e.play(ev.Verify(windows={"a": 4}))
    e.play(ev.Preempt(request="a"))
    e.play(ev.Resume(request="a"))
    e.play(ev.Prefill(chunks={"a": 100}))
    wanted = Rig(policy, backend=backend).oracle
    for name in "ab":
        tokens = [*e.requests[name].tokens]
        seen.clear()
        e.play(ev.Free(request=name))
        assert torch.equal(
            torch.stack([s.value for s in seen if s.what == "state"]), wanted.after(tokens).state
        )


@every_policy
def test_a_second_accept_raises_in_debug_mode_and_does_nothing_in_release_mode(
    policy: str, backend: str
) -> None:
    """E14: accept is consume-once."""
    rig = Rig(policy, backend=backend).start(1)
    step, rows = rig.open({1: 4})
    rig.accept(step, [3])
    rig.tokens[1] += rows[1][:3]
    before = rig.bytes(*range(1, 12))
    with pytest.raises(StepError, match="this step is closed already: a window is accepted once"):
        step.close(debug=True)
    for _ in range(2):
        commit = step.close()
        rig.conv.accept(commit)
        rig.policy.accept(commit)
        assert torch.equal(rig.bytes(*range(1, 12)), before)
    rig.step({1: 4}, {1: 2})


@every_policy
def test_a_refused_accept_changes_nothing(policy: str, backend: str) -> None:
    """E14: everything is checked before any state is touched, so conv window and state cannot part."""
    e = engine(policy, [*decoding(), ev.Verify(windows={"a": 4})], backend)
    before = [t.clone().view(torch.uint8) for t in e.layers.pool.tensors.values() if t.dim() > 1]
    for wrong in ({}, {"a": 5}, {"a": 2, "b": 1}, {"b": 1}):
        with pytest.raises(LifecycleError, match="accept"):
            e.play(ev.Accept(accepted=wrong))
    after = [t.view(torch.uint8) for t in e.layers.pool.tensors.values() if t.dim() > 1]
    assert all(map(torch.equal, before, after))
    e.play(ev.Accept(accepted={"a": 4}))
    with pytest.raises(LifecycleError, match="each window is accepted once"):
        e.play(ev.Accept(accepted={"a": 4}))
