"""F: prefix caching and block boundaries."""

import itertools
from dataclasses import replace

import pytest
import torch
from rig import Rig, engine, every_policy, every_recurrence, index, shape

from ssmspec.geometry import Arch, Window
from ssmspec.kernels.base import Kernels, Plan
from ssmspec.measure.planner import CacheMode
from ssmspec.runtime import events as ev
from ssmspec.runtime.engine import Seen
from ssmspec.runtime.lifecycle import LifecycleError
from ssmspec.step import Step, StepError

PUBLISHED = [(3, 2, 4), (2, 3, 4), (0, 4, 4), (6, 4, 4), (1, 1, 4), (5, 4, 8), (7, 4, 8), (4, 4, 8)]
published = pytest.mark.parametrize(("n", "a", "bs"), PUBLISHED, ids=lambda v: str(v))


def crossing(
    policy: str, n: int, a: int, bs: int, how: str, g: object = None, backend: str = "torch"
) -> None:
    """``n`` tokens in slot 1, then a window of which ``a`` are accepted, in blocks of ``bs``."""
    rig = Rig(policy, g or shape(), Window(max_len=4, align=bs), backend=backend).start(1)
    if n:
        rig.prefill(1, n)
    step, rows = rig.open({1: 4})
    mark = bs - n % bs
    here, there = 1, 7
    boundary, final = {"leave": (here, there), "copy": (there, here), "stay": (here, here)}[how]
    crossed = mark <= a
    if how == "stay" and not (crossed and mark == a):
        boundary = 0  # the next block is null
    rig.accept(
        step,
        [a],
        mark=[mark if boundary else 0],
        mark_slots=[boundary],
        next_slots=[final if crossed else here],
    )
    tokens = rig.tokens[1] + rows[1][:a]
    final = final if crossed else here
    rig.tokens[final] = tokens
    rig.check(final)
    if crossed and boundary:
        rig.tokens[boundary] = tokens[: n + mark]
        rig.check(boundary, settled=True)
        rig.tokens[final] = tokens
    rig.step({final: 4}, {final: 2})


@published
@every_policy
@pytest.mark.parametrize("how", ["leave", "copy", "stay"])
def test_boundary_and_final_state_go_where_they_belong(
    policy: str, n: int, a: int, bs: int, how: str, backend: str
) -> None:
    """F1 (vllm-project/vllm#58863, #59962, #53912): the block of the last token holds the final state."""
    crossing(policy, n, a, bs, how, backend=backend)


@every_recurrence
@every_policy
@pytest.mark.parametrize("how", ["leave", "copy", "stay"])
def test_a_window_that_ends_on_the_boundary(policy: str, arch: Arch, how: str, backend: str) -> None:
    """F1: accepted tokens end exactly there."""
    crossing(policy, 5, 3, 8, how, shape(arch), backend)


@every_policy
def test_a_state_that_would_go_nowhere_is_an_error(policy: str) -> None:
    """F1: a null destination with accepted tokens."""
    step = Step.of([1], [4], 4, accepted=[2], next_slots=[0])
    with pytest.raises(StepError, match="next_slots=0 in row 0: its state would be nowhere"):
        step.close(debug=True)
    Step.of([1], [4], 4, accepted=[0], next_slots=[0]).close(debug=True)


@published
@every_policy
def test_no_row_of_a_fold_writes_what_another_reads(
    policy: str, n: int, a: int, bs: int, backend: str
) -> None:
    """F2 (vllm-project/vllm#58863 at 3388ba1a25): a program loads its own tile before it stores; others' it never sees."""
    for how in itertools.product(("leave", "copy"), repeat=2):
        rig = Rig(policy, w=Window(max_len=4, align=bs), backend=backend).start(1, 2)
        plans: list[Plan] = []

        def fold(
            layers: object, plan: Plan, real: Kernels = rig.policy.kernels, seen: list[Plan] = plans
        ) -> None:
            seen.append(plan)
            real.fold(layers, plan)  # type: ignore[arg-type]

        rig.policy.kernels = replace(rig.policy.kernels, fold=fold)
        for slot in (1, 2) if n else ():
            rig.prefill(slot, n)
        step, rows = rig.open({1: 4, 2: 4})
        mark, crossed = bs - n % bs, bs - n % bs <= a
        leave = [h == "leave" and crossed for h in how]
        rig.accept(
            step,
            [a, a],
            mark=[mark, mark],
            mark_slots=[s if left else s + 6 for s, left in zip((1, 2), leave, strict=True)],
            next_slots=[s + 6 if left else s for s, left in zip((1, 2), leave, strict=True)],
        )
        for plan in plans:
            for b in range(len(plan.src)):
                others = {int(s) for i, s in enumerate(plan.src) if i != b}
                written = {int(plan.dst[b]), int(plan.mark_dst[b])} - {0}
                assert written.isdisjoint(others)
        for slot, left in zip((1, 2), leave, strict=True):
            final = slot + 6 if left else slot
            rig.tokens[final] = rig.tokens[slot] + rows[slot][:a]
            rig.check(final)


def states(seen: list[Seen], request: str, what: str = "state") -> torch.Tensor:
    return torch.stack([s.value for s in seen if s.what == what and s.request == request])


