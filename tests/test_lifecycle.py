"""Every legal order of events gives native's bits and keeps every slot accounted for; illegal ones are refused by name."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from shapes import GATES, STORES, geometry

from ssmspec.geometry import Window
from ssmspec.layout import POLICY_NAMES
from ssmspec.measure.lockstep import Contender, Lockstep, Pair
from ssmspec.runtime import events as ev
from ssmspec.runtime.engine import Engine
from ssmspec.runtime.lifecycle import LifecycleError
from ssmspec.runtime.setup import Setup
from ssmspec.runtime.slots import SlotError, Slots

W = Window(max_len=3, ring_len=7, align=5)


def judge(pair: Pair) -> None:
    assert torch.equal(pair.native.value, pair.other.value), pair
    assert pair.native.value.isfinite().all(), pair


class Lives(RuleBasedStateMachine):
    """Rules are events; hypothesis chooses their order and shrinks a life that goes wrong."""

    @initialize(
        gate=st.sampled_from([*GATES]), store=st.sampled_from([*STORES]), poison=st.sampled_from([0xFF, 0x3E])
    )
    def start(self, gate: str, store: str, poison: int) -> None:
        g = geometry(gate, store, num_layers=1)
        others = [Contender(name=n, policy=n, g=g, w=W) for n in POLICY_NAMES[1:]]
        native = Contender(name="native", policy="native", g=g, w=W)
        self.lockstep = Lockstep(native, others, judge, Setup(slots=12, poison=poison))
        self.idle: list[str] = []
        self.away: dict[str, type[ev.Event]] = {}
        self.open: list[dict[str, int]] = []
        self.born = 0

    @property
    def alive(self) -> int:
        return len(self.idle) + len(self.away) + sum(map(len, self.open))

    def play(self, event: ev.Event) -> None:
        self.lockstep.play(event)

    @precondition(lambda self: self.alive < 4)
    @rule(prompt=st.integers(1, 11), text=st.integers(0, 1), chunk=st.integers(1, 11), reuse=st.booleans())
    def admit(self, prompt: int, text: int, chunk: int, reuse: bool) -> None:
        name = f"r{self.born}"
        self.born += 1
        self.play(ev.Admit(request=name, prompt=prompt, text=text, reuse=reuse))
        self.play(ev.Prefill(chunks={name: chunk}))
        self.play(ev.Prefill(chunks={name: prompt}))
        self.idle.append(name)

    @precondition(lambda self: self.idle)
    @rule(data=st.data(), padding=st.integers(0, 2))
    def verify(self, data: st.DataObject, padding: int) -> None:
        rows = data.draw(st.lists(st.sampled_from(self.idle), min_size=1, max_size=3, unique=True))
        windows = {r: data.draw(st.integers(1, W.max_len)) for r in rows}
        self.play(ev.Verify(windows=windows, padding=padding))
        self.open.append(windows)
        self.idle = [r for r in self.idle if r not in windows]

    @precondition(lambda self: self.open)
    @rule(data=st.data(), how=st.sampled_from(["leave", "copy", "stay"]), flush=st.booleans())
    def accept(self, data: st.DataObject, how: str, flush: bool) -> None:
        windows = self.open.pop(0)
        accepted = {r: data.draw(st.integers(0, n)) for r, n in windows.items()}
        names = [*windows]
        self.play(
            ev.Accept(
                accepted=accepted, force_flush=names if flush else [], boundary=dict.fromkeys(names, how)
            )
        )
        self.idle += names

    @precondition(lambda self: self.open and self.open[-1])
    @rule()
    def abort_with_an_open_window(self) -> None:
        name, _ = self.open[-1].popitem()
        self.play(ev.Abort(request=name))

    @precondition(lambda self: self.idle)
    @rule(kind=st.sampled_from([ev.Flush, ev.Move]))
    def in_place(self, kind: type[ev.Event]) -> None:
        self.play(kind(request=self.idle[0]))

    @precondition(lambda self: self.idle)
    @rule(kind=st.sampled_from([ev.Free, ev.Abort]))
    def end(self, kind: type[ev.Event]) -> None:
        self.play(kind(request=self.idle.pop(0)))

    @precondition(lambda self: self.idle and self.alive < 5)
    @rule()
    def fork(self) -> None:
        name = f"r{self.born}"
        self.born += 1
        self.play(ev.Fork(request=self.idle[0], to=name))
        self.idle.append(name)

    @precondition(lambda self: self.idle)
    @rule(offload=st.booleans(), settle=st.booleans())
    def leave(self, offload: bool, settle: bool) -> None:
        name = self.idle.pop(0)
        self.play(ev.Offload(request=name, settle=settle) if offload else ev.Preempt(request=name))
        self.away[name] = ev.Restore if offload else ev.Resume

    @precondition(lambda self: self.away)
    @rule()
    def come_back(self) -> None:
        name, kind = self.away.popitem()
        self.play(kind(request=name))
        if kind is ev.Resume:
            self.play(ev.Prefill(chunks={name: 1000}))
        self.idle.append(name)

    @invariant()
    def everything_both_sides_saw_was_compared(self) -> None:
        if hasattr(self, "lockstep") and not self.open:
            assert not self.lockstep.unmatched()


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=40, stateful_step_count=40)


def engine(policy: str = "recover", **rest: int) -> Engine:
    g = geometry("gdn", "fp16-stochastic", num_layers=1)
    e = Engine(policy, Setup(geometry=g, window=W, **{"slots": 8, **rest}))
    e.play(ev.Admit(request="a", prompt=3))
    e.play(ev.Prefill(chunks={"a": 3}))
    return e


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_missing_accept_is_an_error_at_the_next_verify(policy: str) -> None:
    e = engine(policy)
    e.play(ev.Verify(windows={"a": 3}))
    with pytest.raises(LifecycleError, match=r"'a'.*window is still open"):
        e.play(ev.Verify(windows={"a": 1}))
    e.play(ev.Accept(accepted={"a": 2}))
    with pytest.raises(LifecycleError, match="accepted once"):
        e.play(ev.Accept(accepted={"a": 2}))
    e.play(ev.Verify(windows={"a": 1}))


def test_native_refuses_a_lost_row_by_name_until_it_is_prefilled_again() -> None:
    e = engine("native")
    e.play(ev.Verify(windows={"a": 3}))
    e.play(ev.Accept(accepted={"a": 0}))
    for refused in (
        ev.Verify(windows={"a": 1}),
        ev.Flush(request="a"),
        ev.Offload(request="a"),
        ev.Free(request="a"),
    ):
        with pytest.raises(LifecycleError, match="'a': the request is lost; native has overwritten"):
            e.play(refused)
    e.play(ev.Preempt(request="a"))
    e.play(ev.Resume(request="a"))
    e.play(ev.Prefill(chunks={"a": 100}))
    e.play(ev.Verify(windows={"a": 1}))


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (ev.Verify(windows={"b": 1}), "'b' is not alive; alive are \\['a'\\]"),
        (ev.Verify(windows={"a": 4}), r"window=4 is outside 1\.\.3"),
        (ev.Admit(request="a", prompt=1), "'a' is alive already"),
        (ev.Admit(request="b", prompt=0), "prompt=0"),
        (ev.Accept(accepted={"a": 1}), "no window is open"),
        (ev.Restore(request="a"), "restore 'a': the request is decoding"),
        (ev.Resume(request="a"), "resume 'a': the request is decoding"),
    ],
)
def test_an_illegal_order_is_refused_before_anything_changes(event: ev.Event, message: str) -> None:
    e = engine()
    before = {name: t.clone() for name, t in e.layers.pool.tensors.items()}
    with pytest.raises(LifecycleError, match=message):
        e.play(event)
    assert all(torch.equal(t, before[name]) for name, t in e.layers.pool.tensors.items())
    e.check_integrity()


def test_accepting_more_than_the_window_is_refused() -> None:
    e = engine()
    e.play(ev.Verify(windows={"a": 2}))
    with pytest.raises(LifecycleError, match=r"accepted=3 is outside 0\.\.2"):
        e.play(ev.Accept(accepted={"a": 3}))
    with pytest.raises(LifecycleError, match=r"holds \['a'\], not \['b'\]"):
        e.play(ev.Accept(accepted={"b": 1}))


def test_no_slot_left_says_how_many_there_are() -> None:
    e = engine(slots=2)
    with pytest.raises(SlotError, match="all 1 slots are held"):
        e.play(ev.Admit(request="b", prompt=1))


def test_slots_are_conserved() -> None:
    slots = Slots(4)
    taken = [slots.take(), slots.take()]
    assert 0 not in taken
    slots.check_integrity(taken)
    slots.give(taken[0])
    for bad in (taken[0], 0, 9):
        with pytest.raises(SlotError, match="is not taken"):
            slots.give(bad)
    for held in ([], [taken[1], taken[1]], [taken[0], taken[1]]):
        with pytest.raises(SlotError, match="are not the 3 there are"):
            slots.check_integrity(held)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_cached_prefix_is_reused_and_leaves_a_token_to_compute(policy: str) -> None:
    e = engine(policy)
    e.play(ev.Admit(request="b", prompt=11))
    e.play(ev.Prefill(chunks={"b": 11}))
    e.play(ev.Admit(request="c", prompt=10))
    assert len(e.requests["c"].tokens) == 5
    e.play(ev.Admit(request="d", prompt=12))
    assert len(e.requests["d"].tokens) == 10
    e.play(ev.Admit(request="e", prompt=12, reuse=False))
    assert e.requests["e"].tokens == []


@pytest.mark.parametrize("how", ["leave", "copy", "stay"])
@pytest.mark.parametrize("store", ["fp32", "fp16-stochastic"])
def test_a_boundary_crossed_by_drafts_is_settled_and_reused(how: str, store: str) -> None:
    """A stale ring behind a cached block: vllm-project/vllm#58863 commit 3, sgl-project/sglang#37837."""
    g = geometry("gdn", store, num_layers=1)
    others = [Contender(name=n, policy=n, g=g, w=W) for n in POLICY_NAMES[1:]]
    native = Contender(name="native", policy="native", g=g, w=W)
    lockstep = Lockstep(native, others, judge, Setup(slots=6, poison=0x3E))
    script = [ev.Admit(request="a", prompt=3), ev.Prefill(chunks={"a": 3})]
    for accepted in (2, 1, 1, 2, 3) if how == "stay" else (1, 3, 1, 2, 3):  # block ends at 5 and 10
        script += [ev.Verify(windows={"a": 3}), ev.Accept(accepted={"a": accepted}, boundary={"a": how})]
    for event in [*script, ev.Preempt(request="a"), ev.Resume(request="a")]:
        lockstep.play(event)
    assert {len(e.requests["a"].tokens) for e in lockstep.others.values()} == {10}
    lockstep.play(ev.Prefill(chunks={"a": 100}))
    for _ in range(3):
        lockstep.play(ev.Verify(windows={"a": 3}))
        lockstep.play(ev.Accept(accepted={"a": 3}))
    lockstep.play(ev.Free(request="a"))
    assert not lockstep.unmatched()


@pytest.mark.parametrize("how", ["leave", "copy"])
@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_nothing_is_pending_behind_a_boundary(policy: str, how: str) -> None:
    e = engine(policy, poison=0x3E)
    for accepted in (1, 3):
        e.play(ev.Verify(windows={"a": 3}))
        e.play(ev.Accept(accepted={"a": accepted}, boundary={"a": how}))
    (slot,) = e.cache.of.values()
    cursor = e.layers.pool.tensors.get("count", e.layers.pool.tensors.get("winner"))
    assert cursor is None or cursor[slot] == 0
    assert e.layers.pool["position"][slot] == 5
    assert e.layers.pool["seed"][slot] == e.requests["a"].seed
    before = e.layers.policy.checkpoint(0)[slot].clone()
    e.layers.policy.settle(torch.tensor([slot]))
    assert torch.equal(e.layers.policy.checkpoint(0)[slot], before)
