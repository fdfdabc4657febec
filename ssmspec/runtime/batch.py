"""A verified batch that waits for its accepted counts; its rows are those of the time it was verified."""

from collections.abc import Sequence
from dataclasses import dataclass

from ssmspec.pool import NULL_SLOT
from ssmspec.runtime.events import BOUNDARIES, Accept
from ssmspec.runtime.lifecycle import LifecycleError, Phase, Request
from ssmspec.step import Commit, Step


@dataclass(frozen=True)
class Boundary:
    mark: int  # accepted tokens before the block boundary; 0: none is crossed
    slot: int  # where the boundary's state goes
    next_slot: int  # where the request goes on


@dataclass(frozen=True)
class Batch:
    step: Step
    rows: list[Request]

    @classmethod
    def of(cls, rows: Sequence[Request], padding: int, max_len: int) -> "Batch":
        """Stage the rows' open windows, and null rows behind them, written both ways there are."""
        slots = [r.slot for r in rows] + [NULL_SLOT if i % 2 else -1 for i in range(padding)]
        step = Step.empty(len(slots), max_len)
        step.stage(slots, [len(r.window) for r in rows])
        return cls(step, [*rows])

    @property
    def live(self) -> list[Request]:
        """Rows that were not aborted since."""
        return [r for r in self.rows if r.phase is not Phase.GONE]

    def check(self, e: Accept) -> None:
        """Raise LifecycleError unless the event has a legal count for each live row, and for no other."""
        if {r.name for r in self.live} != e.accepted.keys():
            raise LifecycleError(
                f"accept: the oldest open step holds {sorted(r.name for r in self.live)}, not {sorted(e.accepted)}"
            )
        for r in self.live:
            if not 0 <= e.accepted[r.name] <= len(r.window):
                raise LifecycleError(
                    f"accept {r.name!r}: accepted={e.accepted[r.name]} is outside 0..{len(r.window)}"
                )
        for name, how in e.boundary.items():
            if how not in BOUNDARIES:
                legal = ", ".join(BOUNDARIES)
                raise LifecycleError(f"accept {name!r}: boundary={how!r:.80} is not one of {legal}")

    def decide(self, e: Accept, boundaries: dict[str, Boundary]) -> Commit:
        """Write the counts into the step and close it; rows without one were aborted, and become null rows."""
        rows = [None if r.phase is Phase.GONE else r for r in self.rows]
        crossed = [boundaries[r.name] if r else Boundary(0, NULL_SLOT, NULL_SLOT) for r in rows]
        self.step.stage(
            [r.slot if r else NULL_SLOT for r in rows],
            [len(r.window) if r else 0 for r in rows],
            accepted=[e.accepted[r.name] if r else 0 for r in rows],
            mark=[b.mark for b in crossed],
            mark_slots=[b.slot for b in crossed],
            next_slots=[b.next_slot for b in crossed],
            force_flush=[r is not None and r.name in e.force_flush for r in rows],
        )
        return self.step.close(debug=True)
