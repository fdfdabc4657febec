"""Which policy to take, from which window or batch it pays, and where it loses: from the numbers."""

from collections import Counter
from collections.abc import Sequence
from math import ceil

from ssmspec.geometry import Arch
from ssmspec.measure.curves import MARGIN, Curve, over_drafts
from ssmspec.measure.sweep import Case, Row

# Conv, verify and norm of vLLM 0.33.0 for one request, T=4, Qwen3.5-4B's layer, measured on one H200; and its bandwidth.
LAUNCH_SECONDS, BYTES_PER_SECOND = 20e-6, 4.3e12
KDA_DECODE = (
    "KDA standard decode (K=0): replay moves fewer bytes and was measured at 0.74x to 0.93x of native's speed"
    " (sgl-project/sglang#28451)"
)


def advise(rows: Sequence[Row]) -> list[str]:
    """A sentence or two for each thing that was measured; what holds over K is of the first combination."""
    others = [row for row in rows if row.policy != "native"]
    if not others:
        return []
    first, lines = others[0], []
    if first.traffic is not None:
        curves = over_drafts(first.case, list(dict.fromkeys(row.policy for row in others)))
        lines += [_take(rows), _pays(curves, first), _loses(curves, first.case)]
    elif first.capacity is not None:
        lines += [_take(rows)]
    if first.exact is not None:
        lines += [_bits(others)]
    return [line for line in lines if line]


def _take(rows: Sequence[Row]) -> str:
    """The policy that moves least, or where bytes were not counted, that most requests fit with."""
    groups: dict[int, list[Row]] = {}
    for row in rows:
        groups.setdefault(id(row.case), []).append(row)
    best = [_best(group) for group in groups.values()]
    names = Counter("native" if row is None else row.policy for row in best)
    taken = [row for row in best if row is not None]
    if not taken:
        return "Stay with native: nothing here gains enough."
    verb = "Take" if taken[0].traffic else "Most requests fit with"
    if len(best) > 1:
        where = ", ".join(f"{name} in {n} of {len(best)} combinations" for name, n in names.most_common())
        return f"{verb} {where}{_gains(taken)}."
    return f"{verb} {taken[0].policy}{_gains(taken)}{_requests(rows, taken[0])}."


def _best(rows: Sequence[Row]) -> Row | None:
    """Of one combination; None where native is the one to stay with."""
    others = [row for row in rows if row.policy != "native"]
    if others[0].traffic is None:
        most = max(rows, key=_held)  # the first of equals, and native comes first
        return most if most.policy != "native" else None
    best = min(others, key=_vs_native)
    decode = best.case.model.geometry.arch is Arch.KDA and best.case.window.max_len == 1
    return None if decode or _vs_native(best) > 1 - MARGIN else best


def _held(row: Row) -> int:
    assert row.capacity is not None
    return row.capacity.requests


def _vs_native(row: Row) -> float:
    assert row.traffic is not None
    return row.traffic.vs_native


def _gains(taken: Sequence[Row]) -> str:
    if taken[0].traffic is None:
        return ""
    return f": {_span([_vs_native(row) for row in taken])} of native's bytes"


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
    least = 1 if row.case.model.geometry.arch is Arch.KDA else 0
    starts = sorted((max(c.pays_from, least), c.policy) for c in curves if c.pays_from is not None)
    if not starts:
        return ""
    assert row.traffic is not None
    batch = ceil(LAUNCH_SECONDS * BYTES_PER_SECOND / row.traffic.native_bytes)
    where = ", ".join(f"{policy} from K={k}" for k, policy in starts)
    return f"It pays: {where}; below a batch of about {batch:,} launches bind, not bytes."


def _loses(curves: Sequence[Curve], case: Case) -> str:
    found = [
        f"{c.policy} at " + ", ".join(f"K={k} ({ratio:.2f}x)" for k, ratio in c.loses.items())
        for c in curves
        if c.loses
    ]
    text = f"It loses: {'; '.join(found)} of native's bytes." if found else ""
    return f"{text} {KDA_DECODE}.".strip() if case.model.geometry.arch is Arch.KDA else text


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
