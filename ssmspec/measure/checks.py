"""Published numbers against what this package computes, each with its source."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import repeat

from ssmspec import layout
from ssmspec.acceptance import Acceptance, from_rate
from ssmspec.geometry import DType, Geometry, Window
from ssmspec.measure import traffic
from ssmspec.presets import PRESETS

KIB = 1024


@dataclass(frozen=True, kw_only=True)
class Check:
    """One published number beside ours; it holds where they differ by ``tolerance`` at most, in ``unit``."""

    name: str
    expected: float
    got: float
    unit: str
    source: str
    tolerance: float
    note: str = ""
    ok: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ok", abs(self.got - self.expected) <= self.tolerance)


def _fp32(name: str) -> Geometry:
    return replace(PRESETS[name].geometry, state_dtype=DType.FP32)


def _random(mean: float, drafts: int) -> Acceptance:
    """Draft acceptance at one rate, found by bisection, that gives ``mean`` tokens a step."""
    low, high = 0.0, 1.0
    for _ in range(50):
        rate = (low + high) / 2
        low, high = (rate, high) if from_rate(rate, drafts).mean < mean else (low, rate)
    return from_rate(high, drafts)


@dataclass(frozen=True)
class _Constant:
    mean: int

    def sample(self, n: int, seed: int) -> Iterator[int]:
        return repeat(self.mean, n)


def _closed_form(name: str, g: Geometry, w: Window, a: int) -> Check:
    """The closed form is the reference; random counts of the same mean are shown in the note."""
    form = traffic.closed_form("checkpointing", g, w, a)
    constant = traffic.of("checkpointing", g, w, _Constant(a))
    random = traffic.of("checkpointing", g, w, _random(a, w.max_len - 1))
    free, steps = w.limit - w.max_len, 1 / form.cadence.flush_fraction
    beside = (
        f"random counts of the same mean: {random.total / KIB:,.1f} KiB ({random.total / form.total - 1:+.1%})."
        f" A cycle ends when its records pass L-T = {free}: by {steps * a - free:.0f} if every step accepts {a},"
        f" by {random.cadence.accepted / random.cadence.flush_fraction - free:.2f} on average at random, so a flush comes every"
        f" {1 / random.cadence.flush_fraction:.2f} steps instead of {steps:.0f} and a verify reads"
        f" {random.cadence.fill:.2f} records instead of {form.cadence.fill:.2f}"
    )
    return Check(
        name=f"closed form: {name}, {g.state_dtype} state, T={w.max_len}, L={w.limit}, a={a}",
        expected=form.total / KIB,
        got=constant.total / KIB,
        unit="KiB per layer-step",
        source="ReplaySSM's cycle with the flush inside verify: n = floor((L-T)/a)+1 steps, mean fill a(n+1)/2",
        tolerance=0.005 * form.total / KIB,
        note=beside if w.max_len > 1 else "one token a step: nothing is random",
    )


def _closed_form_checks() -> list[Check]:
    small, kimi, nemotron = (
        _fp32(name) for name in ("qwen3.5-4b", "kimi-linear-48b-a3b", "nemotron-3-super-120b-a12b")
    )
    large = replace(_fp32("qwen3.5-122b-a10b"), state_dtype=DType.BF16)
    return [
        _closed_form("Qwen3.5-4B", small, Window(max_len=4, ring_len=16), 3),
        _closed_form("Qwen3.5-4B", small, Window(max_len=1, ring_len=16), 1),
        _closed_form("Qwen3.5-122B-A10B", large, Window(max_len=6, ring_len=16), 3),
        _closed_form("Qwen3.5-122B-A10B", large, Window(max_len=8, ring_len=32), 5),
        _closed_form("Kimi-Linear-48B-A3B", kimi, Window(max_len=4, ring_len=16), 2),
        _closed_form("Nemotron-3-Super-120B-A12B", nemotron, Window(max_len=6, ring_len=16), 4),
    ]


def _recover_checks() -> list[Check]:
    """-38.1 % of recurrent-state traffic: (3S + R(T+a)) / (1+T)S - 1, state and records only."""
    g, w = replace(_fp32("qwen3.5-4b"), state_dtype=DType.FP16), Window(max_len=4)
    native = traffic.closed_form("native", g, w, 3).parts.state
    recover = traffic.closed_form("recover", g, w, 3).parts
    inputs = layout.records(replace(g, read_dtype=DType.FP16), w.max_len, durable=False)
    record = sum(traffic.bytes_per_record(inputs, w.max_len).values())
    source = "F21HGG, comment of 2026-08-28 on vllm-project/vllm#49887 (exact accepted state, K=1 to 3, FP16)"
    return [
        Check(
            name="recover against native, state and records, Qwen3.5-4B, FP16 state, K=3",
            expected=-38.1,
            got=100 * ((recover.state + recover.records) / native - 1),
            unit="%",
            source=source,
            tolerance=2.0,
            note="the source gives neither K nor acceptance for its number: K=3 and 3 accepted tokens assumed;"
            " our record holds c in fp32 where theirs holds a, b, k, v in 16 bits",
        ),
        Check(
            name="the same with their record, written and read T times",
            expected=-38.1,
            got=100 * ((recover.state + 2 * w.max_len * record) / native - 1),
            unit="%",
            source=source,
            tolerance=0.1,
            note=f"{record:,} bytes a token of raw k with its norm, v, beta and decay (theirs: k, v, a, b);"
            " the number comes out where the commit reads all T records",
        ),
    ]


def _standard_decode_checks() -> list[Check]:
    """T=1: S is read every step and written once in L = 16 steps, SGLang's default; the rest comes on top."""
    g, w = _fp32("qwen3.5-4b"), Window(max_len=1, ring_len=16)
    native = traffic.closed_form("native", g, w, 1)
    ours = traffic.closed_form("checkpointing", g, w, 1)
    low = traffic.closed_form("checkpointing", replace(g, record_dtype=DType.BF16), w, 1)
    recurrent = [native.parts.state / (t.parts.state + t.parts.records) for t in (ours, low)]
    return [
        Check(
            name="standard decode: checkpointing's state traffic as a share of native's, L=16",
            expected=0.53,
            got=ours.parts.state / native.parts.state,
            unit="x",
            source="sgl-project/sglang#28451; its benchmark bench_gdn_replayssm_decode.py prints it",
            tolerance=0.005,
            note="(S + S/L) / 2S = (1 + 1/16) / 2; the source counts the state alone, without records",
        ),
        Check(
            name="standard decode: native's bytes over checkpointing's, L=16",
            expected=1.7,
            got=1 / ours.vs_native,
            unit="x",
            source="sgl-project/sglang#28451 (about 1.7x ceiling)",
            tolerance=0.05,
            note=f"all bytes of the layer, c in fp32. How the source came to it is unknown: the state alone gives"
            f" {native.parts.state / ours.parts.state:.2f}, state and records {recurrent[0]:.2f}, or"
            f" {recurrent[1]:.2f} with 16-bit records as in its rings; all bytes with these"
            f" {1 / low.vs_native:.2f}",
        ),
    ]


