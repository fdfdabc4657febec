"""Random lives under several policies against native, many of them; what goes wrong is cut down to a short script."""

import itertools
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from multiprocessing import get_context

import torch

from ssmspec import layout
from ssmspec.geometry import DType, Mode
from ssmspec.measure.exact import expected
from ssmspec.measure.ledger import repaired
from ssmspec.measure.lives import Life, draw_setup
from ssmspec.measure.lockstep import Contender, Lockstep, Pair
from ssmspec.measure.shrink import shrink
from ssmspec.runtime import events as ev
from ssmspec.runtime.setup import Setup

EVENTS_PER_LIFE = 120
MAX_REPLAYS = 400  # of a shrink


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What went wrong: a kind that survives shrinking, and a sentence."""

    kind: str
    text: str
    policy: str | None = None  # whose it is, where one alone is wrong


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
    def __init__(self, kind: str, text: str, policy: str | None = None) -> None:
        super().__init__(text)
        self.failure = Failure(kind=kind, text=text, policy=policy)


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
        e, policy = self.expected[pair.contender], pair.contender
        equal = {"output": e.outputs, "state": e.states, "conv": True}[a.what]
        if equal and not torch.equal(a.value, b.value):
            raise _Wrong(a.what, f"{where}: {policy} is not native's, by {_gap(pair):.2g}", policy)
        if not bool(b.value.float().isfinite().all()):
            raise _Wrong(f"finite {a.what}", f"{where}: {policy} is not finite", policy)
        if policy in self.near and _gap(pair) > _tolerance(pair):
            raise _Wrong(f"near {a.what}", f"{where}: {policy} is {_gap(pair):.2g} away from native", policy)


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
    """Fewer policies, fewer layers, fewer events, as long as it is the same kind of failure."""
    drawn, replays, lossy = len(script), MAX_REPLAYS, "native" in policies

    def fails(setup: Setup, policies: tuple[str, ...], events: Iterable[ev.Event]) -> list[ev.Event] | None:
        """The events up to the failure; None without it."""
        nonlocal replays
        replays -= 1
        legal = list(repaired(events, setup.slots, lossy=lossy))
        played, found = play(setup, policies, legal) if replays >= 0 else (0, None)
        return legal[:played] if found and found.kind == failure.kind else None

    alone = (failure.policy,) if failure.policy else policies
    one_layer = replace(setup, geometry=replace(setup.geometry, num_layers=1))
    for simpler, fewer in ((setup, alone), (one_layer, policies), (one_layer, alone)):
        found = fails(simpler, fewer, script)
        if found:
            setup, policies, script = simpler, fewer, found
    script = shrink(script, lambda events: fails(setup, policies, events))
    _, last = play(setup, policies, script)
    assert last is not None
    return Found(life=index, failure=last, setup=setup, policies=policies, drawn=drawn, script=tuple(script))


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
    with closing(_lives(seed, tuple(policies), backend, jobs)) as lives:
        for lived in lives:
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


def _lives(seed: int, policies: tuple[str, ...], backend: str, jobs: int) -> Generator[_Lived, None, None]:
    """Endless; with several jobs as many lives are played ahead of the one that is asked for."""
    if jobs == 1:
        for index in itertools.count():
            yield live(index, seed, policies, backend)
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,))
    ahead: deque[Future[_Lived]] = deque()
    try:
        for index in itertools.count():
            ahead.append(pool.submit(live, index, seed, policies, backend))
            if len(ahead) > jobs:
                yield ahead.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
