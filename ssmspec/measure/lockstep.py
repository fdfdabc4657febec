"""One life under several policies at once. Native is the judge, and runs only the windows that are not dropped."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ssmspec.geometry import Geometry, Window
from ssmspec.runtime import events
from ssmspec.runtime.engine import Engine, Seen
from ssmspec.runtime.setup import Setup

Key = tuple[str, str, int, int]  # what, request, layer, tokens


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A policy in the lockstep, with its own geometry (formats) and window (mode)."""

    name: str
    policy: str
    g: Geometry
    w: Window
    backend: str = "torch"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The same thing as native and as a contender saw it."""

    event: int
    contender: str
    native: Seen
    other: Seen


class Lockstep:
    """``judge`` is called with each pair as soon as both sides have seen it.

    Geometry, window and backend are the contenders'. The setup's poison fills the others' pools and not native's,
    so that stale memory shows even where all of them read it.
    """

    def __init__(
        self,
        native: Contender,
        others: Sequence[Contender],
        judge: Callable[[Pair], None],
        setup: Setup,
    ) -> None:
        self.judge, self.count = judge, 0
        self._seen: dict[str, dict[Key, list[Seen]]] = {}
        self._verified: list[events.Verify] = []

        def engine(c: Contender, poison: int | None) -> Engine:
            queue = self._seen[c.name] = defaultdict(list)

            def see(s: Seen) -> None:
                queue[s.what, s.request, s.layer, s.tokens].append(s)

            its = replace(setup, geometry=c.g, window=c.w, backend=c.backend, poison=poison)
            return Engine(c.policy, its, see)

        self.native_name = native.name
        self.native = engine(native, None)
        self.others = {c.name: engine(c, setup.poison) for c in others}

    def play(self, event: events.Event) -> None:
        """One event for all. What a contender refuses is raised before native has changed."""
        self.count += 1
        if isinstance(event, events.Verify):
            event = replace(event, salt=self.count if event.salt is None else event.salt)
            self._verified.append(event)
        for other in self.others.values():
            other.play(event)
            other.check_integrity()
        if isinstance(event, events.Accept):
            self._judge_accepts(event)
        elif isinstance(event, events.Abort):
            self._forget(event.request)
        if not isinstance(event, events.Verify | events.Accept):
            self.native.play(event)
        self._match()

    def _judge_accepts(self, event: events.Accept) -> None:
        """Native plays the windows whose tokens count, at the time they count."""
        verified = self._verified.pop(0)
        for name, accepted in event.accepted.items():
            if accepted == 0:
                self._drop(name)
        kept = {name: n for name, n in event.accepted.items() if n > 0}
        windows = {name: n for name, n in verified.windows.items() if name in kept}
        if kept:
            self.native.play(replace(verified, windows=windows))
            self.native.play(replace(event, accepted=kept))
        self.native.check_integrity()

    def _forget(self, request: str) -> None:
        self._verified = [
            replace(v, windows={r: n for r, n in v.windows.items() if r != request}) for v in self._verified
        ]
        self._drop(request)

    def _drop(self, request: str) -> None:
        for name, queue in self._seen.items():
            if name != self.native_name:
                for key in [k for k in queue if k[1] == request]:
                    del queue[key]

    def _match(self) -> None:
        native = self._seen[self.native_name]
        for key in [k for k in native if all(k in self._seen[name] for name in self.others)]:
            ours = native.pop(key)
            for name in self.others:
                for a, b in zip(ours, self._seen[name].pop(key), strict=True):
                    self.judge(Pair(event=self.count, contender=name, native=a, other=b))

    def unmatched(self) -> list[Key]:
        """What one side saw and another did not, open windows aside: must be empty when all windows are closed."""
        return [key for queue in self._seen.values() for key in queue]
