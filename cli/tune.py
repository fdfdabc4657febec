"""`ssmspec tune`: the table of the fastest launches and ring lengths on this GPU."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table as Grid

from . import files, parse
from .console import out, progress
from .errors import UsageError
from .options import Options

if TYPE_CHECKING:
    from ssmspec.kernels.choices import Launch, Table

DEFAULTS = Options()


def tune(
    model: Annotated[
        str, typer.Option(help="A preset, a Hub id, or the path of a config.json.")
    ] = DEFAULTS.model,
    draft: Annotated[str, typer.Option(help="Drafts per step, K.", metavar="LIST")] = "0,1,3,7",
    mode: Annotated[str, typer.Option(help="exact, fast.", metavar="LIST")] = "exact,fast",
    state_dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16.", metavar="LIST")] = "fp32,bf16",
    batch: Annotated[str, typer.Option(help="Requests of a step.", metavar="LIST")] = "1,8,32,256",
    acceptance: Annotated[str, typer.Option(help="A rate per draft.")] = "0.8",
    json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
    out_file: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Write the table here; rows of other shapes that it has stay.", metavar="FILE"
        ),
    ] = None,
) -> None:
    """Measure which launch of each kernel and which ring length is the fastest on this GPU.

    Every candidate is checked against native before it is timed: exact mode's bits, fast mode's outputs. Times are of
    CUDA graphs over whole flush cycles. The kernels read the table of their GPU from ssmspec/kernels/tuned/, and never
    measure by themselves.
    """
    import torch

    if not torch.cuda.is_available():
        raise UsageError("tune needs a CUDA device, and torch finds none; see `ssmspec doctor`")
    if importlib.util.find_spec("triton") is None:
        raise UsageError("tune needs the package triton: install ssmspec[triton]")
    old = _old(out_file, torch.cuda.get_device_name())
    typed = Options(
        model=model, draft=draft, mode=mode, state_dtype=state_dtype, batch=batch, acceptance=acceptance
    )
    found = parse.study(typed, ())
    from ssmspec.measure import tune as measure

    cases = [
        measure.Case(
            geometry=case.model.geometry,
            window=replace(case.window, mode=kind),
            batch=case.batch,
            acceptance=case.acceptance,
        )
        for kind in found.modes
        for case in found.cases
    ]
    with progress("tuning") as tell:
        table = measure.run(cases, tell)
    if out_file is not None:
        with files.whole(out_file, "--out") as path:
            path.write_text((old.merged(table) if old else table).dumped(), encoding="utf-8")
    if json:
        typer.echo(table.dumped(), nl=False)
    else:
        out().print(_grid(table))


def _old(target: Path | None, device: str) -> "Table | None":
    """What is there already. Raises UsageError where nothing could be written, or what is there is something else."""
    if target is None:
        return None
    files.check(target, "--out")
    if not target.exists():
        return None
    from ssmspec.kernels.choices import Table

    try:
        old = Table.loaded(target.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--out {target} is there, and is no table: {error}") from None
    if old.device != device:
        raise UsageError(f"--out {target} is the table of {old.device}, and this GPU is {device}")
    return old


def _launched(how: "Launch") -> str:
    parts = {"rows": how.rows, "lanes": how.lanes, "warps": how.warps, "registers": how.registers}
    return ", ".join(f"{name} {value}" for name, value in parts.items() if value is not None)


def _grid(table: "Table") -> Grid:
    grid = Grid("what", "shape", "state", "T", "heads", "choice", title=table.device)
    for row in table.launches:
        s, how = row.shape, row.launch
        choice = "the kernel's own rule" if how is None else _launched(how)
        shape = f"{s.arch} {s.head_v}x{s.head_k}"
        grid.add_row(str(row.kernel), shape, str(s.state_dtype), str(row.window), str(row.heads), choice)
    for ring in table.rings:
        s = ring.shape
        shape = f"{s.arch} {s.head_v}x{s.head_k}"
        grid.add_row(f"ring, {ring.mode}", shape, str(s.state_dtype), str(ring.window), "", f"L={ring.ring}")
    return grid
