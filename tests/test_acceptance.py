"""The acceptance process has the published means, repeats itself for a seed, and refuses what cannot be."""

import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssmspec.acceptance import (
    AGENTS_QWEN3_8_27B,
    DEFAULT_RATE,
    MAX_TRACE_BYTES,
    SPEC_BENCH_QWEN3_5_4B,
    Acceptance,
    from_list,
    from_rate,
    from_trace,
    parse,
)


def test_the_published_lists_have_the_published_mean_lengths() -> None:
    # 3.941 tokens a step at K=5 (vllm-project/vllm#58863), 2.45 accepted drafts of 3 (vllm-project/vllm#49887)
    assert from_list(SPEC_BENCH_QWEN3_5_4B, 5).mean == pytest.approx(3.941, abs=5e-4)
    assert from_list(AGENTS_QWEN3_8_27B, 3).mean == pytest.approx(3.45, abs=5e-3)


# 1 + p + p^2 + .. at p = 0.8: 1.8, 2.952, 3.68928, 4.1611392
@pytest.mark.parametrize(("drafts", "mean"), [(0, 1), (1, 1.8), (3, 2.952), (5, 3.68928), (7, 4.1611392)])
def test_a_rate_is_conditional_so_positions_are_its_powers(drafts: int, mean: float) -> None:
    a = from_rate(DEFAULT_RATE, drafts)
    assert a.per_position == pytest.approx([0.8**i for i in range(1, drafts + 1)])
    assert a.mean == pytest.approx(mean)
    assert a.window == drafts + 1


def test_sampled_counts_have_the_probabilities_of_the_positions() -> None:
    a = from_list([0.9, 0.5, 0.1], 3)
    counts = list(a.sample(40_000, seed=3))
    for draft, p in enumerate(a.per_position, start=1):
        assert sum(c > draft for c in counts) / len(counts) == pytest.approx(p, abs=0.01)  # 4 sigma
    assert set(counts) == {1, 2, 3, 4}


def test_the_same_seed_gives_the_same_counts_and_leaves_global_randomness_alone() -> None:
    a = from_rate(0.6, 4)
    before = random.getstate()
    assert list(a.sample(50, seed=1)) == list(a.sample(50, seed=1)) != list(a.sample(50, seed=2))
    assert random.getstate() == before


@pytest.mark.parametrize(("rate", "count"), [(0.0, 1), (1.0, 4)])
def test_certain_rejection_and_certain_acceptance_are_legal(rate: float, count: int) -> None:
    assert set(from_rate(rate, 3).sample(100)) == {count}


@pytest.mark.parametrize("text", ["0.8", "0", "1"])
def test_without_drafts_every_step_accepts_the_one_token(text: str) -> None:
    a = parse(text, 0)
    assert (a.mean, list(a.sample(5))) == (1, [1, 1, 1, 1, 1])


def test_a_trace_is_replayed_in_order_and_from_its_start_again(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('4\n{"accepted": 1, "step": 7}\n2\n4\n')
    a = from_trace(file, 4)
    assert list(a.sample(6, seed=9)) == [4, 1, 2, 4, 4, 1]
    assert a.per_position == (0.75, 0.5, 0.5)  # above 1: three of four, above 2 and above 3: two
    assert a.mean == 2.75  # (4 + 1 + 2 + 4) / 4
    assert parse(str(file), 3) == a


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ["empty trace"]),
        ("3\n0\n", ["accepted=0 in step 2", "1..4", "nearest legal value is 1"]),
        ("3\n5\n", ["accepted=5 in step 2", "1..4", "nearest legal value is 4"]),
        ("-1\n", ["accepted=-1 in step 1", "nearest legal value is 1"]),
        ('3\n{"accep', ["line 2", '{"accep', "cut short"]),
        ("3\n\n2\n", ["line 2", "not JSON"]),
        ("3\n2.5\n", ["line 2", "2.5", "whole number"]),
        ("true\n", ["line 1", "whole number"]),
        ("NaN\n", ["line 1", "whole number"]),
        ('{"count": 3}\n', ["line 1", '{"accepted": n}']),
        ("[3]\n", ["line 1", "whole number"]),
        ("[" * 50_000, ["line 1", "not JSON"]),
        ("9" * 5000, ["line 1", "not JSON"]),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(content: str, words: list[str], tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"t\.jsonl") as error:
        from_trace(file, 4)
    for word in words:
        assert word in str(error.value)
    assert len(str(error.value)) < 400


def test_a_trace_that_is_no_text_or_too_large_or_absent_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_bytes(b"\xff\xfe3\n")
    with pytest.raises(ValueError, match="utf-8"):
        from_trace(file, 4)
    file.write_bytes(b"3\n" * (MAX_TRACE_BYTES // 2 + 1))
    with pytest.raises(ValueError, match="limit for a trace"):
        from_trace(file, 4)
    for path in (tmp_path / "none.jsonl", tmp_path, "\0"):
        with pytest.raises(ValueError):  # noqa: PT011 - the operating system words it
            from_trace(path, 4)


@pytest.mark.parametrize(
    ("text", "drafts", "words"),
    [
        ("1.5", 3, ["acceptance rate=1.5", "0..1", "nearest legal value is 1"]),
        ("-0.1", 3, ["acceptance rate=-0.1", "nearest legal value is 0"]),
        ("nan", 3, ["acceptance rate=nan", "not a number"]),
        ("inf", 3, ["acceptance rate=inf", "nearest legal value is 1"]),
        ("2", 0, ["acceptance rate=2"]),
        ("0.9,0.8", 3, ["2 positions", "3 drafts"]),
        ("0.9,0.8", 0, ["2 positions", "0 drafts"]),
        ("0.8,0.9,0.1", 3, ["draft 2=0.9", "rises", "0.8 of draft 1", "nearest legal value is 0.8"]),
        ("0.9,nan,0.1", 3, ["draft 2=nan"]),
        ("1.2,1,1", 3, ["draft 1=1.2", "nearest legal value is 1"]),
        ("0.9,,0.1", 3, ["'0.9,,0.1'", "3 of them"]),
        ("no-such.jsonl", 3, ["'no-such.jsonl'", "trace file"]),
        ("", 3, ["''"]),
        ("\0", 3, ["trace file"]),
    ],
)
def test_a_bad_acceptance_names_the_value_the_limit_and_the_nearest_legal_one(
    text: str, drafts: int, words: list[str]
) -> None:
    with pytest.raises(ValueError, match="acceptance") as error:
        parse(text, drafts)
    for word in words:
        assert word in str(error.value)


def test_a_negative_number_of_drafts_is_refused() -> None:
    with pytest.raises(ValueError, match="drafts=-1"):
        from_rate(0.8, -1)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0, 1), max_size=9).map(lambda ps: sorted(ps, reverse=True)), st.integers(0, 2**32))
def test_every_count_lies_within_the_window(positions: list[float], seed: int) -> None:
    a = from_list(positions, len(positions))
    assert all(x >= y for x, y in pairwise(a.per_position))
    counts = list(a.sample(50, seed))
    assert len(counts) == 50
    assert all(1 <= c <= a.window for c in counts)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=20), st.integers(0, 8))
def test_any_text_gives_an_acceptance_or_a_value_error(text: str, drafts: int) -> None:
    try:
        a = parse(text, drafts)
    except ValueError:
        return
    assert isinstance(a, Acceptance)
    assert a.window == drafts + 1
