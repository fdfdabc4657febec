"""Which policy to take, from which window or batch it pays, and where it loses: from the numbers."""

from collections import Counter
from collections.abc import Sequence
from math import ceil

from ssmspec.measure import speeds
from ssmspec.measure.curves import MARGIN, Curve, over_drafts
from ssmspec.measure.sweep import Row

# Conv, verify and norm of vLLM 0.33.0 for one request, T=4, Qwen3.5-4B's layer, measured on one H200; and its bandwidth.
LAUNCH_SECONDS, BYTES_PER_SECOND = 20e-6, 4.3e12


def advise(rows: Sequence[Row]) -> list[str]:
    """A sentence or two for each thing that was measured; what holds over K is of the first combination."""
    others = [row for row in rows if row.policy != "native"]
    if not others:
        return []
    first, lines = others[0], []
    if first.traffic is not None:
        curves = over_drafts(first.case, list(dict.fromkeys(row.policy for row in others)))
        lines += [_take(rows), _pays(curves, first), _loses(curves)]
    elif first.capacity is not None:
        lines += [_take(rows)]
    if first.exact is not None:
        lines += [_bits(others)]
    return [line for line in lines if line]


def _take(rows: Sequence[Row]) -> str:
    """In each mode the policy that was the fastest where layers like these were timed, else the one that moves least;
    where bytes were not counted, the one that most requests fit with."""
    modes = list(dict.fromkeys(row.mode for row in rows if row.mode is not None))
    if rows[0].traffic is None:
        return _take_in(rows, "")
    told = [
        _take_in(
            [row for row in rows if row.mode in (None, mode)], f" in {mode} mode" if len(modes) > 1 else ""
        )
        for mode in modes
    ]
    return " ".join(told)


def _take_in(rows: Sequence[Row], mode: str) -> str:
    groups: dict[int, list[Row]] = {}
    for row in rows:
        groups.setdefault(id(row.case), []).append(row)
    best = [_best(group) for group in groups.values()]
    names = Counter("native" if row is None else row.policy for row in best)
    taken = [row for row in best if row is not None]
    if not taken:
        return f"Stay with native{mode}: {_short(rows)}."
    verb = "Take" if taken[0].traffic else "Most requests fit with"
    if len(best) > 1:
        where = ", ".join(f"{name} in {n} of {len(best)} combinations" for name, n in names.most_common())
        return f"{verb} {where}{mode}{_gains(taken)}."
    return f"{verb} {taken[0].policy}{mode}{_gains(taken)}{_requests(rows, taken[0])}."


def _short(rows: Sequence[Row]) -> str:
    """Why nothing is better than native."""
    timed = [row for row in rows if row.traffic and row.speed]
    if len({id(row.case) for row in rows}) > 1 or not timed:
        return "nothing here gains enough"
    best = max(timed, key=_times)
    return f"the fastest that was timed, {best.policy}, has {_times(best):.2f}x of the speed of vLLM's own kernels"


def _best(rows: Sequence[Row]) -> Row | None:
    """Of one combination; None where native is the one to stay with."""
    others = [row for row in rows if row.policy != "native"]
    if others[0].traffic is None:
        most = max(rows, key=_held)  # the first of equals, and native comes first
        return most if most.policy != "native" else None
    timed = [row for row in others if row.speed]
    if timed:
        fastest = max(timed, key=_times)
        return fastest if _times(fastest) >= 1 + MARGIN else None
    best = min(others, key=_vs_native)
    return None if _vs_native(best) > 1 - MARGIN else best


def _times(row: Row) -> float:
    assert row.speed is not None
    return row.speed.times


def _held(row: Row) -> int:
    assert row.capacity is not None
    return row.capacity.requests


def _vs_native(row: Row) -> float:
    assert row.traffic is not None
    return row.traffic.vs_native


def _gains(taken: Sequence[Row]) -> str:
    """Of native's bytes, and of vLLM's speed where every one of them was timed."""
    if taken[0].traffic is None:
        return ""
    moved = f"{_span([_vs_native(row) for row in taken])} of native's bytes"
    found = [speed for row in taken if (speed := row.speed)]
    if len(found) < len(taken):
        return f": {moved}" + (", as far as bytes tell; not all of these layers were timed" if found else "")
    (first, *more), table = taken, speeds.measured()
    other = not more and found[0].ring not in (None, first.case.window.limit)
    ring = f" with --ring {found[0].ring}" if other else ""
    times = f"{_span([speed.times for speed in found])} of the speed of vLLM's own kernels{ring}"
    windows = ", ".join(f"K={n - 1}" for n in sorted({speed.window for speed in found}))
    return f": {times} ({table.device}, {table.batch} requests, {windows})" + ("" if other else f", {moved}")


def _span(ratios: Sequence[float]) -> str:
    low, high = (f"{value:.2f}x" for value in (min(ratios), max(ratios)))
    return low if low == high else f"{low} to {high}"


def _requests(rows: Sequence[Row], best: Row) -> str:
    """How many requests fit instead, where that was asked for."""
    native = next((row.capacity for row in rows if row.policy == "native"), None)
    if native is None or best.capacity is None:
        return ""
    before = "; requests that fit: " if best.traffic else ": "
    return f"{before}{best.capacity.requests:,} instead of {native.requests:,}"


def _pays(curves: Sequence[Curve], row: Row) -> str:
    starts = sorted((c.pays_from, c.policy) for c in curves if c.pays_from is not None)
    if not starts:
        return ""
    assert row.traffic is not None
    batch = ceil(LAUNCH_SECONDS * BYTES_PER_SECOND / row.traffic.native_bytes)
    where = ", ".join(f"{policy} from K={k}" for k, policy in starts)
    return f"By bytes it pays: {where}; below a batch of about {batch:,} launches bind, not bytes."


def _loses(curves: Sequence[Curve]) -> str:
    found = [
        f"{c.policy} at " + ", ".join(f"K={k} ({ratio:.2f}x)" for k, ratio in c.loses.items())
        for c in curves
        if c.loses
    ]
    return f"By bytes it loses: {'; '.join(found)} of native's bytes." if found else ""


def _bits(rows: Sequence[Row]) -> str:
    """Who gave native's bits, and how far away from float64 the others are."""
    played = [(row, row.exact) for row in rows if row.exact is not None]
    words = []
    for mode in dict.fromkeys(row.mode for row, _ in played):
        apart = [(row.policy, e) for row, e in played if row.mode is mode and not e.equal]
        names = ", ".join(dict.fromkeys(policy for policy, _ in apart))
        ratios = [e.error.relative / e.native_error.relative for _, e in apart if e.native_error.relative]
        if not apart:
            words.append(f"{mode} mode gives native's")
        elif ratios:
            error = f"states at {_span(ratios)} of native's error against float64"
            words.append(f"{mode} mode leaves them in {names} ({error})")
    return "Bits: " + "; ".join(words) + "." if words else ""
