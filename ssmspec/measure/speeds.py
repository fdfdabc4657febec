"""How fast a layer's step was on a GPU beside stock vLLM's kernels: what bytes alone do not tell.

Exact replay is bound by instructions as much as by bytes, so the policy that moves least is not always the fastest.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ssmspec import presets
from ssmspec.geometry import Arch, DType, Geometry, Mode, Window
from ssmspec.layout import POLICY_NAMES

FILE = Path(__file__).parent / "measured" / "nvidia-h200.json"
NEAR = 2  # a load further away by ratio says nothing of another
STOCK = "vllm-"  # what the names of vLLM's own kernels begin with
OURS = [name for name in POLICY_NAMES if name != "native"]


@dataclass(frozen=True, kw_only=True)
class Speed:
    """A policy at one ring: whole layer, at a measured batch and mean of accepted tokens."""

    arch: Arch
    head_k: int
    head_v: int
    heads: int  # HV of the layer that was timed
    state_dtype: DType
    window: int
    batch: int
    mode: Mode
    policy: str
    ring: int | None  # None where the policy keeps none between steps
    times: float  # of the speed of vLLM's faster path in the same run

    @property
    def load(self) -> int:
        """States that a step walks through."""
        return self.batch * self.heads

    @property
    def cell(self) -> str:
        """What was timed, in the letters of geometry.py."""
        ring = "" if self.ring is None else f" L={self.ring}"
        return f"B={self.batch} HV={self.heads} K={self.window - 1}{ring}"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Of one GPU."""

    device: str
    batch: int  # the largest there is
    speeds: tuple[Speed, ...]

    def of(self, policy: str, g: Geometry, w: Window, batch: int) -> Speed | None:
        """Of ``batch`` requests of a rank's layer: what was timed nearest in load (batch x value heads), within NEAR of
        it, at the longest measured window that is no longer, the same for all policies; one token is apart, since
        standard decode has kernels of its own. A 16-bit state is a bf16 one, and checkpointing's ring is the window's.

        None where no such layer was timed: other heads, formats, rings or loads, windows beyond the measured ones, or
        a policy that was not in that run.
        """
        if (
            g.read_dtype is not None
            or g.record_dtype is not DType.FP32
            or g.stochastic
            or g.act_dtype is DType.FP32
        ):
            return None
        state = DType.BF16 if g.state_dtype is DType.FP16 else g.state_dtype
        key = (g.arch, g.head_k, g.head_v, state, w.mode)
        rows = [row for row in self.speeds if _key(row) == key and (row.window == 1) == (w.max_len == 1)]
        rows = _nearest(rows, batch * g.num_v_heads)
        windows = {row.window for row in rows}
        window = max((n for n in windows if n <= w.max_len), default=0)
        if w.max_len > max(windows, default=0):
            return None
        found = (row for row in rows if (row.window, row.policy) == (window, policy))
        return next((row for row in found if row.ring in (None, w.limit)), None)

    def dumped(self) -> str:
        """As the file holds it: JSON, a row a line."""
        rows = ",\n  ".join(json.dumps(asdict(row)) for row in self.speeds)
        return f'{{"device": "{self.device}", "batch": {self.batch}, "speeds": [\n  {rows}\n]}}\n'


def _key(row: Speed) -> tuple[object, ...]:
    return row.arch, row.head_k, row.head_v, row.state_dtype, row.mode


def _nearest(rows: Sequence[Speed], load: int) -> list[Speed]:
    """Those of the load that is nearest by ratio, the smaller of two; none where that is further than NEAR."""

    def apart(one: int) -> float:
        return max(one / load, load / one)

    nearest = min(sorted({row.load for row in rows}), key=apart, default=0)
    return [row for row in rows if row.load == nearest and apart(nearest) <= NEAR]


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
    """From whole layers that were timed beside vLLM's: the rows of benchmarks up to that batch, at each window's and
    batch's largest mean of accepted. A later record's rows take the place of an earlier one's of the same mean."""
    found: dict[Speed, Speed] = {}
    largest: dict[tuple[str, str, int, int], float] = {}
    for record in records:
        timed: dict[tuple[str, str, int, int], dict[float, list[Mapping[str, Any]]]] = {}
        for row in record["timings"]:
            if row["batch"] <= batch and row["layer_us"] is not None and row.get("fused", True):
                key = (row["model"], row["state_dtype"], row["draft"] + 1, row["batch"])
                timed.setdefault(key, {}).setdefault(row["accepted"], []).append(row)
        for key, cells in timed.items():
            largest[key] = max(largest.get(key, 0.0), *cells)
            found |= {replace(one, times=0.0): one for one in _beside(cells.get(largest[key], ()))}
    return tuple(found.values())


def _beside(rows: Sequence[Mapping[str, Any]]) -> list[Speed]:
    """Each policy at each ring, where vLLM's kernels were in the same run."""
    stock = min((row["layer_us"] for row in rows if row["policy"].startswith(STOCK)), default=None)
    return [_speed(row, stock) for row in rows if row["policy"] in OURS] if stock is not None else []


def _speed(row: Mapping[str, Any], stock: float) -> Speed:
    g = presets.load(row["model"]).geometry
    return Speed(
        arch=g.arch,
        head_k=g.head_k,
        head_v=g.head_v,
        heads=g.num_v_heads,
        state_dtype=DType(row["state_dtype"]),
        window=row["draft"] + 1,
        batch=row["batch"],
        mode=Mode(row["mode"]),
        policy=row["policy"],
        ring=row["ring"] if row["policy"] == "checkpointing" else None,
        times=round(stock / row["layer_us"], 2),
    )
