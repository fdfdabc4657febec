"""The fastest launches and ring lengths on this GPU, as a table of kernels/choices.py. Every candidate is checked against native."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from triton.errors import TritonError

from ssmspec import presets
from ssmspec.acceptance import Acceptance
from ssmspec.geometry import MAX_RING, DType, Geometry, Mode, Window
from ssmspec.kernels import choices, hopper
from ssmspec.kernels.choices import Kernel, Launch, RingChoice, ShapeClass, Table, Tuned
from ssmspec.measure import bench

GAIN = 0.98  # of the time by the kernels' own rule, at most: less is noise
RINGS = (1, 1.5, 2, 3, 4)  # windows that a ring holds
REFUSED = (
    RuntimeError,
    ValueError,
    AssertionError,
    TritonError,
)  # more than the device has, or what no kernel takes


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is tuned together: a layer's launches at one window length and batch size."""

    geometry: Geometry
    window: Window
    batch: int
    acceptance: Acceptance

    @property
    def kernel(self) -> Kernel:
        if self.window.mode is Mode.FAST:
            return Kernel.FAST
        served = hopper.runs_here() and hopper.unsupported(self.geometry, self.window) is None
        return Kernel.HOPPER if served else Kernel.WINDOW


def launches(case: Case, kernel: Kernel) -> list[Launch]:
    """What a kernel can be launched as; a number that does not divide V is left out."""
    v = case.geometry.head_v
    if kernel is Kernel.HOPPER:
        return [Launch(warps=4, registers=n, rows=rows) for rows in (32, 64) for n in (122, 128)]
    if kernel is Kernel.WINDOW:
        return [Launch(warps=n, registers=128, lanes=lanes) for lanes in (4, 8, 16) for n in (1, 2, 4)]
    each: tuple[int | None, ...] = (128, 168, None)
    return [Launch(warps=n, registers=limit) for n in (2, 4, 8) if v % (16 * n) == 0 for limit in each]


def candidates(case: Case) -> list[Launch]:
    return launches(case, case.kernel)


def row(case: Case, launch: Launch | None) -> Tuned:
    g = case.geometry
    return Tuned(
        kernel=case.kernel,
        shape=ShapeClass.of(g),
        replays=True,
        window=case.window.max_len,
        heads=case.batch * g.num_v_heads,
        launch=launch,
    )


Measure = Callable[[Case, Table], float | None]
Tell = Callable[[str], None]


def core_us(case: Case, table: Table) -> float | None:
    """Microseconds of a layer's recurrence with its flushes under a table; None where a launch fails its check."""
    g, w = case.geometry, case.window
    with choices.using(table):
        policy = "checkpointing"
        try:
            if bench.disagreement(policy, g, w, case.acceptance, seed=0, device="cuda", backend="triton"):
                return None
            return bench.core_us(policy, g, w, case.batch, case.acceptance)
        except REFUSED:
            torch.cuda.synchronize()  # raises where the device itself is at fault
            return None


def launch_of(case: Case, device: str, tell: Tell, measure: Measure = core_us) -> Tuned | None:
    """The fastest launch, or the kernel's own rule where that is as good; None where nothing could be measured."""
    own = measure(case, Table(device=device))
    best: tuple[float, Tuned] | None = None
    for launch in candidates(case):
        tried = row(case, launch)
        us = measure(case, Table(device=device, launches=(tried,)))
        tell(f"{_name(case)}: {launch}: {'not possible' if us is None else f'{us:.1f} us'}")
        if us is not None and (best is None or us < best[0]):
            best = us, tried
    if own is not None and (best is None or best[0] > GAIN * own):
        return row(case, None)
    return None if best is None else best[1]


def ring_of(case: Case, table: Table, tell: Tell, measure: Measure = core_us) -> RingChoice | None:
    """The L that takes the least time; the shorter one of two that take the same, since records take memory."""
    t, times = case.window.max_len, {}
    for ring in sorted({min(int(t * n), MAX_RING - t) for n in RINGS} | {max(t, 16)}):
        one = replace(case, window=replace(case.window, ring_len=ring))
        if (us := measure(one, table)) is not None:
            times[ring] = us
            tell(f"{_name(case)}: L={ring}: {us:.1f} us")
    return _shortest(case.geometry, case.window.mode, t, times)


def _shortest(g: Geometry, mode: Mode, window: int, times: Mapping[int, float]) -> RingChoice | None:
    """Of the rings that take the least time; None where there was no choice."""
    if len(times) < 2:
        return None
    good = min(ring for ring, us in times.items() if GAIN * us <= min(times.values()))
    return RingChoice(mode=mode, shape=ShapeClass.of(g), window=window, ring=good)


def rings_of(records: Iterable[Mapping[str, Any]]) -> tuple[RingChoice, ...]:
    """From whole layers that were timed: the rows of benchmarks, at each window's largest batch and mean of accepted."""
    timed: dict[tuple[Geometry, Mode, int], dict[tuple[int, float], dict[int, float]]] = {}
    for row in (row for record in records for row in record["timings"]):
        if row["policy"] == "checkpointing" and row["layer_us"] is not None and row.get("fused", True):
            g = replace(presets.load(row["model"]).geometry, state_dtype=DType(row["state_dtype"]))
            loads = timed.setdefault((g, Mode(row["mode"]), row["draft"] + 1), {})
            loads.setdefault((row["batch"], row["accepted"]), {})[row["ring"]] = row["layer_us"]
    rows = (_shortest(*key, loads[max(loads)]) for key, loads in timed.items())
    return tuple(row for row in rows if row is not None)


def run(cases: Sequence[Case], tell: Tell = lambda text: None, measure: Measure = core_us) -> Table:
    """Launches first, then rings under them, at the largest batch of a window."""
    device = torch.cuda.get_device_name()
    launches = [found for case in cases if (found := launch_of(case, device, tell, measure)) is not None]
    table = Table(device=device, launches=tuple(launches))
    rings = [ring_of(case, table, tell, measure) for case in _largest(cases)]
    return replace(table, rings=tuple(found for found in rings if found is not None))


def _largest(cases: Iterable[Case]) -> list[Case]:
    """One case per geometry and window."""
    largest: dict[tuple[Geometry, Window], Case] = {}
    for case in cases:
        key = case.geometry, case.window
        if key not in largest or case.batch > largest[key].batch:
            largest[key] = case
    return list(largest.values())


def _name(case: Case) -> str:
    g, w = case.geometry, case.window
    return f"{g.arch} {g.state_dtype} T={w.max_len} B={case.batch} {w.mode}"
