"""`ssmspec play`: a script of events under the policies, in lockstep with native."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Annotated, Any, TextIO

import typer

from ssmspec.layout import POLICY_NAMES
from ssmspec.measure.report import Played
from ssmspec.runtime import events, setup
from ssmspec.runtime.events import Event, ScriptError
from ssmspec.runtime.setup import Setup
from ssmspec.runtime.slots import SlotError

from . import parse, render
from .console import out, progress
from .errors import UsageError
from .study import single_thread


class Script:
    """A script as it is read: its setup, then its events, and the line that was read last."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.line, self.count, self.setup = stream, 0, 0, Setup()
        self._items: Iterator[Event | dict[str, Any]] = events.read(self._lines())

    def begin(self) -> None:
        """Read the setup, if there is one. Raises ScriptError."""
        first = next(self._items, None)
        if isinstance(first, dict):
            self.setup = _loaded(first)
            first = next(self._items, None)
        if first is None:
            raise ScriptError("there is no event in it")
        self._items = chain([first], self._items)

    def _lines(self) -> Iterator[str]:
        longest = events.MAX_LINE + 2  # what is longer is refused, and need not be read to its end
        while line := self.stream.readline(longest):
            self.line += 1
            yield line

    def events(self) -> Iterator[Event]:
        for item in self._items:
            assert isinstance(item, Event), "a setup comes first or is refused"
            self.count += 1
            yield item


def _loaded(first: dict[str, Any]) -> Setup:
    try:
        return setup.load(first)
    except ScriptError as error:
        meant = "" if first.keys() <= setup.KEYS.keys() else '; an event has the key "event"'
        raise ScriptError(f"{error}{meant}") from None


@contextmanager
def _opened(name: str) -> Iterator[TextIO]:
    try:
        if name == "-":
            yield sys.stdin
        else:
            with open(name, encoding="utf-8") as stream:
                yield stream
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}") from None


def play(
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT.jsonl", help="One JSON object a line; - is stdin.")
    ],
    policy: Annotated[
        str, typer.Option("--policy", metavar="LIST", help="Who plays along with native.")
    ] = ",".join(POLICY_NAMES),
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Play a script of events under each policy, and compare outputs and states with native's, bit for bit.

    Each line is one event, and names its kind and its requests:

      {"event": "admit", "request": "a", "prompt": 6}
      {"event": "prefill", "chunks": {"a": 6}}
      {"event": "verify", "windows": {"a": 4}}
      {"event": "accept", "accepted": {"a": 3}}
      {"event": "fork", "request": "a", "to": "b"}
      {"event": "free", "request": "a"}

    Like free, these take a request: flush, preempt, resume, offload, restore, move, abort.

    The first line may be a setup instead, which says what is played, with any of these keys:

      {"model": "qwen3.5-4b", "window": 4, "ring": 16,
       "align": 7, "state_dtype": "float16",
       "mode": "exact", "seed": 1, "slots": 32}
    """
    names = parse.choices("policy", policy, {name: name for name in POLICY_NAMES})
    single_thread()
    with _opened(script) as stream, progress("playing") as tell:
        played = _play(script, stream, names, tell)
    if json:
        typer.echo(played.json(), nl=False)
    else:
        render.show_played(out(), played)
    if not played.ok:
        raise typer.Exit(1)


def _play(name: str, stream: TextIO, policies: list[str], tell: Callable[[str], None]) -> Played:
    """A complaint names the line of the script."""
    from ssmspec.measure import exact, judge

    script, seen = Script(stream), list[Event]()

    def kept() -> Iterator[Event]:
        for event in script.events():
            seen.append(event)
            yield event

    try:
        script.begin()
        mode = script.setup.window.mode
        results = exact.play(
            script.setup,
            kept(),
            [mode],
            ["native", *policies],
            oracle=False,
            progress=lambda step: tell(f"line {script.line}, step {step}"),
        )
    except ScriptError as error:
        raise UsageError(f"{name}: {error}") from None
    except (ValueError, SlotError) as error:
        raise UsageError(f"{name}: line {script.line}: {error}") from None
    failure = judge.check(script.setup, policies, seen)
    return Played(
        script=name,
        setup=script.setup,
        events=script.count,
        results=tuple(results),
        wrong=failure.text if failure else None,
    )
