"""A real vLLM engine under a policy: its scheduler, block manager and prefix cache, its V2 runner, our commits.

The baseline is vLLM's own policy, a page per token, through the same reference kernels ("native" with the backend
"torch"). Every scenario is played in the same schedule, so that tokens and logprobs must be equal to the bit.
"""

from collections.abc import Callable

import pytest
from engine_scenarios import (
    ABORTED,
    BLOCK,
    CLOSE,
    FAST,
    GAP,
    NGRAM,
    RETAIN,
    SHORT,
    TAILS,
    Played,
    Scenarios,
    assert_close,
    assert_reported,
    assert_same,
    cases,
    play,
    requests,
)  # fmt: skip

pytestmark = pytest.mark.vllm

FP32 = {"enable_prefix_caching": False, "mamba_ssm_cache_dtype": "float32"}
SCENARIOS: Scenarios = {
    "ngram": (
        ("native", "checkpointing"),
        TAILS,
        {"speculative_config": NGRAM, "mamba_ssm_cache_dtype": "float16", **RETAIN},
    ),
    "fp32": (("native", "checkpointing", "stock"), SHORT, FP32),
    "qwen3.5": (("native", "recover", "every-step"), SHORT, {"async_scheduling": True}),
    "drafter": (("native", "checkpointing"), SHORT + ABORTED, FP32),
    "qwen3.5 on two ranks": (
        ("native", "checkpointing"),
        SHORT,
        {"tensor_parallel_size": 2, "mamba_ssm_cache_dtype": "float32"},
    ),
    "fast": (("checkpointing",), SHORT, FP32),
}


@pytest.fixture(scope="module")
def played(run_script: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Played:
    return play(tmp_path_factory.mktemp("engines"), SCENARIOS, run_script)


@pytest.mark.parametrize(("scenario", "policy"), cases(SCENARIOS))
def test_tokens_logprobs_and_prefix_hits_are_natives(played: Played, scenario: str, policy: str) -> None:
    assert_same(played(scenario, "native"), played(scenario, policy))
    assert_reported(played(scenario, policy), policy, boundaries=scenario == "ngram")


@pytest.mark.parametrize(("scenario", "policy"), cases(SCENARIOS))
def test_each_worker_says_in_one_line_what_runs(played: Played, scenario: str, policy: str) -> None:
    said = played(scenario, policy)["log"].count(f"ssmspec: policy={policy} mode=exact ")
    assert said == (2 if "two ranks" in scenario else 1)


def test_a_request_goes_on_from_a_boundary_that_was_crossed_while_drafting(
    played: Played,
) -> None:
    first, second = played("ngram", "checkpointing")["waves"]
    assert len(first[3]["prompt"]) < BLOCK
    assert second[4]["prompt"] == first[3]["prompt"] + first[3]["tokens"]
    assert second[4]["cached"] == BLOCK


def test_a_prefix_hit_of_all_but_one_token_starts_with_a_window(played: Played) -> None:
    first = played("ngram", "checkpointing")["waves"][1][0]
    assert first["cached"] == len(first["prompt"]) - 1


def test_aborted_requests_leave_their_slots_to_others(played: Played) -> None:
    """What all of them generate, the slots' next requests too, is native's: see above."""
    limits = ABORTED[0]["max_tokens"]
    made = [len(request["tokens"]) for request in played("drafter", "checkpointing")["waves"][-1]]
    assert [n < limit for n, limit in zip(made, limits, strict=True)] == [True] * 2 + [False] * 8


def test_the_baseline_is_close_to_vllms_own_kernels(played: Played) -> None:
    assert_close(played("fp32", "native"), played("fp32", "stock"), CLOSE, GAP)


def test_fast_mode_is_within_its_bound_but_not_exact(played: Played) -> None:
    native, fast = played("fp32", "native"), played("fast", "checkpointing")
    assert_close(native, fast, *FAST)
    first = [
        (a["logprobs"][1], b["logprobs"][1]) for a, b in zip(requests(native), requests(fast), strict=True)
    ]
    assert all(a.keys() == b.keys() for a, b in first)
    assert all(abs(a[t] - b[t]) < 0.05 for a, b in first for t in a)
    assert [r["logprobs"] for r in requests(native)] != [r["logprobs"] for r in requests(fast)]
