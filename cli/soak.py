"""`ssmspec soak`: random lives against native, for as long as asked."""

import time
from math import inf
from pathlib import Path
from typing import Annotated

import typer

from ssmspec.layout import POLICY_NAMES
from ssmspec.runtime.setup import Device

from . import files, parse
from .console import progress
from .study import single_thread


def soak(
    minutes: Annotated[
        float | None, typer.Option(help="Stop after that many minutes; 1 where no --events are given.", min=0)
    ] = None,
    events: Annotated[int | None, typer.Option(help="Stop after that many events.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="What the lives are drawn from.", min=0)] = 0,
    policy: Annotated[
        str, typer.Option("--policy", metavar="LIST", help="Who is compared with native.")
    ] = ",".join(POLICY_NAMES),
    backend: Annotated[str, typer.Option(help="What computes.")] = "torch",
    device: Annotated[Device, typer.Option(help="Where.")] = Device.CPU,
    jobs: Annotated[int, typer.Option(help="Processes, no more than CPUs.", min=1)] = 1,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where a failing script is written.")
    ] = Path("soak-failure.jsonl"),
) -> None:
    """Play random lives of random shapes under the policies and native, until time or events are over or one fails.

    A life that fails is cut down to a short script, which `ssmspec play` reproduces. The same seed finds the same
    failure, whatever the number of jobs. Exits 1 where one failed.
    """
    from ssmspec.measure import soak as lives

    names = parse.choices("policy", policy, {name: name for name in POLICY_NAMES})
    files.check(output, "--output")
    single_thread()
    start = time.monotonic()

    def rate(report: lives.Report) -> str:
        seconds = time.monotonic() - start
        return f"{report.lives:,} lives, {report.events:,} events, {report.events / seconds:,.0f} events/s"

    with progress("soaking") as tell:
        report = lives.run(
            lives.Soak(seed=seed, policies=names, backend=backend, device=device),
            minutes=minutes if minutes is not None else inf if events else 1.0,
            events=events or inf,
            jobs=jobs,
            progress=lambda report: tell(rate(report)),
        )
    found = report.found
    typer.echo(f"{rate(report)}, seed {seed}: {'one went wrong' if found else 'none wrong'}")
    typer.echo(", ".join(f"{kind} {n:,}" for kind, n in sorted(report.kinds.items())))
    if found is None:
        return
    with files.whole(output, "--output") as part:
        part.write_text("".join(f"{line}\n" for line in found.lines()), encoding="utf-8")
    typer.echo(
        f"life {found.life}: {found.failure.text}\n"
        f"{found.drawn} events, of which {len(found.script)} are enough:\n"
        f"ssmspec play {output} --policy {','.join(found.policies)}"
    )
    raise typer.Exit(1)