@every_policy
@every_recurrence
def test_a_reused_prefix_is_the_state_at_the_reused_length(arch: Arch, policy: str, backend: str) -> None:
    """F5 (vllm-project/vllm#43559, #53912, #48375, #47861, #47194; club-3090#710, #720, #810).

    A fills two blocks by prompt and drafts; B hits whatever of them its prompt's length allows.
    """
    g, w = shape(arch, num_layers=1), Window(max_len=4, align=5)
    wanted = Rig(policy, g, backend=backend).oracle
    for length in range(1, 14):
        seen: list[Seen] = []
        e = engine(policy, g=g, w=w, slots=12, backend=backend, see=seen.append)
        for event in (
            ev.Admit(request="a", prompt=13),
            ev.Prefill(chunks={"a": 13}),
            ev.Verify(windows={"a": 4}),
            ev.Accept(accepted={"a": 3}),
            ev.Admit(request="b", prompt=length),
        ):
            e.play(event)
        assert len(e.requests["b"].tokens) == (length - 1) // 5 * 5
        assert e.requests["b"].prompt == e.requests["a"].prompt[:length]
        e.play(ev.Prefill(chunks={"b": 13}))
        e.play(ev.Flush(request="b"))
        point = wanted.after(e.requests["b"].prompt)
        assert torch.equal(states(seen, "b"), point.state)
        assert torch.equal(states(seen, "b", "conv"), point.conv)


@every_policy
def test_a_prefix_that_drafts_completed_is_reused(policy: str, backend: str) -> None:
    """F5: a resumed request hits the boundary that its own accepted drafts crossed."""
    w = Window(max_len=4, align=5)
    for how in ("leave", "copy", "stay"):
        seen: list[Seen] = []
        e = engine(policy, w=w, slots=12, backend=backend, see=seen.append)
        for event in (
            ev.Admit(request="a", prompt=3),
            ev.Prefill(chunks={"a": 3}),
            ev.Verify(windows={"a": 4}),
            ev.Accept(accepted={"a": 2 if how == "stay" else 4}, boundary={"a": how}),
            ev.Verify(windows={"a": 4}),
            ev.Accept(accepted={"a": 2}),
        ):
            e.play(event)
        tokens = [*e.requests["a"].tokens]
        e.play(ev.Preempt(request="a"))
        e.play(ev.Resume(request="a"))
        assert e.requests["a"].tokens == tokens[:5]
        e.play(ev.Prefill(chunks={"a": 100}))
        seen.clear()
        e.play(ev.Flush(request="a"))
        assert torch.equal(states(seen, "a"), Rig(policy, backend=backend).oracle.after(tokens).state)


@every_policy
@pytest.mark.parametrize(
    "event",
    [
        ev.Fork(request="a", to="b"),
        ev.Offload(request="a", settle=False),
        *(kind(request="a") for kind in (ev.Flush, ev.Move, ev.Free, ev.Preempt)),
    ],
    ids=lambda e: e.kind,
)
def test_nothing_is_published_between_verify_and_commit(policy: str, event: ev.Event, backend: str) -> None:
    """F10 (sglang#33450, #22908, #32459): what a slot holds then may be a draft's state."""
    e = engine(policy, slots=6, backend=backend)
    for before in (
        ev.Admit(request="a", prompt=3),
        ev.Prefill(chunks={"a": 3}),
        ev.Verify(windows={"a": 4}),
    ):
        e.play(before)
    cached = dict(e.cache.of)
    with pytest.raises(LifecycleError, match="its window is still open"):
        e.play(event)
    assert e.cache.of == cached


@every_policy
def test_a_prefix_is_published_by_the_accept_that_completes_it(policy: str, backend: str) -> None:
    """F10: two accepted tokens of four publish nothing; what is published was accepted."""
    e = engine(policy, w=Window(max_len=4, align=5), slots=8, backend=backend)
    for event in (
        ev.Admit(request="a", prompt=2),
        ev.Prefill(chunks={"a": 2}),
        ev.Verify(windows={"a": 4}),
        ev.Accept(accepted={"a": 2}),
    ):
        e.play(event)
    assert not e.cache.of
    e.play(ev.Verify(windows={"a": 4}))
    e.play(ev.Accept(accepted={"a": 3}))
    assert [*e.cache.of] == [tuple(e.requests["a"].tokens[:5])]


def test_the_cache_modes_are_none_and_align() -> None:
    """F11 (vllm-project/vllm#39809, #41233, #58997): mode all cannot be asked for."""
    assert [*CacheMode] == ["none", "align"]
    with pytest.raises(ValueError, match="all"):
        CacheMode("all")


@every_policy
def test_aligned_requests_may_swap_rows(policy: str, backend: str) -> None:
    """F14 (vllm-project/vllm#60210): what is kept between steps is kept by slot."""
    rig = Rig(policy, w=Window(max_len=4, align=4), backend=backend).start(1, 2)
    rig.prefill(1, 3)
    rig.prefill(2, 2)
    step, rows = rig.open({1: 4, 2: 4})
    rig.accept(step, [3, 4], mark=[1, 2], mark_slots=[7, 8])
    for slot, n in ((1, 3), (2, 4)):
        rig.tokens[slot] += rows[slot][:n]
    step, rows = rig.open({2: 4, 1: 4})
    rig.accept(step, [4, 2], mark=[2, 2], mark_slots=[9, 10])
    for slot, n in ((1, 2), (2, 4)):
        rig.tokens[slot] += rows[slot][:n]
    rig.tokens |= {7: rig.tokens[1][:4], 8: rig.tokens[2][:4], 9: rig.tokens[2][:8], 10: rig.tokens[1][:8]}
    rig.check(7, 8, 9, 10, settled=True)
    rig.check(1, 2)
    rig.policy.settle(index(1, 2))
    rig.check(1, 2, settled=True)
