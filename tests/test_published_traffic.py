"""What others have published about traffic comes out of this code, within the tolerance that each check states."""

from collections.abc import Iterable

import pytest

from ssmspec.acceptance import from_rate
from ssmspec.measure import checks, traffic


def test_every_published_number_is_met_within_its_tolerance() -> None:
    results = checks.traffic_checks()
    assert [c.name for c in results if not c.ok] == []
    assert all(c.source and c.note for c in results)
    published = {(c.expected, c.tolerance, c.unit) for c in results if "closed form" not in c.name}
    assert {(-38.1, 2.0, "%"), (0.53, 0.005, "x"), (1.7, 0.05, "x")} <= published
    assert any(c.expected == 3 / (16 - 4 + 3) for c in results)


def test_a_check_outside_its_tolerance_fails() -> None:
    def check(got: float) -> bool:
        return checks.Check(name="n", expected=1.0, got=got, unit="x", source="s", tolerance=0.25).ok

    assert (check(0.5), check(0.75), check(1.25), check(1.5)) == (False, True, True, False)


@pytest.mark.parametrize(("base", "t"), [(16, 4), (16, 8), (8, 8), (32, 2)])
def test_our_flush_rule_is_the_published_one(base: int, t: int) -> None:
    """ReplaySSM decides at a step's end for the next: new_wp + 2T > L where L = B + T (vllm-project/vllm#49887)."""

    def published(counts: Iterable[int]) -> list[bool]:
        due, written, flushes = 2 * t > base + t, 0, []
        for n in counts:
            flushes.append(due)
            written = n if due else written + n
            due = written + 2 * t > base + t
        return flushes

    counts = list(from_rate(0.8, t - 1).sample(300, seed=3))
    for steps in range(1, 301):
        flushes = published(counts[:steps])
        assert traffic.cadence(base, t, counts[:steps]).flush_fraction == sum(flushes) / steps
