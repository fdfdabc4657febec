"""Random lives under several policies against native, many of them; what goes wrong is cut down to a short script."""

import itertools
import os
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from math import ceil, isinf
from multiprocessing import get_context

import torch

from ssmspec import layout
from ssmspec.measure.judge import Failure, play
from ssmspec.measure.ledger import repaired
from ssmspec.measure.lives import Life, draw_setup
from ssmspec.measure.shrink import shrink
from ssmspec.runtime import events as ev
from ssmspec.runtime.engine import Engine
from ssmspec.runtime.setup import Device, Setup

EVENTS_PER_LIFE = 120
COMPILED_SHAPES = 16  # a shape takes half a minute to compile for: later lives come back to it
AHEAD = 4  # lives per process that may wait for an earlier one
MAX_REPLAYS = 400  # of a shrink


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


@dataclass(frozen=True, kw_only=True)
class Soak:
    """What lives are drawn from, and where they are played."""

    seed: int
    policies: Sequence[str] = layout.POLICY_NAMES
    backend: str = "torch"
    device: Device = Device.CPU
    length: int = EVENTS_PER_LIFE  # events of a life, without those that end it


@dataclass(frozen=True, kw_only=True)
class _Lived:
    """What one life came to."""

    kinds: Counter[str]
    found: Found | None = None


def live(index: int, soak: Soak) -> _Lived:
    """Life number ``index`` of a soak: drawn, played, and where it fails shrunk. Repeats exactly."""
    rng, policies, shapes = random.Random(f"{soak.seed}/{index}"), soak.policies, None
    if soak.backend == "triton":
        shapes = random.Random(f"{soak.seed}/shape {index % COMPILED_SHAPES}")
    setup = draw_setup(rng, soak.backend, soak.device, shapes)
    if setup.geometry.read_dtype is not None:
        policies = [p for p in policies if p != "native"]
    elif rng.random() < 0.75:  # else native plays dropped windows too, and their requests start over
        policies = [p for p in policies if p != "native"] or policies
    policies = sorted(policies, key=lambda p: p == "native")  # the others are blamed first
    lossy = "native" in policies
    script = list(Life(setup, rng, lossy=lossy).events(soak.length))
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


def cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(
    soak: Soak,
    *,
    minutes: float = float("inf"),
    events: float = float("inf"),
    jobs: int = 1,
    progress: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Play lives one after another, until the time is over, so many events are played, or one fails.

    Lives are judged in their order, so the same seed finds the same failure with any number of ``jobs``. Raises
    ValueError for more jobs than there are CPUs, and where the backend cannot compute on the device.
    """
    if jobs > cpus():
        raise ValueError(
            f"jobs={jobs} exceeds the {cpus()} CPUs there are; the nearest legal value is {cpus()}"
        )
    Engine("native", Setup(backend=soak.backend, device=soak.device))
    soak = replace(soak, length=int(min(events, soak.length)))
    jobs = jobs if isinf(events) else min(jobs, ceil(events / soak.length))
    report, end = Report(), time.monotonic() + 60 * minutes
    with closing(_lives(soak, jobs)) as lives:
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


def _lives(soak: Soak, jobs: int) -> Generator[_Lived, None, None]:
    """Endless; with several jobs lives are played ahead of the one that is asked for."""
    if jobs == 1:
        for index in itertools.count():
            yield live(index, soak)
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,))
    ahead: deque[Future[_Lived]] = deque()
    try:
        for index in itertools.count():
            ahead.append(pool.submit(live, index, soak))
            if len(ahead) > AHEAD * jobs:
                yield ahead.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
