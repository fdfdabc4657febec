"""`ssmspec bench`: microseconds of a speculative step on this GPU."""

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import typer
from rich.table import Table as Grid

from ssmspec.geometry import Mode, Window
from ssmspec.measure.sweep import Case

from . import parse, study
from .console import out, progress
from .errors import UsageError
from .options import Options, takes

if TYPE_CHECKING:
    from ssmspec.kernels.choices import Table
    from ssmspec.measure.bench import Timing

SCHEMA = 3


@takes(
    "model", "draft", "window", "policy", "mode", "ring", "state_dtype", "acceptance", "batch", "seed", "json"
)
def bench(ctx: typer.Context, o: Options) -> None:
    """Time whole layers over whole flush cycles, of what has passed the check of its bits at that shape.

    A layer is everything between its projections, conv, verify and gated norm, and its part of the accept; the kernels
    of vLLM, flash-linear-attention and FlashInfer, where they are installed, beside it. Without --ring checkpointing
    has the L of this GPU's table of choices. A step walks through at least 256 MiB of states, so that no cache holds
    them; device times are of CUDA graphs, medians of 15. The share is of the speed of a copy: the time it would take
    for the predicted bytes. Exits 1 where a check failed.
    """
    import torch

    if not torch.cuda.is_available():
        raise UsageError("bench needs a CUDA device, and torch finds none; see `ssmspec doctor`")
    if importlib.util.find_spec("triton") is None:
        raise UsageError("bench needs the package triton: install ssmspec[triton]")
    from ssmspec.kernels import choices
    from ssmspec.measure import bench as measure
    from ssmspec.measure import environment, peers

    found = parse.study(o, ())
    runs, timings = _runs(found, peers.PEERS, choices.here()), []
    with progress("benchmarking") as tell:
        bandwidth = measure.copy_bandwidth()
        for number, (name, w, case) in enumerate(runs, 1):
            tell(f"{number} of {len(runs)}, {name} {w.mode}")
            one = peers.run if name in peers.PEERS else measure.run
            timings.append(
                one(
                    name,
                    case.model.geometry,
                    w,
                    case.batch,
                    case.acceptance,
                    bandwidth=bandwidth,
                    seed=o.seed,
                )
            )
    if o.json:
        rows = [asdict(t) | {"layer_us": t.layer_us, "share": t.share, "model": o.model} for t in timings]
        record = {
            "schema": SCHEMA,
            "command": study.command(ctx, found.options),
            "device": torch.cuda.get_device_name(),
            "vllm": environment.installed("vllm"),
            "environment": asdict(environment.record()),
            "timings": rows,
        }
        typer.echo(json.dumps(record, indent=1))
    else:
        out().print(_table(timings))
    if any(t.refused for t in timings):
        raise typer.Exit(1)


def _runs(found: parse.Study, others: Sequence[str], table: "Table") -> list[tuple[str, Window, Case]]:
    """What is timed: a policy to which the ring's length or the mode makes no difference, once.

    A ring whose length was not asked for has the table's for this GPU.
    """
    runs: dict[tuple[object, ...], tuple[str, Window, Case]] = {}
    for case in found.cases:
        for name in (*others, *found.policies):
            for mode in found.modes:
                w = replace(
                    case.window, mode=mode if name in found.policies and name != "native" else Mode.EXACT
                )
                if found.options.ring is None:
                    w = replace(w, ring_len=table.ring(case.model.geometry, w) or w.ring_len)
                ring = w.ring_len if name == "checkpointing" else None
                runs.setdefault(
                    (name, w.mode, ring, case.batch, w.max_len, case.model.geometry), (name, w, case)
                )
    return list(runs.values())


def _table(timings: Sequence["Timing"]) -> Grid:
    table = Grid(
        "policy", "mode", "state", "K", "L", "batch", "core us", "step us", "accept us", "layer us", "share"
    )
    for t in timings:
        head = (t.policy, t.mode, t.state_dtype, str(t.draft), str(t.ring), str(t.batch))
        core = "" if t.core_us is None else f"{t.core_us.median:.1f}"
        if t.layer_us is None or t.share is None or t.step_us is None or t.accept_us is None:
            why = (
                f"absent: {t.absent}" if t.absent else f"not timed: {t.refused}" if t.refused else "core only"
            )
            table.add_row(*head, core or why, why if core else "")
            continue
        times = (t.step_us.median, t.accept_us.median, t.layer_us)
        table.add_row(*head, core, *(f"{us:.1f}" for us in times), f"{t.share:.0%}")
    return table
