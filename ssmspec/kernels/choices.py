"""Which variant of a kernel runs, and how long a ring is: a committed table per GPU, never tuned where state is carried.

`ssmspec tune` writes the tables, one file per GPU under ``tuned/``. No row changes a bit of exact mode. Where no
table or no row is for a shape, the kernels' own rules hold.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ssmspec.geometry import Arch, DType, Geometry, Mode, Window

FOLDER = Path(__file__).parent / "tuned"


class Kernel(StrEnum):
    """Whose launch a row is for."""

    HOPPER = "hopper"  # exact windows of GDN: kernels/hopper.py
    WINDOW = "window"  # exact windows of everything else: kernels/window.py
    FAST = "fast"  # kernels/fast_mma.py


@dataclass(frozen=True, kw_only=True)
class ShapeClass:
    """What a layer's rows are looked up by."""

    arch: Arch
    head_k: int
    head_v: int
    state_dtype: DType

    @classmethod
    def of(cls, g: Geometry) -> "ShapeClass":
        return cls(arch=g.arch, head_k=g.head_k, head_v=g.head_v, state_dtype=g.state_dtype)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How a window is cut up among programs."""

    warps: int  # of a program
    registers: int | None  # of a thread, at most; None: the compiler's own number
    rows: int | None = None  # of V in a program; hopper only, elsewhere they follow from the warps
    lanes: int | None = None  # of a warp along K; window only


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """A row: the launch of windows of at most ``window`` tokens and ``heads`` value heads in the whole batch."""

    kernel: Kernel
    shape: ShapeClass
    replays: bool  # whether a history is in front of the window
    window: int
    heads: int
    launch: Launch


_ANY = Launch(warps=0, registers=None)


@dataclass(frozen=True, kw_only=True)
class RingChoice:
    """A row: the L of checkpointing that took the least time at windows of ``window`` tokens."""

    mode: Mode
    shape: ShapeClass
    window: int
    ring: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """What was measured on one GPU. Tables are told apart by identity, so that a look-up is remembered cheaply."""

    device: str  # as torch names it
    launches: tuple[Tuned, ...] = ()
    rings: tuple[RingChoice, ...] = ()

    def launch(self, kernel: Kernel, g: Geometry, window: int, batch: int, replays: bool) -> Launch | None:
        """Of the next row at or above in tokens, then in heads; of the largest where none is above in heads."""
        return _launch(self, kernel, g, window, batch * g.num_v_heads, replays)

    def ring(self, g: Geometry, w: Window) -> int | None:
        """L for windows of this length and mode; None where that was not measured."""
        key = (w.mode, ShapeClass.of(g), w.max_len)
        return next((row.ring for row in self.rings if (row.mode, row.shape, row.window) == key), None)

    def merged(self, newer: "Table") -> "Table":
        """With the rows of ``newer`` in place of those for the same. Raises ValueError for another device's table."""
        if newer.device != self.device:
            raise ValueError(f"the table is of {self.device}, and this GPU is {newer.device}")
        launches = {replace(row, launch=_ANY): row for row in (*self.launches, *newer.launches)}
        rings = {replace(row, ring=0): row for row in (*self.rings, *newer.rings)}
        return Table(device=self.device, launches=tuple(launches.values()), rings=tuple(rings.values()))

    def dumped(self) -> str:
        """As a file under ``tuned/`` holds it: JSON, a row a line."""
        parts = {"launches": self.launches, "rings": self.rings}
        lists = {
            name: ",\n  ".join(json.dumps(asdict(row)) for row in rows)  # type: ignore[call-overload]
            for name, rows in parts.items()
        }
        body = ",\n".join(f' "{name}": [\n  {rows}\n ]' for name, rows in lists.items() if rows)
        return f'{{\n "device": {json.dumps(self.device)}' + (f",\n{body}" if body else "") + "\n}\n"

    @classmethod
    def loaded(cls, text: str) -> "Table":
        """What ``dumped`` wrote. Raises ValueError for a key or a value that no table has."""
        record = json.loads(text)
        try:
            return cls(
                device=record["device"],
                launches=tuple(_tuned(row) for row in record.get("launches", ())),
                rings=tuple(_ring(row) for row in record.get("rings", ())),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a table of choices: {error}") from None


def _shape(row: dict[str, Any]) -> ShapeClass:
    typed = {"arch": Arch(row["arch"]), "state_dtype": DType(row["state_dtype"])}
    return ShapeClass(**(row | typed))


def _tuned(row: dict[str, Any]) -> Tuned:
    typed = {
        "kernel": Kernel(row["kernel"]),
        "shape": _shape(row["shape"]),
        "launch": Launch(**row["launch"]),
    }
    return Tuned(**(row | typed))


def _ring(row: dict[str, Any]) -> RingChoice:
    return RingChoice(**(row | {"mode": Mode(row["mode"]), "shape": _shape(row["shape"])}))


@cache
def _launch(
    table: Table, kernel: Kernel, g: Geometry, window: int, heads: int, replays: bool
) -> Launch | None:
    key = kernel, ShapeClass.of(g), replays
    rows = [row for row in table.launches if (row.kernel, row.shape, row.replays) == key]
    tokens = min((row.window for row in rows if row.window >= window), default=None)
    rows = sorted((row for row in rows if row.window == tokens), key=lambda row: row.heads)
    return next((row.launch for row in rows if row.heads >= heads), rows[-1].launch if rows else None)


@cache
def committed() -> dict[str, Table]:
    """Every table of the package, by its device."""
    tables = [Table.loaded(path.read_text()) for path in sorted(FOLDER.glob("*.json"))]
    return {table.device: table for table in tables}


@cache
def _of_device(index: int | None) -> Table:
    name = "cpu" if index is None else torch.cuda.get_device_name(index)
    return committed().get(name, Table(device=name))


_instead: ContextVar[Table | None] = ContextVar("instead", default=None)


def here() -> Table:
    """The table of the current GPU; an empty one where none was measured."""
    return _instead.get() or _of_device(torch.cuda.current_device() if torch.cuda.is_available() else None)


@contextmanager
def using(table: Table) -> Iterator[None]:
    """Take another table meanwhile: to measure with it, or to hold that bits do not depend on it."""
    token = _instead.set(table)
    try:
        yield
    finally:
        _instead.reset(token)


def file_name(device: str) -> str:
    """Of a device's table: "NVIDIA H200" -> nvidia-h200.json."""
    return "-".join(device.lower().split()) + ".json"
