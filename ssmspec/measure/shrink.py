"""A failing script made short."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from ssmspec.runtime import events as ev

Fails = Callable[[list[ev.Event]], list[ev.Event] | None]
"""The events that are left of a script, up to the failure; None where it does not fail."""


def shrink(script: list[ev.Event], fails: Fails) -> list[ev.Event]:
    """Take out halves, quarters and single events, then parts of events, while it still ``fails``.

    Delta debugging (Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input, 2002).
    """
    size = max(1, len(script) // 2)
    while True:
        at, before = 0, len(script)
        while at < len(script):
            smaller = fails(script[:at] + script[at + size :])
            script, at = (smaller, at) if smaller else (script, at + size)
        if size == 1 and len(script) == before:
            break
        size = size if len(script) < before else max(1, size // 2)
    for at in range(len(script)):
        for simpler in _simpler_events(script[at]) if at < len(script) else ():
            script = fails([*script[:at], simpler, *script[at + 1 :]]) or script
    return script


def _simpler_events(e: ev.Event) -> Iterator[ev.Event]:
    match e:
        case ev.Verify():
            yield replace(e, padding=0)
            for name in e.windows if len(e.windows) > 1 else ():
                yield replace(e, windows={r: n for r, n in e.windows.items() if r != name})
        case ev.Accept():
            yield replace(e, force_flush=[], boundary={})
        case ev.Admit():
            yield from (replace(e, prompt=n) for n in (e.prompt // 2, 1) if n)
