"""One vLLM engine plays given prompts, and what came out goes into a file. Run as a script, in a process of its own."""

import json
import os
import signal
import sys
import time
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

from ssmspec.runtime.vllm.config import KEY

Json = dict[str, Any]


def play(scenario: Json) -> Json:
    """``scenario``: "engine", the arguments of vLLM's LLM; "waves", each {"prompts": [[token]], "max_tokens": [n]}, played one
    after another; "logprobs", how many of each token are kept (2 where nothing is said, none where it is null).

    Returns per wave the requests' tokens, logprobs and cached prompt tokens; seconds; and what the worker and vLLM's
    metrics report.
    """
    vllm = import_module("vllm")
    start = time.monotonic()
    llm = vllm.LLM(**scenario["engine"])
    up = time.monotonic()
    logprobs = scenario.get("logprobs", 2)
    waves, seconds = [], []
    for wave in scenario["waves"]:
        params = [
            vllm.SamplingParams(
                temperature=0, max_tokens=n, ignore_eos=True, detokenize=False, logprobs=logprobs, seed=i
            )
            for i, n in enumerate(wave["max_tokens"])
        ]
        prompts = [{"prompt_token_ids": tokens} for tokens in wave["prompts"]]
        begin = time.monotonic()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.monotonic() - begin)
        waves.append([_request(o) for o in outputs])
    served = scenario["engine"].get("additional_config", {}).get(KEY, {}).get("policy", "native") != "native"
    return {
        "waves": waves,
        "seconds": {"start": up - start, "waves": seconds},
        "report": llm.collective_rpc("ssmspec_report") if served else [],
        "metrics": {m.name: getattr(m, "value", getattr(m, "values", None)) for m in llm.get_metrics()},
    }


def _request(output: Any) -> Json:
    completion = output.outputs[0]
    logprobs = [{str(t): p.logprob for t, p in sorted(step.items())} for step in completion.logprobs or []]
    return {"tokens": list(completion.token_ids), "logprobs": logprobs, "cached": output.num_cached_tokens}


def main(source: Path, target: Path) -> None:
    """``target`` appears once it is whole: whoever waits for it need not wait for the engine's end."""
    part = target.with_suffix(".part")
    part.write_text(json.dumps(play(json.loads(source.read_text()))))
    part.replace(target)


def end_with_caller() -> None:
    """Kill this process group, the engine's own processes among it, once standard input ends: whoever started it is gone.

    Only where the group is this process's own; a shell's would go with it.
    """
    if os.getpgrp() != os.getpid():
        return

    def watch() -> None:
        os.read(0, 1)  # not sys.stdin, whose lock an interpreter that ends would wait for
        os.killpg(0, signal.SIGKILL)

    Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    end_with_caller()
    main(*map(Path, sys.argv[1:]))
