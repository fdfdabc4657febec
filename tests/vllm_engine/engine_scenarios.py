"""What the engines of these tests serve, and how they are started."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine_checkpoint
import engine_drafter

Found = dict[str, Any]
Played = Callable[[str, str], Found]
# per name: policies, waves of requests, changes of the engine
Scenarios = dict[str, tuple[tuple[str, ...], list[Found], Found]]

SYNTHETIC = {  # accepts by request seed and position, so partly, and alike under every policy
    "method": "mtp",
    "num_speculative_tokens": 3,
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_rates": [0.8, 0.6, 0.4],
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
BLOCK = 128  # tokens; what vLLM makes of the checkpoint's shapes

# the first two leave early, so that two join; 127 crosses its first block boundary with a draft
LONG = [
    {
        "lengths": [257, 64, 1, 2, 127, 129, 257, 300, 385, 386],
        "shared": 384,
        "max_tokens": [20, 30, 205, 200, 220, 205, 200, 205, 200, 205],
    },
    {"lengths": [385, 386, 500], "shared": 384, "seed": 2, "max_tokens": [12, 12, 20]},
]
# hits of all but one token, so that a request's first row is a window of one token; and one request that goes on from
# what it generated, through a state that was committed at a boundary while it was drafting
TAILS = [
    {"lengths": [257, 129, 300, 120], "shared": 256, "max_tokens": [12, 12, 12, 16]},
    {
        "lengths": [257, 129, 258, 385],
        "shared": 256,
        "seed": 2,
        "go_on": [3],
        "max_tokens": [12, 12, 10, 10, 10],
    },
]
RETAIN = {"prefix_cache_retention_interval": BLOCK}  # by default vLLM keeps the states of prompts only
SHORT = [{"lengths": [1, 2, 65, 100], "max_tokens": [30, 24, 32, 16]}]

# the first two are aborted, one of them with its first tokens, while two wait for a slot; the rest play on
ABORTED = [
    {
        "lengths": [100, 65, 64, 30, 127, 3, 40, 1, 66, 2],
        "max_tokens": [40, 40, 30, 30, 30, 30, 30, 30, 20, 20],
        "abort": [[0, 9], [1, 1]],
    }
]

# three or four requests do not fit: some are preempted and start again. Plain greedy drafting, whose tokens are the
# target's own whatever was drafted
CROWD = [{"lengths": [129, 130, 131, 132], "max_tokens": [130, 130, 130, 130]}]
CROWDED = {
    "speculative_config": NGRAM,
    "enable_prefix_caching": False,
    "mamba_ssm_cache_dtype": "float32",
    "num_gpu_blocks_override": 16,
}
ROOMY = CROWDED | {"num_gpu_blocks_override": None}
CLOSE = (
    0.2  # of log probability, between vLLM's CPU kernels (a bfloat16 conv) and the reference; 0.13 was seen
)
FAST = (0.2, 0.126)  # the same of fast mode, and the step of a bfloat16 logit of 16 and more
GAP = 0.1  # of log probability between native's two best tokens: closer than that, another batch may choose the other


def _engine(model: Path, policy: str, mode: str, change: dict[str, Any]) -> dict[str, Any]:
    selection = {"policy": policy, "mode": mode} | ({"backend": "torch"} if policy == "native" else {})
    asked = {} if policy == "stock" else {"ssmspec": selection}
    return {
        "model": str(model),
        "skip_tokenizer_init": True,
        "max_model_len": 768,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 192,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 2**28,
        "disable_log_stats": False,
        "speculative_config": SYNTHETIC,
        "additional_config": asked,
        **change,
    }


def play(folder: Path, scenarios: Scenarios, run_script: Callable[..., str]) -> Played:
    """Play every scenario under its policies -> what came out, by scenario and policy."""
    model = engine_checkpoint.write(folder / "model")
    dense = engine_checkpoint.write(folder / "dense", "qwen3.5")
    drafters = {
        "drafter": {"method": "draft_model", "model": str(engine_drafter.write(folder / "drafter"))},
        "eagle": {"method": "eagle3", "model": str(engine_drafter.write_eagle(folder / "eagle"))},
    }
    for name, (policies, waves, change) in scenarios.items():
        if name in drafters:
            change = {**change, "speculative_config": SYNTHETIC | drafters[name]}
        for policy in policies:
            mode = "fast" if name == "fast" else "exact"
            engine = _engine(dense if "qwen3.5" in name else model, policy, mode, change)
            scenario = {"engine": engine, "waves": waves, "report": policy not in ("native", "stock")}
            (folder / f"{name}.{policy}.in.json").write_text(json.dumps(scenario))
    run_script("engine_serve.py", folder)

    def load(scenario: str, policy: str) -> Found:
        file = folder / f"{scenario}.{policy}.json"
        assert file.exists(), file.with_suffix(".log").read_text()[-3000:]
        found: Found = json.loads(file.read_text())
        return found | {"log": file.with_suffix(".log").read_text()}

    return load


def cases(scenarios: Scenarios) -> list[tuple[str, str]]:
    """Who is compared with native, in which scenario."""
    return [
        (name, policy)
        for name, (policies, _, _) in scenarios.items()
        if "native" in policies
        for policy in policies
        if policy not in ("native", "stock")
    ]


def requests(found: Found) -> list[Found]:
    return [request for wave in found["waves"] for request in wave]


def first_difference(theirs: Found, mine: Found) -> int | None:
    pairs = enumerate(zip(theirs["tokens"], mine["tokens"], strict=True))
    return next((t for t, (a, b) in pairs if a != b), None)


def gap(request: Found, token: int) -> float:
    """Between the two best tokens there."""
    best, second = sorted(request["logprobs"][token].values(), reverse=True)[:2]
    return float(best - second)


def assert_same(native: Found, ours: Found) -> None:
    """Tokens and logprobs to the bit, and prefix hits."""
    for i, (theirs, mine) in enumerate(zip(requests(native), requests(ours), strict=True)):
        assert mine["tokens"] == theirs["tokens"], f"request {i}"
        assert mine["logprobs"] == theirs["logprobs"], f"request {i}"
        assert mine["cached"] == theirs["cached"], f"request {i}"


def assert_close(native: Found, ours: Found, apart: float, tie: float) -> None:
    """Log probabilities differ by less than ``apart`` until a request first has another token; there native's two best
    are closer than ``tie``."""
    for i, (theirs, mine) in enumerate(zip(requests(native), requests(ours), strict=True)):
        differs = first_difference(theirs, mine)
        assert differs is None or gap(theirs, differs) < tie, f"request {i} at token {differs}"
        before = zip(theirs["logprobs"][:differs], mine["logprobs"][:differs], strict=True)
        for t, (a, b) in enumerate(before):
            assert all(abs(a[token] - b[token]) < apart for token in a.keys() & b.keys()), f"request {i}, {t}"


def assert_reported(found: Found, policy: str, boundaries: bool) -> None:
    """The worker's report says what ran."""
    report = found["report"]
    assert report["policy"] == policy
    assert report["rows"] > report["steps"] > 0
    assert report["tokens"] >= report["rows"]
    assert (report["flushes"] > 0) == (policy != "recover")
    assert (report["boundaries"] > 0) == boundaries
