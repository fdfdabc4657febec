"""The options of `compare`, declared once. A command takes some of them, and leaves the others at their defaults."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, get_type_hints

import typer

from ssmspec.presets import DEFAULT

MODEL, FORMATS, LOAD, GPU, OUTPUT = "Model and window", "Formats", "Load", "GPU", "Output"


def _option(default: Any, panel: str, text: str, *names: str, metavar: str | None = None) -> Any:
    """``metavar`` LIST: a comma list, of which every combination gets its rows."""
    return field(
        default=default,
        metadata={"names": names, "help": text, "rich_help_panel": panel, "metavar": metavar},
    )


def _list(default: str | None, panel: str, text: str) -> Any:
    return _option(default, panel, text, metavar="LIST")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What was typed, as it was typed."""

    model: str = _option(
        DEFAULT,
        MODEL,
        "A preset, a Hub id, or the path of a config.json or of its folder. Nothing is downloaded.",
    )
    draft: str | None = _list(None, MODEL, "Drafts per step, K; 0 is standard decode. Default 3.")
    window: str | None = _list(None, MODEL, "Instead of --draft: tokens of a window, T = K + 1.")
    policy: str | None = _list(None, MODEL, "native, recover, every-step, checkpointing. Default all.")
    mode: str | None = _list(
        None, MODEL, "exact (token by token) and fast (matrix products). Default both where lives are played."
    )
    ring: str | None = _list(
        None,
        MODEL,
        "Records before a flush is due, L. Default what was tuned (bench: on this GPU, compare: on an H200),"
        " else 16, or 2T where T > 8.",
    )
    state_dtype: str | None = _list(
        None,
        FORMATS,
        "fp32, bf16, fp16, nvfp4. Default the model's own, and bf16 beside fp32 where lives are played.",
    )
    record_dtype: str = _list("fp32", FORMATS, "Of the recorded update: fp32, bf16, fp16.")
    read_copy: str = _list("none", FORMATS, "A copy that outputs read: none, fp16, bf16, fp8, nvfp4.")
    stochastic_rounding: bool = _option(False, FORMATS, "Round a 16-bit state stochastically.")
    acceptance: str | None = _option(
        None,
        LOAD,
        "A rate per draft, one probability per draft position (0.9,0.8,0.6), or a file of accepted counts,"
        " one JSON value a line. Default 0.8.",
    )
    batch: str = _list("1", LOAD, "Requests of a step.")
    seed: int = _option(0, LOAD, "Of everything random.")
    backend: str = _option("torch", LOAD, "The kernels that play a life.")
    context: str = _list("4096", GPU, "Tokens of a request, prompt and answer.")
    gpu_memory: float = _option(80.0, GPU, "GiB of one GPU.")
    gpu_utilization: float = _option(0.9, GPU, "Share of it that the engine may use.")
    weights_gib: float | None = _option(
        None, GPU, "GiB of the whole checkpoint. Default the preset's, in bf16."
    )
    max_num_seqs: int | None = _option(None, GPU, "Requests at most. Default as many as fit.")
    kv_dtype: str = _list("bf16", GPU, "Of the attention's cache: bf16, fp16, fp32, fp8.")
    cache_mode: str = _list("none", GPU, "Prefix caching: none, align.")
    tp: str = _list("1", GPU, "GPUs that share the heads; all sizes are of one of them.")
    checks: bool = _option(False, OUTPUT, "Show published numbers beside ours, each with its source.")
    json: bool = _option(False, OUTPUT, "Print JSON, the checks and the environment in it.")
    csv: bool = _option(False, OUTPUT, "Print CSV.")
    md: bool = _option(False, OUTPUT, "Print Markdown.")
    out: str | None = _option(
        None, OUTPUT, "Also write result.json, .csv and .md into this folder.", "-o", "--out", metavar="DIR"
    )
    force: bool = _option(False, OUTPUT, "Write into a folder that is not empty.")
    plot: str | None = _option(
        None, OUTPUT, "Draw bytes over K, stacked by part, into a .png or .svg.", metavar="FILE"
    )
    repro: bool = _option(False, OUTPUT, "Print the command that makes this result again.")


_SHAPE = ("model", "draft", "window", "policy", "mode", "ring")
_FORMATS = ("state_dtype", "record_dtype", "read_copy", "stochastic_rounding")
_LOAD = ("acceptance", "batch")
_GPU = ("context", "gpu_memory", "gpu_utilization", "weights_gib", "max_num_seqs", "kv_dtype")
PRINTED = ("json", "csv", "md", "out", "force", "repro")
OUTPUTS = (*PRINTED, "checks", "plot")
EXACT = (*_SHAPE, *_FORMATS, "seed", "backend", "cache_mode", *PRINTED)
TRAFFIC = (*_SHAPE, *_FORMATS, *_LOAD, "seed", "tp", "checks", *PRINTED, "plot")
CAPACITY = (*_SHAPE, *_FORMATS, *_GPU, "cache_mode", "tp", "checks", *PRINTED)
ALL = tuple(f.name for f in fields(Options))

Command = Callable[[typer.Context, Options], None]


def flag(name: str) -> str:
    """How an option is typed."""
    return "--" + name.replace("_", "-")


def takes(*names: str) -> Callable[[Command], Callable[..., None]]:
    """A command of these options. Typer reads them from the signature."""
    types, declared = get_type_hints(Options), {f.name: f for f in fields(Options)}

    def parameter(name: str) -> inspect.Parameter:
        settings = dict(declared[name].metadata)
        info = typer.Option(*(settings.pop("names") or (flag(name),)), **settings)
        return inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=declared[name].default,
            annotation=Annotated[types[name], info],
        )

    def decorate(command: Command) -> Callable[..., None]:
        def run(ctx: typer.Context, **typed: Any) -> None:
            command(ctx, Options(**typed))

        first = inspect.signature(run).parameters["ctx"]
        parameters = [first, *(parameter(name) for name in names)]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate
