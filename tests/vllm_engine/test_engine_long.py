"""Long lives in a real vLLM engine, every policy; and one that is too crowded to hold its requests."""

from collections.abc import Callable

import pytest
from engine_scenarios import (
    CROWD,
    CROWDED,
    GAP,
    LONG,
    ROOMY,
    SHORT,
    Played,
    Scenarios,
    assert_reported,
    assert_same,
    cases,
    first_difference,
    gap,
    play,
    requests,
)  # fmt: skip

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

FP32 = {"enable_prefix_caching": False, "mamba_ssm_cache_dtype": "float32"}
SCENARIOS: Scenarios = {
    "align": (("native", "recover", "every-step", "checkpointing"), LONG, {}),
    "roomy": (("native",), CROWD, ROOMY),
    "crowded": (("checkpointing",), CROWD, CROWDED),
    "eagle": (("native", "checkpointing"), SHORT, FP32),
}


@pytest.fixture(scope="module")
def played(run_script: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Played:
    return play(tmp_path_factory.mktemp("engines"), SCENARIOS, run_script)


@pytest.mark.parametrize(("scenario", "policy"), cases(SCENARIOS))
def test_tokens_logprobs_and_prefix_hits_are_natives(played: Played, scenario: str, policy: str) -> None:
    assert_same(played(scenario, "native"), played(scenario, policy))
    assert_reported(played(scenario, policy), policy, boundaries=scenario == "align")


def test_a_preempted_request_differs_only_where_native_was_undecided(played: Played) -> None:
    native, ours = played("roomy", "native"), played("crowded", "checkpointing")
    assert ours["preemptions"] > 0
    assert native["preemptions"] == 0
    for i, (theirs, mine) in enumerate(zip(requests(native), requests(ours), strict=True)):
        differs = first_difference(theirs, mine)
        assert differs is None or gap(theirs, differs) < GAP, f"request {i} at token {differs}"
