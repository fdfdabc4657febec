"""`ssmspec serve-check`: a vLLM engine per policy, on the same prompts."""

import json as json_format
import os
import random
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ssmspec.geometry import Mode
from ssmspec.layout import POLICY_NAMES

from . import parse, table
from .console import out, progress
from .engine import KERNEL, ending, fits, play
from .errors import UsageError

Json = dict[str, Any]
WEIGHTS = ("*.safetensors", "*.bin", "*.pt")  # what vLLM looks for in a folder
SYNTHETIC = [0.8, 0.6, 0.4]
WIDTH = 100  # of an engine's last line, as it is shown
WARM = 16  # tokens of a request that are generated before the clock starts


class Method(StrEnum):
    """Drafters that need no checkpoint of their own."""

    MTP = "mtp"
    NGRAM = "ngram"


def serve_check(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A folder with a config.json, with or without weights, or a Hub id."
        ),
    ],
    policy: Annotated[
        str, typer.Option("--policy", metavar="LIST", help="Who is compared with native.")
    ] = ",".join(POLICY_NAMES),
    mode: Annotated[Mode, typer.Option(help="Arithmetic of the policies.")] = Mode.EXACT,
    draft: Annotated[int, typer.Option(help="Drafted tokens K.", min=1)] = 3,
    method: Annotated[Method, typer.Option(help="Who drafts.")] = Method.MTP,
    requests: Annotated[int, typer.Option(help="Requests at once.", min=1)] = 8,
    prompt: Annotated[int, typer.Option(help="Tokens of the longest prompt.", min=1)] = 300,
    tokens: Annotated[int, typer.Option(help="Generated tokens of a request.", min=1)] = 200,
    engine: Annotated[
        str,
        typer.Option(metavar="JSON", help='More arguments of vLLM\'s engine, as {"max_model_len": 4096}.'),
    ] = "{}",
    limit: Annotated[
        float, typer.Option(metavar="SECONDS", help="An engine that takes longer has failed.", min=1)
    ] = 3600.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Start vLLM once per policy, each in a process of its own, and compare what they generate with native's.

    Native is vLLM's own code, on a GPU with its Triton kernel, whose bits are exact mode's (VLLM_GDN_DECODE_KERNEL
    overrides), without one in the reference kernels. Drafts of mtp are accepted by seed and position, not by
    content, so that every engine keeps the same schedule. Exits 1 where an engine fails or a policy in exact mode
    leaves native's tokens.
    """
    names = sorted(parse.choices("policy", policy, {n: n for n in POLICY_NAMES}), key=POLICY_NAMES.index)
    arguments = _arguments(model, method, draft, engine)
    waves = _waves(_vocabulary(model), requests, prompt, tokens)
    played = {}
    with progress("serving") as tell:
        for name in dict.fromkeys(["native", *names]):
            scenario = {"engine": _with(arguments, name, mode), "waves": waves}
            played[name] = play(scenario, partial(_hear, tell, name), limit)
    rows = [row(name, played["native"], played[name]) for name in played]
    if json:
        head = {"schema": "ssmspec.serve-check", "schema_version": 1, "model": model, "native": _baseline()}
        typer.echo(json_format.dumps({**head, "engine": arguments, "rows": rows}, indent=2))
    else:
        table.show(out(), table.squared([_cells(r) for r in rows]), ["policy"])
        typer.echo(f"native: {_baseline()}")
        for r in rows:
            if r["error"] and r["log"]:
                typer.echo("\n".join([f"{r['policy']}:", *r["log"]]), err=True)
    if any(r["error"] or (mode is Mode.EXACT and not r["tokens_equal"]) for r in rows):
        raise typer.Exit(1)


def _hear(tell: Callable[[str], None], policy: str, line: str) -> None:
    tell(f"{policy}: {line[:WIDTH]}")


def _arguments(model: str, method: Method, draft: int, engine: str) -> Json:
    try:
        more = json_format.loads(engine)
    except ValueError as error:
        raise UsageError(f"--engine is not JSON: {error}") from None
    if not isinstance(more, dict):
        raise UsageError(f'--engine {engine} is not an object such as {{"max_model_len": 4096}}')
    drafting: Json = {"method": str(method), "num_speculative_tokens": draft}
    if method is Method.NGRAM:
        drafting |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    else:
        rates = [*SYNTHETIC, *[SYNTHETIC[-1]] * draft][:draft]
        drafting |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    folder = Path(model)
    if model.startswith((".", "/")) and not folder.is_dir():
        raise UsageError(f"{model}: no such folder")
    dummy = folder.is_dir() and not any(any(folder.glob(name)) for name in WEIGHTS)
    return {
        "model": model,
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
        "speculative_config": drafting,
        **({"load_format": "dummy"} if dummy else {}),
        **more,
    }


def _with(arguments: Json, policy: str, mode: Mode) -> Json:
    additional = dict(arguments.get("additional_config", {}))
    more = additional.pop("ssmspec", {})  # as a ring_len
    if policy != "checkpointing":
        more = {name: value for name, value in more.items() if name != "ring_len"}
    if policy != "native":
        additional["ssmspec"] = {**more, "policy": policy, "mode": str(mode)}
    elif not _on_gpu():
        additional["ssmspec"] = {"policy": "native", "backend": "torch"}
    return {**arguments, "additional_config": additional}


def _on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _baseline() -> str:
    if not _on_gpu():
        return "vLLM's policy through the reference kernels"
    return f"stock vLLM, {KERNEL}={os.environ.get(KERNEL, 'triton')}"


def _vocabulary(model: str) -> int:
    file = Path(model) / "config.json"
    config = json_format.loads(file.read_text()) if file.is_file() else {}
    return int(config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or 1000)


def _waves(vocabulary: int, requests: int, prompt: int, tokens: int) -> list[Json]:
    """Prompts of mixed lengths with a common beginning, and then some again, which find it cached; before them a few tokens
    of prompts as long, for which kernels are compiled."""
    draw = random.Random(0)
    longest = [draw.randrange(3, vocabulary) for _ in range(prompt)]
    prompts = []
    for i in range(requests):
        length = max(1, prompt * (i + 1) // requests)
        own = [draw.randrange(3, vocabulary) for _ in range(max(1, length // 8))]
        prompts.append([*longest[: length - len(own)], *own])
    others = [[draw.randrange(3, vocabulary) for _ in p] for p in prompts]
    return [
        {"prompts": others, "max_tokens": [min(tokens, WARM)] * requests},
        {"prompts": prompts, "max_tokens": [tokens] * requests},
        {"prompts": prompts[-2:], "max_tokens": [min(tokens, 16)] * len(prompts[-2:])},
    ]


def row(policy: str, native: Json, ours: Json) -> Json:
    """What is said about one policy."""
    if ours["error"] or native["error"]:
        return {
            "policy": policy,
            "error": ours["error"] or f"native: {native['error']}",
            "log": ending(ours["log"]) if ours["error"] else [],
            "tokens_equal": False,
        }
    pairs = [
        (a, b)
        for wave in zip(native["waves"], ours["waves"], strict=True)
        for a, b in zip(*wave, strict=True)
    ]
    metrics, seconds = ours["metrics"], ours["seconds"]
    made = sum(len(r["tokens"]) for wave in ours["waves"][1:] for r in wave)
    drafts = metrics.get("vllm:spec_decode_num_drafts") or 0
    accepted = metrics.get("vllm:spec_decode_num_accepted_tokens_per_pos") or []
    prompted = metrics.get("vllm:prompt_tokens") or 0
    concurrency, concurrency_tokens = fits(ours["log"])
    return {
        "policy": policy,
        "error": None,
        "requests": len(pairs),
        "tokens_equal": all(a["tokens"] == b["tokens"] for a, b in pairs),
        "logprobs_equal": all(a["logprobs"] == b["logprobs"] for a, b in pairs),
        "first_difference": _first(pairs),
        "acceptance": [round(n / drafts, 3) for n in accepted] if drafts else [],
        "tokens_per_second": made / sum(seconds["waves"][1:]),
        "start_seconds": seconds["start"],
        "concurrency": concurrency,
        "concurrency_tokens": concurrency_tokens,
        "prefix_hit_rate": sum(b["cached"] or 0 for _, b in pairs) / prompted if prompted else None,
        "workers": ours["report"],
    }


def _first(pairs: Sequence[tuple[Json, Json]]) -> Json | None:
    """The first token that differs, and how far apart native's two best were there."""
    for i, (a, b) in enumerate(pairs):
        for t, (x, y) in enumerate(zip(a["tokens"], b["tokens"], strict=False)):
            if x != y:
                best, second = sorted(a["logprobs"][t].values(), reverse=True)[:2]
                return {"request": i, "token": t, "native": x, "found": y, "native_gap": best - second}
    return None


def _cells(r: Json) -> table.Cells:
    if r["error"]:
        return {"policy": r["policy"], "note": r["error"]}
    first = r["first_difference"]
    words: dict[str, Callable[[], str]] = {
        "policy": lambda: str(r["policy"]),
        "tokens": lambda: "equal" if r["tokens_equal"] else "DIFFERS",
        "logprobs": lambda: "equal" if r["logprobs_equal"] else "differs",
        "first difference": lambda: f"request {first['request']}, token {first['token']}" if first else "",
        "accepted": lambda: " ".join(f"{n:.2f}" for n in r["acceptance"]),
        "tok/s": lambda: f"{r['tokens_per_second']:,.0f}",
        "start s": lambda: f"{r['start_seconds']:.0f}",
        "concurrency": lambda: f"{r['concurrency']:.0f}" if r["concurrency"] else "",
        "prefix hits": lambda: f"{r['prefix_hit_rate']:.0%}" if r["prefix_hit_rate"] is not None else "",
        "flushes": lambda: ", ".join(str(w["flushes"]) for w in r["workers"] if "flushes" in w),
    }
    return {title: make() for title, make in words.items()}
