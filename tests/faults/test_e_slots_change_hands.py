"""E: slots are recycled, moved, exported, left by an abort."""

import pytest
import torch
from rig import (
    RING_POLICIES,
    Rig,
    W,
    decoding,
    engine,
    every_policy,
    every_recurrence,
    index,
    shape,
)

from ssmspec import layout
from ssmspec.geometry import Arch, Mode, Window
from ssmspec.runtime import events as ev
from ssmspec.runtime import exported
from ssmspec.runtime.engine import Engine, Seen


@pytest.mark.parametrize("policy", RING_POLICIES)
@every_recurrence
def test_a_recycled_slot_keeps_no_cursor(arch: Arch, policy: str, backend: str) -> None:
    """E1 (TensorRT-LLM#13453, vllm-project/vllm#49847, #48018): X leaves at every cursor that there is, Y comes."""
    left, rig = set(), Rig(policy, shape(arch, num_layers=1), backend=backend)
    for tokens in range(1, 21):
        rig.start(2)
        for n in [4] * (tokens // 4) + [tokens % 4] * (tokens % 4 > 0):
            rig.accept(rig.verify([(2, rig.ids(4))])[0], [n])
        left.add(rig.cursors(2)["count"])
        rig.start(2)
        rig.prefill(2, 2)
        for i in range(20 if tokens == 20 else 2):
            rig.step({2: 4}, {2: 1 + (3 * i + 2) % 4})
        rig.check(2)
    assert left == set(range(1, 5 if policy == "every-step" else 17))


@pytest.mark.parametrize("policy", RING_POLICIES)
def test_a_slot_that_is_left_keeps_no_cursor(policy: str, backend: str) -> None:
    """E1: a request goes on in slot 5; whoever takes slot 1 finds nothing pending there."""
    rig = Rig(policy, backend=backend).start(1)
    rig.step({1: 4}, {1: 3})
    step, rows = rig.open({1: 4})
    rig.accept(step, [2], next_slots=[5])
    rig.tokens[5] = rig.tokens[1] + rows[1][:2]
    rig.check(5, settled=True)
    assert (rig.cursors(1)["base"], rig.cursors(1)["count"]) == (0, 0)


@pytest.mark.parametrize("policy", RING_POLICIES)
@every_recurrence
@pytest.mark.parametrize("mode", [*Mode])
@pytest.mark.parametrize("fill", [float("inf"), float("-inf"), float("nan")])
def test_a_record_that_is_not_committed_is_never_read(
    arch: Arch, policy: str, mode: Mode, fill: float, backend: str
) -> None:
    """E2 (TensorRT-LLM#14509, #14841): a coefficient of 0 does not help where the value is not finite."""
    w, outs = Window(max_len=4, ring_len=16, mode=mode), []
    for value in (0.0, fill):
        rig = Rig(policy, shape(arch), w, backend=backend)
        for name, t in rig.pool.tensors.items():
            if name.startswith("rec_"):
                t.fill_(value)
        rig.start(1)
        step, _ = rig.verify([(1, rig.ids(4))])
        rig.accept(step, [3])
        assert rig.cursors(1)["count"] == 3
        step, out = rig.verify([(1, rig.ids(2))])
        rig.accept(step, [1])
        outs.append((out, *rig.look(1)))
    assert all(map(torch.equal, *outs))
    assert outs[1][0].isfinite().all()


@every_policy
@every_recurrence
def test_a_new_request_owes_nothing_to_the_bytes_of_its_slot(arch: Arch, policy: str, backend: str) -> None:
    """E4 (vllm-project/vllm#56524, #35219, #54004, #27264): bytes 0xFF, a first chunk of one token."""
    rig = Rig(policy, shape(arch), backend=backend, poison=0xFF).start(1)
    rig.prefill(1, 1)
    rig.check(1, settled=True)


@every_policy
def test_a_one_token_prompt_starts_from_zero_in_a_recycled_slot(policy: str, backend: str) -> None:
    """E5 (vllm-project/vllm#51483)."""
    rig = Rig(policy, backend=backend).start(1)
    rig.prefill(1, 5)
    rig.step({1: 4}, {1: 4})
    rig.start(1)
    rig.prefill(1, 1)
    rig.check(1, settled=True)
    rig.step({1: 4}, {1: 2})


@every_policy
@every_recurrence
def test_a_move_takes_everything_along(arch: Arch, policy: str, backend: str) -> None:
    """E6 (ATOM 652c53ea4, vllm-project/vllm#45577): h=7, slot 2 to 9."""
    rig = Rig(policy, shape(arch), backend=backend).start(2)
    for n in (4, 3):
        rig.step({2: 4}, {2: n})
    rig.pool.copy(index(2), index(9))
    rig.pool.poison(0xFF, index(2))
    rig.tokens[9] = rig.tokens.pop(2)
    if policy == "checkpointing":
        assert rig.cursors(9)["count"] == 7
    rig.check(9)
    rig.step({9: 4}, {9: 2})
    rig.check(9)


@every_policy
def test_there_is_no_partial_move(policy: str) -> None:
    """E6: one call copies every durable field; what it leaves out does not outlive a step."""
    rig = Rig(policy).start(2)
    rig.step({2: 4}, {2: 3})
    rig.pool.poison(0x3E, index(9))
    rig.pool.copy(index(2), index(9))
    for f in rig.pool.layout:
        t = rig.pool[f.name]
        a, b = (t[2], t[9]) if f.shared else (t[:, 2], t[:, 9])
        assert f.durable == torch.equal(*(x.reshape(-1).view(torch.uint8) for x in (a, b))), f.name
    assert all(f.name.startswith("rec_") for f in rig.pool.layout if not f.durable)


@pytest.mark.parametrize("policy", RING_POLICIES)
def test_prefill_parks_the_cursor(policy: str, backend: str) -> None:
    """E7 (ATOM 652c53ea4): h=4 left over, a prompt of 5, the first decode."""
    rig = Rig(policy, backend=backend).start(1)
    rig.step({1: 4}, {1: 4})
    assert rig.cursors(1)["count"] == 4
    rig.start(1)
    rig.pool["base"][1], rig.pool["count"][1] = 3, 4  # whatever wrote the checkpoint and left these
    rig.prefill(1, 5)
    assert (rig.cursors(1)["base"], rig.cursors(1)["count"]) == (0, 0)
    rig.step({1: 1}, {1: 1})
    rig.check(1)


@every_policy
@pytest.mark.parametrize("when", ["prefill", "verify", "preempted", "offloaded", "decoding"])
def test_an_abort_gives_its_slot_back_whenever_it_comes(policy: str, when: str, backend: str) -> None:
    """E9 (ATOM 273c9e21d, 1529b9664, sglang#30986, #16067, candle-vllm#441, vllm-project/vllm#55450)."""
    e = engine(policy, backend=backend)
    free = e.cache.slots.free
    e.play(ev.Admit(request="a", prompt=3))
    e.play(ev.Prefill(chunks={"a": 1 if when == "prefill" else 3}))
    if when != "prefill":
        e.play(
            {
                "verify": ev.Verify(windows={"a": 4}),
                "preempted": ev.Preempt(request="a"),
                "offloaded": ev.Offload(request="a", settle=False),
                "decoding": ev.Flush(request="a"),
            }[when]
        )
    e.play(ev.Abort(request="a"))
    e.check_integrity()
    assert e.cache.slots.free == free
    assert not e.requests


@every_policy
def test_a_late_accept_does_not_touch_a_slot_that_was_taken_over(policy: str, backend: str) -> None:
    """E9, M5 (vllm-project/vllm#57755): two slots; "a" is aborted in its window and "c" takes its slot."""
    e = engine(policy, [*decoding("a"), *decoding("b")], backend, slots=3)
    slot = e.requests["a"].slot
    e.play(ev.Verify(windows={"a": 4, "b": 3}))
    e.play(ev.Abort(request="a"))
    for event in decoding("c", prompt=5):
        e.play(event)
    assert e.requests["c"].slot == slot
    before = [t[slot].clone() if f.shared else t[:, slot].clone() for f, t in _fields(e)]
    e.play(ev.Accept(accepted={"b": 2}))
    after = [t[slot] if f.shared else t[:, slot] for f, t in _fields(e)]
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(before, after, strict=True)
    )


