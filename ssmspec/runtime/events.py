"""The events of a request's life, and scripts of them: one JSON object per line, a setup line first if any."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, asdict, dataclass, field, fields
from difflib import get_close_matches
from typing import Any, ClassVar

from ssmspec.checked import show

MAX_LINE = 1 << 20
MAX_TOKENS = 1 << 20
BOUNDARIES = ("leave", "copy", "stay")


class ScriptError(ValueError):
    """A script line is not an event: says which line, which key, and what would be legal."""


@dataclass(frozen=True, kw_only=True)
class Event:
    kind: ClassVar[str]


@dataclass(frozen=True, kw_only=True)
class Admit(Event):
    """A request enters. Requests with the same ``text`` share their prompt's tokens, and so its cached prefixes."""

    kind = "admit"
    request: str
    prompt: int
    text: int = 0
    reuse: bool = True  # start from the longest cached prefix


@dataclass(frozen=True, kw_only=True)
class Prefill(Event):
    """Compute up to that many prompt tokens of each request."""

    kind = "prefill"
    chunks: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Verify(Event):
    """One batch: a window length per request, 1 for a row without drafts; the order of rows is the batch's."""

    kind = "verify"
    windows: dict[str, int]
    padding: int = 0  # null rows behind them
    salt: int | None = None  # distinguishes the drafts of two attempts; None: counted


@dataclass(frozen=True, kw_only=True)
class Accept(Event):
    """Close the oldest open verify: accepted tokens per request, bonus included; 0 drops the window."""

    kind = "accept"
    accepted: dict[str, int]
    force_flush: list[str] = field(default_factory=list)
    boundary: dict[str, str] = field(default_factory=dict)  # one of BOUNDARIES; "leave" where nothing is said


@dataclass(frozen=True, kw_only=True)
class _One(Event):
    request: str


@dataclass(frozen=True, kw_only=True)
class Flush(_One):
    """Settle: the checkpoint becomes the state."""

    kind = "flush"


@dataclass(frozen=True, kw_only=True)
class Preempt(_One):
    """The slot is taken away and the state with it; the tokens stay."""

    kind = "preempt"


@dataclass(frozen=True, kw_only=True)
class Resume(_One):
    """A preempted request starts over from the longest cached prefix; its tokens are the prompt."""

    kind = "resume"


@dataclass(frozen=True, kw_only=True)
class Offload(_One):
    """Copy the state to the host, settled or as it is, and give the slot back."""

    kind = "offload"
    settle: bool = True


@dataclass(frozen=True, kw_only=True)
class Restore(_One):
    """An offloaded request comes back, into any slot."""

    kind = "restore"


@dataclass(frozen=True, kw_only=True)
class Move(_One):
    """Compaction: the slot's content goes to another slot, records and cursors included."""

    kind = "move"


@dataclass(frozen=True, kw_only=True)
class Fork(_One):
    """A second request with the same past."""

    kind = "fork"
    to: str


@dataclass(frozen=True, kw_only=True)
class Abort(_One):
    """The request ends now, an open window included."""

    kind = "abort"


@dataclass(frozen=True, kw_only=True)
class Free(_One):
    """The request has finished; its last state is looked at."""

    kind = "free"


EVENTS: dict[str, type[Event]] = {
    e.kind: e
    for e in (
        *(Admit, Prefill, Verify, Accept, Flush, Preempt, Resume),
        *(Offload, Restore, Move, Fork, Abort, Free),
    )
}


def dump(event: Event) -> str:
    """One line of a script; defaults are left out."""
    values = asdict(event)
    for f in fields(event):
        default = f.default if f.default_factory is MISSING else f.default_factory()
        if values[f.name] == default:
            del values[f.name]
    return json.dumps({"event": event.kind, **values})


def read(lines: Iterable[str]) -> Iterator[Event | dict[str, Any]]:
    """Parse a script lazily. A line without "event" is a setup and may only come first. Raises ScriptError."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield _event(line, first=number == 1)
        except ScriptError as e:
            raise ScriptError(f"line {number}: {e}") from None


def _event(line: str, first: bool) -> Event | dict[str, Any]:
    if len(line) > MAX_LINE:
        raise ScriptError(f"longer than {MAX_LINE} characters")
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise ScriptError(f"not JSON: {e}") from None
    if not isinstance(data, dict):
        raise ScriptError(f"an object is wanted, not {type(data).__name__}")
    if "event" not in data and first:
        return data
    kind = data.pop("event", None)
    if not isinstance(kind, str) or kind not in EVENTS:
        raise ScriptError(
            f"event={show(kind)} is not one of {', '.join(EVENTS)}{_nearest(str(kind)[:80], EVENTS)}"
        )
    wanted = {f.name: f for f in fields(EVENTS[kind])}
    for key in data:
        if key not in wanted:
            raise ScriptError(
                f"{kind}: unknown key {show(key)}; it takes {', '.join(wanted)}{_nearest(key[:80], wanted)}"
            )
    for name, f in wanted.items():
        if name in data:
            _check(f"{kind}: {name}", data[name], str(f.type))
        elif f.default is MISSING and f.default_factory is MISSING:
            raise ScriptError(f"{kind}: {name} is missing")
    return EVENTS[kind](**data)


def _nearest(word: str, among: Iterable[str]) -> str:
    close = get_close_matches(word, list(among), 1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _check(what: str, value: Any, kind: str) -> None:
    """``kind`` is the field's annotation as text: one of the few that events use."""
    if kind.startswith("dict"):
        if not isinstance(value, dict):
            raise ScriptError(f"{what} must be an object, not {value!r:.80}")
        for key, item in value.items():
            _check(f"{what}[{key!r:.80}]", item, "int" if "int" in kind else "str")
    elif kind.startswith("list"):
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise ScriptError(f"{what} must be a list of request names, not {value!r:.80}")
    elif "int" in kind:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_TOKENS:
            raise ScriptError(f"{what}={value!r:.80} must be a whole number in 0..{MAX_TOKENS}")
    elif not isinstance(value, bool if "bool" in kind else str):
        raise ScriptError(f"{what}={value!r:.80} must be {'true or false' if 'bool' in kind else 'a name'}")
