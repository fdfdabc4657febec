"""What is alive in a script, and so which events are legal; scripts with gaps made legal again."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ssmspec.runtime import events as ev


@dataclass
class _Request:
    tokens: int  # of the prompt, and accepted ones
    missing: int  # at most that many of them are not computed
    away: str = ""  # "preempted" or "offloaded"
    lost: bool = False


class Ledger:
    """What is alive, as far as it decides which events are legal. ``lossy``: native is among the players."""

    def __init__(self, slots: int, *, lossy: bool) -> None:
        self.slots, self.lossy = slots, lossy
        self.requests: dict[str, _Request] = {}
        self.open: list[dict[str, int]] = []  # windows of verifies that wait for their accept

    @property
    def room(self) -> bool:
        """Whether one more request may hold a slot, so that two are left: for a move, and for a prefix that is hit."""
        return sum(not r.away for r in self.requests.values()) < self.slots - 2

    def named(self, *, away: str = "", lost: bool = False, decoding: bool = True) -> list[str]:
        """Requests without an open window that are where they are asked for; ``decoding``: nothing is missing."""
        verifying = {name for rows in self.open for name in rows}
        return [
            name
            for name, r in self.requests.items()
            if name not in verifying
            and r.away == away
            and r.lost <= lost
            and not (decoding and (r.missing or r.lost))
        ]

    def repair(self, e: ev.Event) -> ev.Event | None:
        """The event without what is illegal now; None where nothing is left of it."""
        idle = self.named(decoding=False)
        match e:
            case ev.Admit():
                legal = self.room and e.request not in self.requests
            case ev.Prefill():
                e = replace(e, chunks={r: n for r, n in e.chunks.items() if r in idle})
                legal = bool(e.chunks)
            case ev.Verify():
                e = replace(e, windows={r: n for r, n in e.windows.items() if r in self.named()})
                legal = bool(e.windows)
            case ev.Accept():
                rows = self.open[0] if self.open else {}
                e = replace(
                    e,
                    accepted={r: min(e.accepted.get(r, 1), n) for r, n in rows.items()},
                    force_flush=[r for r in e.force_flush if r in rows],
                    boundary={r: how for r, how in e.boundary.items() if r in rows},
                )
                legal = bool(self.open)
            case ev.Fork():
                legal = self.room and e.request in self.named() and e.to not in self.requests
            case ev.Resume() | ev.Restore():
                away = "preempted" if isinstance(e, ev.Resume) else "offloaded"
                legal = self.room and e.request in self.named(away=away, decoding=False)
            case ev.Preempt():
                legal = e.request in self.named(decoding=False, lost=True)
            case ev.Flush() | ev.Move():
                legal = e.request in idle
            case ev.Offload() | ev.Free():
                legal = e.request in self.named()
            case ev.Abort():
                legal = e.request in self.requests
            case _:
                raise AssertionError(e)
        return e if legal else None

    def apply(self, e: ev.Event) -> None:
        """Note what a legal event changes."""
        match e:
            case ev.Admit():
                self.requests[e.request] = _Request(e.prompt, e.prompt)
            case ev.Prefill():
                for name, n in e.chunks.items():
                    self.requests[name].missing = max(0, self.requests[name].missing - n)
            case ev.Verify():
                self.open.append(dict(e.windows))
            case ev.Accept():
                self.open.pop(0)
                for name, n in e.accepted.items():
                    self.requests[name].tokens += n
                    self.requests[name].lost = self.lossy and n == 0
            case ev.Fork():
                self.requests[e.to] = replace(self.requests[e.request])
            case ev.Preempt():
                r = self.requests[e.request]
                r.away, r.missing, r.lost = "preempted", r.tokens, False
            case ev.Offload():
                self.requests[e.request].away = "offloaded"
            case ev.Resume() | ev.Restore():
                self.requests[e.request].away = ""
            case ev.Abort() | ev.Free():
                del self.requests[e.request]
                for rows in self.open:
                    rows.pop(e.request, None)


def repaired(events: Iterable[ev.Event], slots: int, *, lossy: bool) -> Iterator[ev.Event]:
    """A script in which events are missing, made legal again."""
    ledger = Ledger(slots, lossy=lossy)
    for e in events:
        legal = ledger.repair(e)
        if legal is not None:
            ledger.apply(legal)
            yield legal
