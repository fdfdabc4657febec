"""How fast a layer's step was on a GPU beside stock vLLM's kernels: what bytes alone do not tell.

Exact replay is bound by instructions as much as by bytes, so the policy that moves least is not always the fastest.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ssmspec import presets
from ssmspec.geometry import MAX_RING, Arch, DType, Geometry, Mode, Window
from ssmspec.layout import POLICY_NAMES

FILE = Path(__file__).parent / "measured" / "nvidia-h200.json"
STOCK = "vllm-"  # what the names of vLLM's own kernels begin with
OURS = [name for name in POLICY_NAMES if name != "native"]


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The fastest ring of a policy, whole layer, at the measured batch and mean of accepted tokens."""

    arch: Arch
    head_k: int
    head_v: int
    state_dtype: DType
    window: int
    mode: Mode
    policy: str
    ring: int  # as it was asked for; every-step and recover take none
    times: float  # of the speed of vLLM's faster path in the same run


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Of one GPU."""

    device: str
    batch: int
    speeds: tuple[Speed, ...]

    def of(self, policy: str, g: Geometry, w: Window) -> Speed | None:
        """The nearest measured window at or above, one token apart from the others, since standard decode has kernels
        of its own; None where this layer's heads or state were not measured."""
        key = (g.arch, g.head_k, g.head_v, g.state_dtype, w.mode, policy)
        longest = 1 if w.max_len == 1 else MAX_RING
        rows = [row for row in self.speeds if w.max_len <= row.window <= longest and _key(row) == key]
        return min(rows, key=lambda row: row.window, default=None)

    def dumped(self) -> str:
        """As the file holds it: JSON, a row a line."""
        rows = ",\n  ".join(json.dumps(asdict(row)) for row in self.speeds)
        return f'{{"device": "{self.device}", "batch": {self.batch}, "speeds": [\n  {rows}\n]}}\n'


def _key(row: Speed) -> tuple[object, ...]:
    return row.arch, row.head_k, row.head_v, row.state_dtype, row.mode, row.policy


@cache
def measured() -> Measured:
    """The package's own numbers, which `benchmarks/table.py` writes."""
    record = json.loads(FILE.read_text(encoding="utf-8"))
    return Measured(
        device=record["device"], batch=record["batch"], speeds=tuple(map(_loaded, record["speeds"]))
    )


def _loaded(row: dict[str, Any]) -> Speed:
    kinds = {"arch": Arch, "state_dtype": DType, "mode": Mode}
    return Speed(**row | {name: kind(row[name]) for name, kind in kinds.items()})


def speeds_of(records: Iterable[Mapping[str, Any]], batch: int) -> tuple[Speed, ...]:
    """From whole layers that were timed beside vLLM's: the rows of benchmarks, at each window's largest mean of accepted."""
    timed: dict[tuple[str, str, int], dict[float, list[Mapping[str, Any]]]] = {}
    for row in (row for record in records for row in record["timings"]):
        if row["batch"] == batch and row["layer_us"] is not None and row.get("fused", True):
            cells = timed.setdefault((row["model"], row["state_dtype"], row["draft"] + 1), {})
            cells.setdefault(row["accepted"], []).append(row)
    found: dict[Speed, Speed] = {}
    for cells in timed.values():
        rows = cells[max(cells)]
        stock = min((row["layer_us"] for row in rows if row["policy"].startswith(STOCK)), default=0.0)
        for speed in (_speed(row, stock) for row in rows if stock and row["policy"] in OURS):
            key = replace(speed, ring=0, times=0.0)
            found[key] = max(speed, found.get(key, speed), key=lambda one: one.times)
    return tuple(found.values())


def _speed(row: Mapping[str, Any], stock: float) -> Speed:
    g = presets.load(row["model"]).geometry
    return Speed(
        arch=g.arch,
        head_k=g.head_k,
        head_v=g.head_v,
        state_dtype=DType(row["state_dtype"]),
        window=row["draft"] + 1,
        mode=Mode(row["mode"]),
        policy=row["policy"],
        ring=row["ring"],
        times=round(stock / row["layer_us"], 2),
    )