def _fields(e: Engine) -> list[tuple[layout.Field, torch.Tensor]]:
    return [(f, e.layers.pool[f.name]) for f in e.layers.pool.layout if f.shape and f.durable]


@every_policy
def test_a_cached_prefix_is_settled(policy: str, backend: str) -> None:
    """E10 (sglang#37837, #28451): a boundary is crossed at h=5; what is cached has an empty ring."""
    w = Window(max_len=4, ring_len=16, align=5)
    rig = Rig(policy, w=w, backend=backend).start(1)
    rig.step({1: 4}, {1: 4})
    step, rows = rig.open({1: 4})
    rig.accept(step, [3], mark=[1], mark_slots=[7])
    rig.tokens[1] += rows[1][:3]
    rig.tokens[7] = rig.tokens[1][:5]
    rig.check(7, settled=True)
    assert all(rig.cursors(7)[name] == 0 for name in ("base", "count", "winner") if name in rig.cursors(7))
    rig.check(1)


def test_what_is_exported_of_native_is_its_accepted_column(backend: str) -> None:
    """E11 (LMCache/LMCache#5004, #4984): after a count of 2 the other columns are scratch, and nobody reads them."""
    for settle in (True, False):
        e = engine(
            "native", [*decoding(), ev.Verify(windows={"a": 4}), ev.Accept(accepted={"a": 2})], backend
        )
        tokens = e.requests["a"].prompt + e.requests["a"].tokens[3:]
        e.play(ev.Offload(request="a", settle=settle))
        stored = e.requests["a"].stored
        assert stored is not None
        winner = int(stored.tensors["winner"])
        assert winner == (0 if settle else 1)
        for column in {0, 1, 2, 3} - {winner}:
            stored.tensors["snapshots"][:, column] = float("nan")
        seen: list[Seen] = []
        e.see = seen.append
        e.play(ev.Restore(request="a"))
        e.play(ev.Flush(request="a"))
        wanted = Rig("native", backend=backend).oracle.after(tokens).state
        assert torch.equal(torch.stack([s.value for s in seen if s.what == "state"]), wanted)


def test_offloads_of_all_policies_are_whole(backend: str) -> None:
    """E6, E11: an exported state names every field that must survive."""
    for policy in layout.POLICY_NAMES:
        e = engine(policy, decoding(), backend)
        stored = exported.take(e.layers.pool, 1, exported.Header.of(policy, shape(), W, 3, False))
        assert stored.tensors.keys() == {f.name for f in e.layers.pool.layout if f.durable}
