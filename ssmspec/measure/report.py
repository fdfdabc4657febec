"""A result as data: JSON with a versioned schema and the environment, and flat rows for CSV."""

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ssmspec.measure import speeds
from ssmspec.measure.checks import Check
from ssmspec.measure.environment import record
from ssmspec.measure.sweep import Row
from ssmspec.model import Model
from ssmspec.runtime.setup import Setup

if TYPE_CHECKING:  # importing it imports torch
    from ssmspec.measure.exact import Exactness

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that a comparison found. It is what is printed, and what is written."""

    command: str  # that makes it again
    model: Model
    rows: tuple[Row, ...]
    advice: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """What must be equal is, and the published numbers come out."""
        return all(row.ok for row in self.rows) and all(check.ok for check in self.checks)

    @property
    def varied(self) -> tuple[str, ...]:
        """The labels that differ between rows."""
        names = self.rows[0].case.labels()
        return tuple(name for name in names if len(self.values(name)) > 1)

    def values(self, label: str) -> list[str | int]:
        """Of the rows that have it, each once."""
        rows = (row.labels() for row in self.rows)
        return list(dict.fromkeys(labels[label] for labels in rows if label in labels))

    def data(self) -> dict[str, Any]:
        """Everything, for JSON."""
        g = self.model.geometry
        found = {
            "schema": "ssmspec.compare",
            "schema_version": SCHEMA_VERSION,
            "ok": self.ok,
            "command": self.command,
            "environment": asdict(record()),
            "model": {
                "name": self.model.name,
                "source": self.model.source,
                "arch": g.arch,
                "num_layers": self.model.num_layers,
                "recurrent_layers": g.num_layers,
                "num_k_heads": g.num_k_heads,
                "num_v_heads": g.num_v_heads,
                "head_k": g.head_k,
                "head_v": g.head_v,
                "act_dtype": g.act_dtype,
            },
            "rows": [row_data(row) for row in self.rows],
            "advice": self.advice,
            "checks": [asdict(check) for check in self.checks],
            "notes": self.notes,
        }
        return found

    def json(self) -> str:
        return _json(self.data())

    def csv(self) -> str:
        """One line a row; a nested value is under its path, as traffic.reads.state."""
        flat = [_flat(_plain(row_data(row))) for row in self.rows]
        names = list(dict.fromkeys(name for line in flat for name in line))
        text = io.StringIO()
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat)
        return text.getvalue()


@dataclass(frozen=True, kw_only=True)
class Played:
    """What a script showed of each policy."""

    script: str
    setup: Setup
    events: int
    results: "tuple[Exactness, ...]"
    wrong: str | None = None  # what a soak says of it

    @property
    def ok(self) -> bool:
        """What must be equal is."""
        return self.wrong is None and all(e.ok for e in self.results)

    def json(self) -> str:
        found = {
            "schema": "ssmspec.play",
            "schema_version": SCHEMA_VERSION,
            "ok": self.ok,
            "script": self.script,
            "setup": json.loads(self.setup.dump()),
            "events": self.events,
            "wrong": self.wrong,
            "environment": asdict(record()),
            "policies": [
                {"policy": e.policy, "mode": e.mode, "expected": asdict(e.expected), **exact_data(e)}
                for e in self.results
            ],
        }
        return _json(found)


def row_data(row: Row) -> dict[str, Any]:
    """A row's labels and what was measured of it; bytes of ``traffic`` are of one request, layer and step."""
    labels = dict.fromkeys(row.case.labels()) | row.labels()
    found: dict[str, Any] = {"policy": row.policy, "mode": row.mode, **labels}
    found["acceptance"] = row.case.acceptance.per_position
    found["accepted_mean"] = row.case.acceptance.mean
    found["expected"] = asdict(row.expected) | {"equal": row.expected.equal}
    if row.exact is not None:
        found["exact"] = exact_data(row.exact) | {
            "ring": row.case.window.limit if row.has_ring else None,  # a life is one for all policies
            "error": row.exact.error.relative,
            "native_error": row.exact.native_error.relative,
        }
    if row.traffic is not None:
        t = row.traffic
        found["traffic"] = asdict(t) | {"read": t.read, "write": t.write, "vs_native": t.vs_native}
        found["speed"] = _speed_data(row)
        found["traffic"] |= dict(zip(("model_step_read", "model_step_write"), row.model_step, strict=True))
    if row.capacity is not None:
        found["capacity"] = _capacity_data(row)
    elif row.unfit:
        found["capacity"] = {"requests": 0, "unfit": row.unfit}
    found["note"] = row.note
    return found


def _speed_data(row: Row) -> dict[str, Any]:
    """Beside vLLM's kernels: on which GPU, and of which timed cell; nulls where no such layer was timed."""
    names, speed = ("times", "batch", "heads", "window", "ring"), row.speed
    if speed is None:
        return dict.fromkeys(("device", *names))
    return {"device": speeds.measured().device, **{name: getattr(speed, name) for name in names}}


def exact_data(e: "Exactness") -> dict[str, Any]:
    """What one life showed of a policy, errors against float64 aside."""
    return {
        "equal": e.equal,
        "ok": e.ok,
        "first": asdict(e.first) if e.first else None,
        "outputs": asdict(e.outputs),
        "states": asdict(e.states),
    }


def _capacity_data(row: Row) -> dict[str, Any]:
    assert row.capacity is not None
    c, names = row.capacity, ("budget", "slot_bytes", "slots", "num_blocks", "requests", "limit", "notes")
    return {
        "parts": asdict(c.parts),
        "request_bytes": c.parts.total,
        "recurrent_state_bytes": c.parts.recurrent_state,
        **{name: getattr(c, name) for name in (*names, "largest_max_num_seqs", "concurrency")},
        "block_tokens": c.plan.block_tokens,
        "page_bytes": c.plan.page_bytes,
        "padded_bytes": c.plan.padded_bytes,
        "blocks_per_request": c.blocks_per_request,
        "reuse": asdict(row.reuse) if row.reuse else None,
        "explain": c.explain().splitlines(),
    }


def _json(data: dict[str, Any]) -> str:
    """A number that is not finite becomes null: JSON has none."""
    return json.dumps(_plain(data), indent=2, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


_NESTED = ("first", "reuse", "explain")  # of these, only what is inside becomes a column


def _flat(values: dict[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{before}{key}.")
        elif key not in _NESTED:
            found[before + key] = _cell(value)
    return found


def _cell(value: Any) -> Any:
    return " ".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else value
