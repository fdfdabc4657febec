"""A request and the legal orders of its events. What is illegal is refused by name before anything changes."""

from dataclasses import dataclass, field
from enum import StrEnum

from ssmspec.runtime.exported import Exported


class LifecycleError(ValueError):
    """An event came at a time it may not: names the request, its phase, and what it needs."""


class Phase(StrEnum):
    PREFILLING = "prefilling"
    DECODING = "decoding"
    VERIFYING = "verifying"  # a window is open: only accept and abort are legal
    LOST = "lost"  # native after a dropped window: its start state is overwritten; any after a torn verify
    PREEMPTED = "preempted"
    OFFLOADED = "offloaded"
    GONE = "gone"


@dataclass
class Request:
    name: str
    seed: int
    prompt: list[int]  # token ids
    slot: int = 0
    tokens: list[int] = field(default_factory=list)  # computed: prompt tokens and accepted ones
    window: list[int] = field(default_factory=list)  # open drafts
    phase: Phase = Phase.PREFILLING
    stored: Exported | None = None

    def need(self, what: str, *phases: Phase) -> None:
        """Raise LifecycleError unless the request is in one of ``phases``."""
        if self.phase in phases:
            return
        why = {
            Phase.VERIFYING: "its window is still open: accept it, or drop it with 0 accepted tokens",
            Phase.LOST: "native has overwritten the start state of its dropped window, or its verify failed halfway:"
            " preempt and resume it",
            Phase.PREFILLING: "its prompt is not computed yet",
            Phase.DECODING: "its prompt is computed and no window of it is open",
            Phase.PREEMPTED: "it has no slot: resume it",
            Phase.OFFLOADED: "its state is on the host: restore it",
            Phase.GONE: "it was aborted",
        }[self.phase]
        raise LifecycleError(f"{what} {self.name!r}: the request is {self.phase}; {why}")

    def prefilled(self) -> None:
        """Prompt tokens were computed."""
        if len(self.tokens) >= len(self.prompt):
            self.phase = Phase.DECODING

    def accept(self, count: int, lossy: bool) -> None:
        """``count`` tokens of the open window are accepted; ``lossy``: a dropped window costs the state."""
        self.tokens += self.window[:count]
        self.window = []
        self.phase = Phase.LOST if lossy and count == 0 else Phase.DECODING

    def lose(self) -> None:
        """Its verify failed: a ring may be folded in some layers and not in others."""
        self.window = []
        self.phase = Phase.LOST
