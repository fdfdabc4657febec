"""Advice follows from the numbers, a report holds what was measured, and nothing that JSON cannot say."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from ssmspec.acceptance import Acceptance, from_rate
from ssmspec.geometry import DType, Mode, Window
from ssmspec.layout import POLICY_NAMES
from ssmspec.measure import environment
from ssmspec.measure.advice import KDA_DECODE, advise
from ssmspec.measure.capacity import Settings
from ssmspec.measure.curves import extended, over_drafts
from ssmspec.measure.difference import Error, Tally
from ssmspec.measure.exact import Exactness, First
from ssmspec.measure.planner import CacheMode
from ssmspec.measure.report import Report
from ssmspec.measure.sweep import Case, Part, Row, life_of, run
from ssmspec.presets import PRESETS

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
    """3S against (1+1)S + S read: as many bytes, and records on top."""
    only = rows(case(drafts=1), policies=("native", "recover"))
    lines = advise(only)
    assert lines[0] == "Stay with native: nothing here gains enough."
    assert "recover from K=2" in lines[1]
    assert "recover at K=0 (1.49x), K=1 (1.01x)" in lines[2]


def test_kda_standard_decode_stays_native_and_says_where_it_was_measured() -> None:
    lines = advise(rows(case("kimi-linear-48b-a3b", drafts=0)))
    assert lines[0].startswith("Stay with native")
    assert "checkpointing from K=1" in lines[1]
    assert KDA_DECODE in lines[2]
    assert "sgl-project/sglang#28451" in KDA_DECODE
    assert KDA_DECODE not in " ".join(advise(rows(case(drafts=0))))


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


def test_a_sweep_is_summed_up() -> None:
    lines = advise(rows(case(drafts=0), case("kimi-linear-48b-a3b", drafts=0), case(drafts=3)))
    assert lines[0].startswith(
        "Take checkpointing in 2 of 3 combinations, native in 1 of 3 combinations: 0.28x to 0.59x"
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
    short = replace(case(), window=Window(max_len=4, ring_len=5))
    assert [*over_drafts(short)[0].points] == [0, 1, 2, 3, 4]
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
