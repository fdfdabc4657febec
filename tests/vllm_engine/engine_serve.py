"""Plays scenarios on a real vLLM engine, each in a process of its own, and writes what came out as JSON.

Importing vLLM takes longer than an engine's start, so one process imports it and is forked for each scenario.
"""

import importlib
import json
import os
import random
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

HEAVY = ("vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.worker.gpu.model_runner", "transformers")


def prompts(lengths: list[int], shared: int, seed: int) -> list[dict[str, list[int]]]:
    """Prompts of these lengths over a vocabulary of 512; the first ``shared`` tokens are common to all."""
    prefix = random.Random(0).choices(range(3, 512), k=shared)
    own = random.Random(seed)
    return [{"prompt_token_ids": (prefix + own.choices(range(3, 512), k=n))[:n]} for n in lengths]


def play(scenario: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    llm = LLM(**scenario["engine"])
    waves: list[list[dict[str, Any]]] = []
    for wave in scenario["waves"]:
        batch = prompts(wave["lengths"], wave.get("shared", 0), wave.get("seed", 1))
        batch += [
            {"prompt_token_ids": waves[-1][i]["prompt"] + waves[-1][i]["tokens"]}
            for i in wave.get("go_on", ())
        ]
        params = [
            SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False, logprobs=3, seed=i)
            for i, n in enumerate(wave["max_tokens"])
        ]
        if "abort" in wave:
            outputs = _stepped(llm.llm_engine, batch, params, dict(wave["abort"]))
        else:
            outputs = llm.generate(batch, params, use_tqdm=False)
        waves.append([_request(o) for o in outputs])
    report = llm.collective_rpc("ssmspec_report")[0] if scenario["report"] else None
    metrics = {m.name: getattr(m, "value", None) for m in llm.get_metrics()}
    return {"waves": waves, "report": report, "preemptions": int(metrics.get("vllm:num_preemptions") or 0)}


def _stepped(engine: Any, batch: list[Any], params: list[Any], after: dict[int, int]) -> list[Any]:
    """The last output of each request; those of ``after`` are aborted once they have that many tokens."""
    for i, (prompt, how) in enumerate(zip(batch, params, strict=True)):
        engine.add_request(f"stepped-{i}", prompt, how)
    last: dict[int, Any] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            i = int(output.request_id.split("-")[1])
            last[i] = output
            if len(output.outputs[0].token_ids) >= after.get(i, sys.maxsize):
                del after[i]
                engine.abort_request([output.request_id])
    return [last[i] for i in range(len(batch))]


def _request(output: Any) -> dict[str, Any]:
    completion = output.outputs[0]
    logprobs = [{str(t): p.logprob for t, p in sorted(step.items())} for step in completion.logprobs]
    return {
        "prompt": list(output.prompt_token_ids),
        "tokens": list(completion.token_ids),
        "logprobs": logprobs,
        "cached": output.num_cached_tokens,
    }


def main(folder: Path) -> None:
    """Play every `NAME.in.json` of the folder into `NAME.json`, with what was printed in `NAME.log`."""
    for module in HEAVY:
        importlib.import_module(module)
    importlib.import_module("triton_host.masks").install()
    for source in sorted(folder.glob("*.in.json")):
        name = source.name.removesuffix(".in.json")
        child = os.fork()
        if child == 0:
            _play_and_exit(source, folder / name)
        os.waitpid(child, 0)


def _play_and_exit(source: Path, target: Path) -> NoReturn:
    """In the forked process. Without a result file the scenario failed, and its log says why."""
    log = os.open(target.with_name(target.name + ".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        result = play(json.loads(source.read_text()))
        target.with_name(target.name + ".json").write_text(json.dumps(result))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
