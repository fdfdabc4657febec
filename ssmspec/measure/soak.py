"""Random lives under several policies against native, many of them; what goes wrong is cut down to a short script."""

import itertools
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context

import torch

from ssmspec import layout
from ssmspec.geometry import DType, Mode
from ssmspec.measure.exact import expected
from ssmspec.measure.lives import Life, draw_setup, repaired
from ssmspec.measure.lockstep import Contender, Lockstep, Pair
from ssmspec.runtime import events as ev
from ssmspec.runtime.setup import Setup

EVENTS_PER_LIFE = 120
MAX_REPLAYS = 400  # of a shrink


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What went wrong: a kind that survives shrinking, and a sentence."""

    kind: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Found:
    """A failing life, shrunk."""

    life: int
    failure: Failure
    setup: Setup
    policies: tuple[str, ...]
    drawn: int  # events up to the failure, before shrinking
    script: tuple[ev.Event, ...]

    def lines(self) -> Iterator[str]:
        """The script as ``ssmspec play`` reads it."""
        yield self.setup.dump()
        yield from map(ev.dump, self.script)


@dataclass(frozen=True, kw_only=True)
class Report:
    lives: int = 0
    events: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    found: Found | None = None


class _Wrong(Exception):
    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.failure = Failure(kind=kind, text=text)


class Judge:
    """Raises at the first pair that is not what ``exact.expected`` says, and where a recomputed state is another."""

    def __init__(self, contenders: Sequence[Contender]) -> None:
        self.expected = {c.name: expected(c.policy, c.g, c.w) for c in contenders}
        self.near = {c.name for c in contenders if _only_reordered(c)}
        self.functional = contenders[0].g.state_dtype is DType.FP32  # of the tokens, however they came in
        self.known: dict[tuple[str, str, int, int], torch.Tensor] = {}

    def __call__(self, pair: Pair) -> None:
        a, b = pair.native, pair.other
        where = f"event {pair.event}: {a.what} of {a.request!r}, layer {a.layer}, after {a.tokens} tokens"
        if a.what == "conv" or (a.what == "state" and self.functional):
            before = self.known.setdefault((a.what, a.request, a.layer, a.tokens), a.value)
            if not torch.equal(before, a.value):
                raise _Wrong(f"recomputed {a.what}", f"{where}: native, recomputed, is not what it was")
        e = self.expected[pair.contender]
        equal = {"output": e.outputs, "state": e.states, "conv": True}[a.what]
        if equal and not torch.equal(a.value, b.value):
            raise _Wrong(a.what, f"{where}: {pair.contender} is not native's, by {_gap(pair):.2g}")
        if not bool(b.value.float().isfinite().all()):
            raise _Wrong(f"finite {a.what}", f"{where}: {pair.contender} is not finite")
        if pair.contender in self.near and _gap(pair) > _tolerance(pair):
            raise _Wrong(f"near {a.what}", f"{where}: {pair.contender} is {_gap(pair):.2g} away from native")


def _only_reordered(c: Contender) -> bool:
    """Fast mode without a further loss: matrix products sum in another order."""
    return c.w.mode is Mode.FAST and {c.g.state_dtype, c.g.record_dtype, c.g.read_dtype or DType.FP32} == {
        DType.FP32
    }


def _gap(pair: Pair) -> float:
    gap = (pair.native.value.double() - pair.other.value.double()).abs()
    return float(gap.max()) if gap.numel() else 0.0


def _tolerance(pair: Pair) -> float:
    """Two units in the last place of the largest output, and 2**-14 for sums of fp32 in another order."""
    value = pair.native.value
    largest = max(1.0, float(value.double().abs().max()))
    return largest * (2 * torch.finfo(value.dtype).eps + 2.0**-14)


def contenders(setup: Setup, policies: Sequence[str]) -> tuple[Contender, list[Contender]]:
    """Native the judge, and the policies; native among them plays dropped windows too, and loses their requests."""
    plain = replace(setup.geometry, read_dtype=None)

    def contender(policy: str) -> Contender:
        g = plain if policy == "native" else setup.geometry
        return Contender(name=policy, policy=policy, g=g, w=setup.window)

    return replace(contender("native"), name="the judge"), [contender(p) for p in policies]


def play(setup: Setup, policies: Sequence[str], script: Iterable[ev.Event]) -> tuple[int, Failure | None]:
    """Events that were played, and what went wrong with the last of them."""
    played = opened = 0
    native, others = contenders(setup, policies)
    try:
        lockstep = Lockstep(
            native,
            others,
            Judge(others),
            num_slots=setup.slots,
            seed=setup.seed,
            backend=setup.backend,
            poison=setup.poison,
        )
        for event in script:
            played += 1
            opened += isinstance(event, ev.Verify) - isinstance(event, ev.Accept)
            lockstep.play(event)
        if not opened and lockstep.unmatched():
            raise _Wrong("unmatched", f"not seen by all: {lockstep.unmatched()[:3]}")
    except _Wrong as wrong:
        return played, wrong.failure
    except Exception as e:  # whatever it is, a legal event raised it
        return played, Failure(kind=type(e).__name__, text=f"event {played}: {type(e).__name__}: {e}")
    return played, None


@dataclass(frozen=True, kw_only=True)
class _Lived:
    """What one life came to."""

    kinds: Counter[str]
    found: Found | None = None


def live(index: int, seed: int, policies: Sequence[str], backend: str) -> _Lived:
    """Life number ``index`` of a soak: drawn, played, and where it fails shrunk. Repeats exactly."""
    rng = random.Random(f"{seed}/{index}")
    setup = draw_setup(rng, backend)
    if setup.geometry.read_dtype is not None:
        policies = [p for p in policies if p != "native"]
    elif rng.random() < 0.75:  # else native plays dropped windows too, and their requests start over
        policies = [p for p in policies if p != "native"] or policies
    lossy = "native" in policies
    script = list(Life(setup, rng, lossy=lossy).events(EVENTS_PER_LIFE))
    with torch.inference_mode():
        played, failure = play(setup, policies, script)
        kinds = Counter(e.kind for e in script[:played])
        if failure is None:
            return _Lived(kinds=kinds)
        return _Lived(kinds=kinds, found=_shrunk(index, setup, tuple(policies), script[:played], failure))


def _shrunk(
    index: int, setup: Setup, policies: tuple[str, ...], script: list[ev.Event], failure: Failure
) -> Found:
    drawn = len(script)
    replays = MAX_REPLAYS

    def fails(setup: Setup, events: Iterable[ev.Event]) -> list[ev.Event] | None:
        """The events up to the same failure; None without it."""
        nonlocal replays
        replays -= 1
        legal = list(repaired(events, setup.slots, lossy="native" in policies))
        played, found = play(setup, policies, legal) if replays >= 0 else (0, None)
        return legal[:played] if found and found.kind == failure.kind else None

    for simpler in _simpler_setups(setup):
        found = fails(simpler, script)
        if found:
            setup, script = simpler, found
    script = shrink(script, lambda events: fails(setup, events))
    _, last = play(setup, policies, script)
    assert last is not None
    return Found(life=index, failure=last, setup=setup, policies=policies, drawn=drawn, script=tuple(script))


def _simpler_setups(setup: Setup) -> Iterator[Setup]:
    """One simplification at a time."""
    yield replace(setup, geometry=replace(setup.geometry, num_layers=1))


def shrink(
    script: list[ev.Event], fails: Callable[[list[ev.Event]], list[ev.Event] | None]
) -> list[ev.Event]:
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


def run(
    seed: int,
    policies: Sequence[str] = layout.POLICY_NAMES,
    *,
    backend: str = "torch",
    minutes: float = float("inf"),
    events: float = float("inf"),
    jobs: int = 1,
    progress: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Play lives one after another, until the time is over, so many events are played, or one fails.

    Lives are judged in their order, so the same seed finds the same failure with any number of ``jobs``.
    """
    report, end = Report(), time.monotonic() + 60 * minutes
    for lived in _lives(seed, tuple(policies), backend, jobs):
        report = replace(
            report,
            lives=report.lives + 1,
            events=report.events + lived.kinds.total(),
            kinds=report.kinds + lived.kinds,
            found=lived.found,
        )
        progress(report)
        if report.found or report.events >= events or time.monotonic() >= end:
            break
    return report


def _lives(seed: int, policies: tuple[str, ...], backend: str, jobs: int) -> Iterator[_Lived]:
    """Endless; with several jobs a few lives ahead of the one that is asked for."""
    if jobs == 1:
        for index in itertools.count():
            yield live(index, seed, policies, backend)
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,))
    ahead: deque[Future[_Lived]] = deque()
    try:
        for index in itertools.count():
            ahead.append(pool.submit(live, index, seed, policies, backend))
            if len(ahead) > 3 * jobs:
                yield ahead.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
