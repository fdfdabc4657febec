"""What one launch reads and what it writes are disjoint. A sequential reference cannot see a race, so count."""

import itertools

import pytest

from ssmspec import layout
from ssmspec.geometry import Window


@pytest.mark.parametrize("t", [1, 2, 4, 7])
@pytest.mark.parametrize("policy", ["every-step", "checkpointing"])
def test_a_window_never_overwrites_the_records_replayed_before_it(policy: str, t: int) -> None:
    """Records overwritten while a sibling program reads them: ROCm/ATOM#1883."""
    ring = layout.ring(policy, Window(max_len=t))
    most = max(ring.limit, t)  # an every-step ring holds at most one window's accepted tokens
    for base, count, n in itertools.product(range(ring.capacity), range(most + 1), range(1, t + 1)):
        read = {(base + j) % ring.capacity for j in range(count)}
        written = {(base + count + j) % ring.capacity for j in range(n)}
        assert len(read) == count
        assert len(written) == n
        assert read.isdisjoint(written)


@pytest.mark.parametrize("t", [1, 4, 8])
def test_the_ring_is_never_overfull(t: int) -> None:
    """0 <= count <= L whatever is accepted, so count + len <= R at every verify."""
    ring = layout.ring("checkpointing", Window(max_len=t))
    for count, n in itertools.product(range(ring.limit + 1), range(1, t + 1)):
        kept = 0 if count + n > ring.limit else count
        assert all(kept + accepted <= ring.limit for accepted in range(n + 1))
