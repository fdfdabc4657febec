"""Which variant of a kernel runs, and how long a ring is best: a committed table per GPU, never tuned where state is
carried.

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
from typing import TypeVar

import torch

from ssmspec.checked import ConfigError, Section, show
from ssmspec.geometry import MAX_RING, Arch, DType, Geometry, Mode, Window

FOLDER = Path(__file__).parent / "tuned"
E = TypeVar("E", bound=StrEnum)


class Kernel(StrEnum):
    """Whose launch a row is for."""

    HOPPER = "hopper"  # exact windows that kernels/hopper.py serves
    WINDOW = "window"  # all other exact windows: kernels/window.py
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
    launch: Launch | None  # None: by the kernel's own rule, which was as fast


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
        launches = {replace(row, launch=None): row for row in (*self.launches, *newer.launches)}
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
        """What ``dumped`` wrote. Raises ValueError for what no table holds."""
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not a table of choices: {error}") from None
        if not isinstance(record, dict):
            raise ValueError("not a table of choices: it is no JSON object")
        whole = Section(record)
        return cls(
            device=_text(whole, "device"),
            launches=tuple(map(_tuned, _rows(whole, "launches"))),
            rings=tuple(map(_ring, _rows(whole, "rings"))),
        )


def _text(row: Section, key: str) -> str:
    name, value = row.string(key)
    if value is None:
        raise ConfigError(f"'{name}' is missing")
    return value


def _member(kind: type[E], row: Section, key: str) -> E:
    value = _text(row, key)
    if value not in list(kind):
        raise ConfigError(f"{row.path}{key}={show(value)} is not one of {', '.join(kind)}")
    return kind(value)


def _flag(row: Section, key: str) -> bool:
    name, value = row.find(key)
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={show(value)} is not true or false")
    return value


def _power(row: Section, key: str, most: int) -> int | None:
    """A power of 2, or nothing."""
    if row.find(key)[1] is None:
        return None
    value = row.integer(key, most=most)
    if value & (value - 1):
        raise ConfigError(f"{row.path}{key}={value} is not a power of 2")
    return value


def _rows(whole: Section, key: str) -> list[Section]:
    name, rows = whole.array(key, of=dict)
    return [Section(row, f"{name}[{i}].") for i, row in enumerate(rows or ())]


def _shape(row: Section) -> ShapeClass:
    return ShapeClass(
        arch=_member(Arch, row, "arch"),
        head_k=row.integer("head_k"),
        head_v=row.integer("head_v"),
        state_dtype=_member(DType, row, "state_dtype"),
    )


def _tuned(row: Section) -> Tuned:
    kernel = _member(Kernel, row, "kernel")
    return Tuned(
        kernel=kernel,
        shape=_shape(row.section("shape")),
        replays=_flag(row, "replays"),
        window=row.integer("window"),
        heads=row.integer("heads"),
        launch=None if row.find("launch")[1] is None else _launched(row.section("launch"), kernel),
    )


def _launched(how: Section, kernel: Kernel) -> Launch:
    warps, rows = _power(how, "warps", 32), _power(how, "rows", 256)
    if warps is None or (rows is None and kernel is Kernel.HOPPER):
        raise ConfigError(f"'{how.path}{'rows' if warps else 'warps'}' is missing")
    registers = how.find("registers")[1]
    return Launch(
        warps=warps,
        registers=None if registers is None else how.integer("registers", least=16, most=255),
        rows=rows,
        lanes=_power(how, "lanes", 32),
    )


def _ring(row: Section) -> RingChoice:
    return RingChoice(
        mode=_member(Mode, row, "mode"),
        shape=_shape(row.section("shape")),
        window=row.integer("window"),
        ring=row.integer("ring", most=MAX_RING),
    )


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
