"""A policy's bytes over the number of drafts: what a plot shows, and where a policy starts to pay."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ssmspec.acceptance import DEFAULT_RATE, Acceptance
from ssmspec.geometry import MAX_RING, Mode, Window
from ssmspec.layout import POLICY_NAMES
from ssmspec.measure import traffic
from ssmspec.measure.sweep import Case, with_ring
from ssmspec.measure.traffic import Traffic

MARGIN = 0.05  # a difference below it does not show in measured times
DRAFTS = tuple(range(8))
STEPS = 2000  # of a simulated ring: within 0.2 % of 10,000


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Bytes of one layer-step by K, everything else as in one combination."""

    policy: str
    points: dict[int, Traffic]

    @property
    def loses(self) -> dict[int, float]:
        """Bytes over native's, by K, where they are more by the margin."""
        return {k: t.vs_native for k, t in self.points.items() if t.vs_native > 1 + MARGIN}

    @property
    def pays_from(self) -> int | None:
        """The least K from which on every longer window saves more than the margin."""
        last = max((k for k, t in self.points.items() if t.vs_native > 1 - MARGIN), default=-1)
        return min((k for k in self.points if k > last), default=None)


def extended(a: Acceptance, drafts: int) -> Acceptance:
    """The process with that many drafts: what is known is cut, or goes on at the last draft's conditional rate."""
    known = [1.0, *a.per_position[:drafts]]
    rate = DEFAULT_RATE if len(known) == 1 else known[-1] / known[-2] if known[-2] else 0.0
    while len(known) <= drafts:
        known.append(known[-1] * rate)
    return Acceptance(per_position=tuple(known[1:]))


def over_drafts(
    case: Case,
    policies: Sequence[str] = POLICY_NAMES,
    drafts: Sequence[int] = DRAFTS,
    mode: Mode = Mode.EXACT,
) -> list[Curve]:
    """Each policy at each K whose window the ring holds; one that was not asked for follows the window and the mode."""
    g, ring = case.model.geometry.shard(case.settings.tp), case.window.limit
    most = min(ring, MAX_RING - ring) if case.ring_asked else MAX_RING // 3  # a default ring is 2T
    asked = ring if case.ring_asked else None
    windows = [Window(max_len=k + 1, ring_len=asked, mode=mode) for k in drafts if k < most]
    found = []
    for policy in policies:
        shape = replace(g, read_dtype=None) if policy == "native" else g
        points = {
            w.max_len - 1: traffic.of(policy, shape, w, extended(case.acceptance, w.max_len - 1), steps=STEPS)
            for w in (with_ring(case, policy, w) for w in windows)
        }
        found.append(Curve(policy=policy, points=points))
    return found
