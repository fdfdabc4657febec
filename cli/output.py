"""Where a report goes: into files first, then to stdout in one form."""

from collections.abc import Sequence
from pathlib import Path

import typer

from ssmspec.geometry import Mode
from ssmspec.measure.report import Report
from ssmspec.measure.sweep import Case

from . import files, plot, render
from .console import out
from .errors import UsageError
from .options import Options


def check(o: Options, cases: Sequence[Case]) -> None:
    """Refuse what could not be written before anything is computed. Raises UsageError."""
    forms = [f"--{name}" for name in ("json", "csv", "md") if getattr(o, name)]
    if len(forms) > 1:
        raise UsageError(f"{' and '.join(forms)} exclude each other: print one, and -o writes all")
    if o.out is not None:
        folder = Path(o.out)
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"-o {folder} is a file, and a folder is needed")
        if not o.force and folder.is_dir() and any(folder.iterdir()):
            raise UsageError(f"-o {folder} is not empty; --force writes into it all the same")
        files.check(folder, "-o")
    if o.plot is not None:
        plot.check(o.plot, cases)


def deliver(report: Report, o: Options) -> None:
    """Write the files that were asked for, then print."""
    if o.out is not None:
        texts = {"json": report.json(), "csv": report.csv(), "md": render.markdown(report)}
        files.write_folder(Path(o.out), {f"result.{form}": text for form, text in texts.items()}, "-o")
    if o.plot is not None:
        rows = report.rows
        mode = next((row.mode for row in rows if row.mode), Mode.EXACT)
        plot.write(o.plot, [row.case for row in rows], [row.policy for row in rows], mode)
    if o.json:
        typer.echo(report.json(), nl=False)
    elif o.csv:
        typer.echo(report.csv(), nl=False)
    elif o.md:
        typer.echo(render.markdown(report), nl=False)
    else:
        render.show(out(), report, checks=o.checks)
    if o.repro:
        typer.echo(report.command, err=o.json or o.csv or o.md)
