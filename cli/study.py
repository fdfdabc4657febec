"""What every `compare` command does: parse, measure, deliver."""

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields

import typer

from ssmspec.measure import sweep
from ssmspec.measure.advice import advise
from ssmspec.measure.capacity_checks import capacity_checks
from ssmspec.measure.checks import Check, traffic_checks
from ssmspec.measure.report import Report
from ssmspec.measure.speeds import NEAR, measured
from ssmspec.measure.sweep import Part, Row

from . import output, parse, table
from .console import progress
from .errors import sentence
from .options import OUTPUTS, Options, flag
from .parse import Study

NOTES = {
    Part.EXACT: "Exactness: heads, rows and layers do not mix, so a small shape is played: two layers, a group of"
    " heads, 16 rows; 3 requests, 64 windows, random acceptance, and a ring of 16 records or 2T where none was"
    " asked for.",
    Part.TRAFFIC: "Traffic: MB by all recurrent layers in one step of the batch; bytes vs native: less is better.",
    Part.CAPACITY: "Capacity: a request at its full context, on one GPU; sizes as vLLM 0.33.0's planner sets them.",
}
ALONE = {
    Part.EXACT: "Error: of states, against float64.",
    Part.TRAFFIC: "KiB of one request in one layer. Export: what one request's state takes on the host.",
}
"""Of columns that are shown where nothing else was asked for."""


def run(ctx: typer.Context, o: Options, *parts: Part) -> None:
    """Measure the parts and deliver one report. Exits 1 where something is not as expected."""
    study = parse.study(o, parts)
    output.check(o, study.cases)
    with progress("comparing") as tell:
        if Part.EXACT in parts:
            single_thread()
        rows = sweep.run(
            study.cases, study.policies, study.modes, parts, seed=o.seed, backend=o.backend, progress=tell
        )
        report = Report(
            command=command(ctx, study.options),
            model=study.model,
            rows=tuple(rows),
            advice=tuple(advise(rows)),
            checks=tuple(_checks(o, parts)),
            notes=tuple(_notes(study, rows, parts)),
        )
    output.deliver(report, o)
    if not report.ok:
        raise typer.Exit(1)


def single_thread() -> None:
    """The played tensors are some kilobytes: a second thread would only be waited for."""
    import torch

    torch.set_num_threads(1)


def command(ctx: typer.Context, o: Options) -> str:
    """The command line that measures the same, with the defaults that were taken written out."""
    words = ctx.command_path.split()
    for name in (f.name for f in fields(Options)):
        value = getattr(o, name)
        if name not in ctx.params or name in OUTPUTS or value is None or value is False:
            continue
        words += [flag(name)] if value is True else [flag(name), str(value)]
    return shlex.join(words)


def _checks(o: Options, parts: Sequence[Part]) -> list[Check]:
    """Where somebody will read them."""
    if not (o.checks or o.json or o.out):
        return []
    found = traffic_checks() if Part.TRAFFIC in parts else []
    return found + (capacity_checks() if Part.CAPACITY in parts else [])


def _notes(study: Study, rows: Sequence[Row], parts: Sequence[Part]) -> list[str]:
    """What the numbers are of, the defaults that the model's config left open, and what the planner had to say."""
    said = Counter(note for row in rows if row.capacity for note in row.capacity.notes)
    unfit = dict.fromkeys(
        f"Capacity: does not fit: {sentence(ValueError(row.unfit))}." for row in rows if row.unfit
    )
    alone = [ALONE[part] for part in parts if len(parts) == 1 and part in ALONE]
    timed = [_timed()] if any(row.speed for row in rows if row.traffic) else []
    return [*(NOTES[part] for part in parts), *alone, *timed, *unfit, *study.model.notes, *said]


def _timed() -> str:
    return (
        f"{' '.join(table.SPEED.split())}: how many times as fast a whole layer's step is as with vLLM 0.33.0's own"
        f" kernels, more is better: measured on an {measured().device}, with the accepted tokens of docs/benchmarks.md,"
        f" at the load (B requests x HV heads of a GPU) nearest to the row's, where one within {NEAR}x of it was timed,"
        " at the longest window that was timed and is no longer than the row's, and with the row's ring; an fp16 state"
        " as a bf16 one."
    )
