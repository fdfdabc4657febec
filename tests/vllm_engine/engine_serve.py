"""Plays one scenario on a real vLLM engine and writes what came out as JSON. Run as a script, in a process of its own."""

import json
import random
import sys
from pathlib import Path
from typing import Any


def prompts(lengths: list[int], shared: int, seed: int) -> list[dict[str, list[int]]]:
    """Prompts of these lengths over a vocabulary of 512; the first ``shared`` tokens are common to all."""
    prefix = random.Random(0).choices(range(3, 512), k=shared)
    own = random.Random(seed)
    return [{"prompt_token_ids": (prefix + own.choices(range(3, 512), k=n))[:n]} for n in lengths]


def play(scenario: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    llm = LLM(**scenario["engine"])
    waves = []
    for wave in scenario["waves"]:
        batch = prompts(wave["lengths"], wave.get("shared", 0), wave.get("seed", 1))
        params = [
            SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False, logprobs=3, seed=i)
            for i, n in enumerate(wave["max_tokens"])
        ]
        outputs = llm.generate(batch, params, use_tqdm=False)
        waves.append([_request(o) for o in outputs])
    report = llm.collective_rpc("ssmspec_report") if scenario.get("report") else None
    return {"waves": waves, "report": report, "preemptions": _preemptions(llm)}


def _request(output: Any) -> dict[str, Any]:
    completion = output.outputs[0]
    logprobs = [{str(t): p.logprob for t, p in sorted(step.items())} for step in completion.logprobs]
    return {"tokens": list(completion.token_ids), "logprobs": logprobs, "cached": output.num_cached_tokens}


def _preemptions(llm: Any) -> int:
    return int(sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions"))


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    target.write_text(json.dumps(play(json.loads(source.read_text()))))
