"""`ssmspec bench`: microseconds of a speculative step on this GPU."""

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import typer
from rich.table import Table

from . import parse
from .console import out, progress
from .errors import UsageError
from .options import Options, takes

if TYPE_CHECKING:
    from ssmspec.measure.bench import Timing

SCHEMA = 1


@takes(
    "model", "draft", "window", "policy", "mode", "ring", "state_dtype", "acceptance", "batch", "seed", "json"
)
def bench(ctx: typer.Context, o: Options) -> None:
    """Time verify and accept over whole flush cycles, of what has passed the check of its bits at that shape.

    A step walks through at least 256 MiB of states, so that no cache holds them; device times are of CUDA graphs,
    medians of 15. The share is of the speed of a copy: the time it would take for the predicted bytes. Exits 1
    where a check failed.
    """
    import torch

    if not torch.cuda.is_available():
        raise UsageError("bench needs a CUDA device, and torch finds none; see `ssmspec doctor`")
    if importlib.util.find_spec("triton") is None:
        raise UsageError("bench needs the package triton: install ssmspec[triton]")
    from ssmspec.measure import bench as measure
    from ssmspec.measure import environment

    study, timings = parse.study(o, ()), []
    runs = [
        (case, policy, mode)
        for case in study.cases
        for policy in study.policies
        for mode in study.modes
        if policy != "native" or mode is study.modes[0]
    ]
    with progress("benchmarking") as tell:
        bandwidth = measure.copy_bandwidth()
        for number, (case, policy, mode) in enumerate(runs, 1):
            tell(f"{number} of {len(runs)}, {policy} {mode}")
            w = replace(case.window, mode=mode)
            g = case.model.geometry
            timings.append(
                measure.run(policy, g, w, case.batch, case.acceptance, bandwidth=bandwidth, seed=o.seed)
            )
    if o.json:
        rows = [asdict(t) | {"layer_us": t.layer_us, "share": t.share} for t in timings]
        record = {"schema": SCHEMA, "environment": asdict(environment.record()), "timings": rows}
        typer.echo(json.dumps(record, indent=1))
    else:
        out().print(_table(timings))
    if any(t.refused for t in timings):
        raise typer.Exit(1)


def _table(timings: Sequence["Timing"]) -> Table:
    table = Table(
        "policy", "mode", "state", "K", "batch", "verify us", "accept us", "layer us", "host us", "share"
    )
    for t in timings:
        head = (t.policy, t.mode, t.state_dtype, str(t.draft), str(t.batch))
        if t.verify_us is None or t.accept_us is None or t.layer_us is None or t.share is None:
            table.add_row(*head, f"not timed: {t.refused}")
            continue
        times = (t.verify_us.median, t.accept_us.median, t.layer_us, t.host_us or 0.0)
        table.add_row(*head, *(f"{us:.1f}" for us in times), f"{t.share:.0%}")
    return table
