"""Which policy to take, from which window or batch it pays, and where it loses: from the numbers."""

from collections.abc import Mapping, Sequence
from math import ceil

from ssmspec.measure import speeds
from ssmspec.measure.curves import MARGIN, Curve, over_drafts
from ssmspec.measure.sweep import Row
from ssmspec.measure.tables import SHORT

# Conv, verify and norm of vLLM 0.33.0 for one request, T=4, Qwen3.5-4B's layer, measured on one H200; and its bandwidth.
LAUNCH_SECONDS, BYTES_PER_SECOND = 20e-6, 4.3e12
LISTED = 8  # combinations that a sentence names one by one
LETTERS = {"draft": "K={}", "ring": "L={}", "batch": "B={}", "tp": "TP={}", "record_dtype": "records {}"}
LETTERS |= {"read_copy": "copy {}", "context": "context {}", "kv_dtype": "KV {}", "cache_mode": "cache {}"}


def advise(rows: Sequence[Row]) -> list[str]:
    """A sentence or two for each thing that was measured; what holds over K is of the first combination."""
    others = [row for row in rows if row.policy != "native"]
    if not others:
        return []
    first, lines = others[0], []
    if first.traffic is not None:
        policies = list(dict.fromkeys(row.policy for row in others))
        curves = over_drafts(first.case, policies, mode=first.window.mode)
        lines += [_take(rows), _pays(curves, first), _loses(curves)]
    elif held := [row for row in rows if row.capacity is not None]:
        lines += [_take(held)]
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
    taken = [row for row in best if row is not None]
    untried = _untried([*groups.values()])
    if not taken:
        return f"Stay with native{mode}: {_short(rows)}{untried}."
    verb = "Take" if taken[0].traffic else "Most requests fit with"
    if len(best) > 1:
        labels = [(row or group[0]).labels() for row, group in zip(best, groups.values(), strict=True)]
        return f"{verb}{mode} {_where(labels, best)}{_beside(taken, len(best) <= LISTED)}{untried}."
    return f"{verb} {taken[0].policy}{mode}{_gains(taken[0])}{_requests(rows, taken[0])}{untried}."


def _where(labels: Sequence[Mapping[str, str | int]], best: Sequence[Row | None]) -> str:
    """What is best in each combination, by what tells it from the others; of many, how often, and where it is seldom."""
    names = dict.fromkeys(name for one in labels for name in one)
    varied = [name for name in names if len({one[name] for one in labels if name in one}) > 1]
    places: dict[str, list[str]] = {}
    for one, row in zip(labels, best, strict=True):
        told = ((name, SHORT.get(str(one[name]), one[name])) for name in varied if name in one)
        words = (LETTERS.get(name, "{}").format(value) for name, value in told)
        gain = f" ({_gain(row)})" if row and len(best) <= LISTED else ""
        places.setdefault(row.policy if row else "native", []).append(" ".join(words) + gain)
    parts = []
    for policy, found in sorted(places.items(), key=lambda item: -len(item[1])):
        listed = ", ".join(found)
        if len(best) <= LISTED:
            parts.append(f"{policy} at {listed}")
        else:
            where = f" ({listed})" if len(found) <= LISTED else ""
            parts.append(f"{policy} in {len(found)} of {len(best)} combinations{where}")
    return "; ".join(parts)


def _gain(row: Row) -> str:
    if row.traffic is None:
        return f"{_held(row):,}"
    return f"{_times(row):.2f}x" if row.speed else f"{_vs_native(row):.2f}x of native's bytes"


def _beside(taken: Sequence[Row], listed: bool) -> str:
    """What the numbers of a list are of; without a list, how far they go."""
    if taken[0].traffic is None:
        return ""
    times, kernels = [row.speed.times for row in taken if row.speed], "the speed of vLLM's own kernels"
    if listed:
        return f"; times {kernels} on an {speeds.measured().device}" if times else ""
    if times:
        return f": {_span(times)} of {kernels} on an {speeds.measured().device}, where they were timed"
    return f": {_span([_vs_native(row) for row in taken])} of native's bytes"


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


def _untried(groups: Sequence[Sequence[Row]]) -> str:
    """Which policies move fewer bytes than the fastest that was timed, and were not timed themselves."""
    found = [row for row in map(_lighter, groups) if row is not None]
    if not found:
        return ""
    if len(groups) > 1:
        names = " or ".join(dict.fromkeys(row.policy for row in found))
        return f"; in {len(found)} of {len(groups)} combinations {names} moves fewer bytes and was not timed"
    (row,) = found
    ring = f" (L={row.window.limit})" if row.policy == "checkpointing" else ""
    return f"; {row.policy}{ring} moves fewer bytes, {_vs_native(row):.2f}x, and was not timed like this"


def _lighter(group: Sequence[Row]) -> Row | None:
    others = [row for row in group if row.policy != "native" and row.traffic is not None]
    timed = [row for row in others if row.speed]
    untimed = [row for row in others if not row.speed]
    if not timed or not untimed:
        return None
    least, fastest = min(untimed, key=_vs_native), max(timed, key=_times)
    return least if _vs_native(least) < (1 - MARGIN) * _vs_native(fastest) else None


def _times(row: Row) -> float:
    assert row.speed is not None
    return row.speed.times


def _held(row: Row) -> int:
    assert row.capacity is not None
    return row.capacity.requests


def _vs_native(row: Row) -> float:
    assert row.traffic is not None
    return row.traffic.vs_native


def _gains(row: Row) -> str:
    """Of native's bytes, and of vLLM's speed where it was timed."""
    if row.traffic is None:
        return ""
    moved = f"{_vs_native(row):.2f}x of native's bytes"
    if (speed := row.speed) is None:
        return f": {moved}"
    return f": {speed.times:.2f}x of the speed of vLLM's own kernels ({speeds.measured().device}, {speed.cell}), {moved}"


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