def _published_flushes(base: int, t: int, counts: Iterable[int]) -> float:
    """Share of flushes by ReplaySSM's rule: a step's end decides for the next, new_wp + 2T > L with L = B + T."""
    steps = flushes = written = 0
    due = 2 * t > base + t
    for n in counts:
        steps, flushes = steps + 1, flushes + due
        written = n if due else written + n
        due = written + 2 * t > base + t
    return flushes / steps


def _flush_checks() -> list[Check]:
    """B = 16, T = 4: our L is their B, as both rules then say count + T > B where the next window starts."""
    g, w, steps = _fp32("qwen3.5-4b"), Window(max_len=4, ring_len=16), 10_000
    source = "ReplaySSM, cursor kernel of gdn_replayssm_spec_decode.py (vllm-project/vllm#49887)"

    def formula(a: float) -> float:
        return a / (w.limit - w.max_len + a)

    def ours(counts: traffic.AcceptedCounts) -> float:
        return traffic.of("checkpointing", g, w, counts, steps=steps).cadence.flush_fraction

    random = from_rate(0.8, w.max_len - 1)
    return [
        Check(
            name="flush cadence a/(B-T+a), every step accepts 3",
            expected=formula(3),
            got=ours(_Constant(3)),
            unit="flushes per step",
            source=source,
            tolerance=0.005 * formula(3),
            note="equal where a divides B-T, so that a cycle passes B-T by a. Elsewhere it passes by less, and"
            " flushes come sooner: with B=32, T=8, a=5 every 5 steps, where the formula says 5.8",
        ),
        Check(
            name="flush cadence by the published rule on the same random counts, draft acceptance 0.8",
            expected=_published_flushes(w.limit, w.max_len, random.sample(steps, 0)),
            got=ours(random),
            unit="flushes per step",
            source=source,
            tolerance=0.0,
            note=f"deciding at a step's end what the next one does changes nothing. The formula at the mean"
            f" {random.mean:.2f} gives {formula(random.mean):.4f}: it lets a cycle pass B-T by one mean step,"
            f" and random ones pass it by {random.mean / ours(random) - w.limit + w.max_len:.2f}",
        ),
    ]


def traffic_checks() -> list[Check]:
    """The closed form, and what others have published about traffic, against the simulated code."""
    return _closed_form_checks() + _recover_checks() + _standard_decode_checks() + _flush_checks()
