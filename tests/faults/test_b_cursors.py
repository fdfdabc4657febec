"""B: what an accepted count does to a ring's cursors: moved as published, once, and never out of the ring."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numeric import near
from rig import RING_POLICIES, Rig, every_recurrence, index, shape

from ssmspec import layout
from ssmspec.geometry import Arch, Mode, Window
from ssmspec.kernels.base import Kernels
from ssmspec.kernels.cursors import advance
from ssmspec.policies import POLICIES
from ssmspec.pool import StatePool
from ssmspec.runtime.content import layer_params
from ssmspec.step import Step


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
