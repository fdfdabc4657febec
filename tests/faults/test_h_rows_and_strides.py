"""H: many sequences, reordered rows, strided tensors."""

from dataclasses import replace

import pytest
import torch
from rig import Rig, W, every_policy, every_recurrence, index, record_policies, shape

from ssmspec import policies
from ssmspec.geometry import Arch, DType
from ssmspec.runtime.content import layer_params
from ssmspec.step import Step


@every_policy
@every_recurrence
@pytest.mark.parametrize("byte", [0x00, 0x3E, 0xFF])
def test_rows_of_a_batch_are_single_rows(arch: Arch, policy: str, byte: int, backend: str) -> None:
    """H1 (llama.cpp#28019, #28286, club-3090#896): counts 1, 4, 2, 3, twice, in pools of zeros, of 0x3e and of NaN."""
    rig = Rig(policy, shape(arch), backend=backend, poison=byte).start(1, 2, 3, 4)
    for order in ((1, 2, 3, 4), (3, 1, 4, 2)):
        rig.step(dict.fromkeys(order, 4), {1: 1, 2: 4, 3: 2, 4: 3})
    rig.check(1, 2, 3, 4)


@every_policy
@pytest.mark.parametrize("channels", [1, 3])
def test_bits_do_not_depend_on_the_batch(policy: str, channels: int, backend: str) -> None:
    """H1, A6, with fp32 activations, where no rounding hides the last bit.

    torch's own silu and its reductions give other bits at the end of a tensor and for another shape, and 40 channels
    are no multiple of a vector's length.
    """
    g = shape(act_dtype=DType.FP32, num_k_heads=1, num_v_heads=channels, head_v=8)
    for n in (1, 2, 3, 4):
        rig = Rig(policy, g, backend=backend).start(1, 2, 3)
        rig.step({1: 3}, {1: 2})
        rig.prefill(2, n)
        rig.step({1: n, 2: 4, 3: 1}, {1: 1, 2: 2, 3: 1})
        rig.step({2: 1, 1: n}, {2: 1, 1: n})


@every_policy
def test_a_single_row_may_live_in_any_slot(policy: str, backend: str) -> None:
    """H2 (turbo-tan#79): B=1, slot 3; the slots beside it stay as they are."""
    rig = Rig(policy, backend=backend)
    before = rig.bytes(1, 2, 4, 5, 6, 7, 8, 9, 10)
    rig.start(3)
    rig.step({3: 4}, {3: 3})
    assert torch.equal(rig.bytes(1, 2, 4, 5, 6, 7, 8, 9, 10), before)
    rig.check(3)


@every_policy
def test_a_commit_uses_the_rows_of_its_verify(policy: str, backend: str) -> None:
    """H4 (wtdcode/vllm-backport#63): accepts come two steps late, rows are reordered at every step."""
    rig = Rig(policy, backend=backend).start(1, 2, 3, 4, 5, 6)
    groups, pending = [(1, 2), (4, 3), (5, 6)], []
    for i in range(9):
        slots = groups[i % 3] if i % 2 else groups[i % 3][::-1]
        pending.append((rig.open(dict.fromkeys(slots, 4)), slots))
        if len(pending) == 3:
            (step, rows), slots = pending.pop(0)
            counts = [1 + (s + i) % 4 for s in slots]
            rig.accept(step, counts)
            for slot, n in zip(slots, counts, strict=True):
                rig.tokens[slot] += rows[slot][:n]
                rig.check(slot)


@every_policy
def test_slots_may_be_a_strided_column(policy: str, backend: str) -> None:
    """H5 (vllm-project/vllm#51682, #51680, #52792, #54103): one of 1+K columns, the others hold -7."""
    strided, plain = Rig(policy, backend=backend).start(1, 2), Rig(policy, backend=backend).start(1, 2)
    table = torch.full((2, 4), -7)
    table[:, 0] = index(1, 2)
    for rig, slots in ((strided, table[:, 0]), (plain, index(1, 2))):
        assert slots.is_contiguous() == (rig is plain)
        step = replace(Step.empty(2, 4), slots=slots, next_slots=slots)
        for counts in ([3, 1], [2, 4]):
            step.lens.fill_(4)
            step.accepted.copy_(index(*counts))
            rig.verify([(1, rig.ids(4)), (2, rig.ids(4))], step)
            commit = step.close()
            rig.conv.accept(commit)
            rig.policy.accept(commit)
    assert torch.equal(strided.bytes(*range(1, 12)), plain.bytes(*range(1, 12)))


def paged(policy: str, slots: int, backend: str) -> Rig:
    """A pool whose state is a view of pages with something behind it: a slot's stride exceeds HV * V * K."""
    rig = Rig(policy, backend=backend, num_slots=slots)
    name = "snapshots" if policy == "native" else "state"
    dense = rig.pool[name]
    pages = torch.zeros(*dense.shape[:2], dense[0, 0].numel() + 48)
    rig.pool.tensors[name] = pages[..., :-48].unflatten(-1, dense.shape[2:])
    assert not rig.pool[name].is_contiguous()
    rig.policy = policies.make(policy, rig.g, W, rig.pool, layer_params(rig.g, 0), backend)
    return rig


@record_policies
def test_updates_of_a_padded_page_are_seen_in_the_pool(policy: str, backend: str) -> None:
    """H6 (flashinfer#3490, #3145, #3127): B=2, slots up to 4,095."""
    rig = paged(policy, 4097, backend).start(7, 4095)
    rig.step({4095: 4, 7: 4}, {4095: 3, 7: 2})
    rig.step({7: 1, 4095: 4}, {7: 1, 4095: 4})
    rig.policy.settle(index(7, 4095))
    for slot in (7, 4095):
        assert torch.equal(rig.pool["state"][:, slot], rig.oracle.after(rig.tokens[slot]).state)


def test_native_refuses_a_pool_that_it_could_only_copy(backend: str) -> None:
    """H6: its rows are slots * T, a view only of slots that lie close together."""
    with pytest.raises(ValueError, match="snapshots has a slot stride of 4144, and needs 4096"):
        paged("native", 4, backend)
