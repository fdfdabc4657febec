"""The tables of docs/benchmarks.md, generated from the JSON that `ssmspec bench --json` printed."""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from ssmspec.layout import POLICY_NAMES

Row = Mapping[str, Any]
PEERS = {"vllm-fused-op": "vLLM, conv and fused op", "vllm-triton": "vLLM, conv, Triton kernel, norm"}
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
PAGE = re.compile(r"(<!-- bench: ([^\n]*?) -->\n).*?(<!-- end -->)", re.DOTALL)


def rendered(page: str, root: Path) -> str:
    """The page with every block between ``<!-- bench: FILES -->`` and ``<!-- end -->`` generated again.

    Files are named from ``root``, with spaces between them; a file holds what one run printed, or a list of such.
    """

    def block(found: re.Match[str]) -> str:
        read = [json.loads((root / name).read_text()) for name in found[2].split()]
        records = [record for one in read for record in (one if isinstance(one, list) else [one])]
        return found[1] + tables(records) + found[3]

    return PAGE.sub(block, page)


def tables(records: Sequence[Mapping[str, Any]]) -> str:
    """One table per batch size, a row per policy and mode, a column per state dtype and window; what was refused last."""
    rows = [row for record in records for row in record["timings"]]
    batches = sorted({row["batch"] for row in rows}, reverse=True)
    parts = [_sources(records), *(_table(batch, rows) for batch in batches)]
    refused = [
        f"- {_name(row)}, {_column(row)}, B={row['batch']}: {row['refused']}"
        for row in rows
        if row["refused"]
    ]
    return "\n".join(
        [*parts, *([f"Not timed, since a check failed:\n\n{chr(10).join(refused)}\n"] if refused else [])]
    )


def _sources(records: Sequence[Mapping[str, Any]]) -> str:
    """Where the runs were made, and their commands."""
    commands: dict[str, list[str]] = {}
    for record in records:
        e = record["environment"]
        driver = re.search(r"\d+(\.\d+)+", e["driver"] or "")
        versions = f"driver {driver[0] if driver else 'unknown'}, torch {e['torch']}, Triton {e['triton']}"
        where = f"{record['device']}, {versions}, vLLM {record['vllm']}"
        commands.setdefault(where, []).append(record["command"])
    return "\n".join(f"{where}:\n\n```\n{chr(10).join(lines)}\n```\n" for where, lines in commands.items())


def _name(row: Row) -> str:
    if row["policy"] in PEERS:
        return PEERS[row["policy"]]
    ring = f", L={row['ring']}" if row["policy"] == "checkpointing" else ""
    return str(row["policy"]) + ring + (", fast" if row["mode"] == "fast" else "")


def _column(row: Row) -> str:
    return f"{SHORT.get(row['state_dtype'], row['state_dtype'])} T={row['draft'] + 1}"


def _place(row: Row) -> tuple[int, int]:
    """fp32 first, then what is typed after it; windows rise."""
    return [*SHORT, row["state_dtype"]].index(row["state_dtype"]), row["draft"]


def _rank(row: Row) -> tuple[bool, int, int]:
    """Peers first, fast mode last, policies in their order."""
    order = (*PEERS, *POLICY_NAMES)
    return row["mode"] == "fast", order.index(row["policy"]), row["ring"]


def _table(batch: int, rows: Sequence[Row]) -> str:
    here = [row for row in rows if row["batch"] == batch]
    columns = list(dict.fromkeys(map(_column, sorted(here, key=_place))))
    cells = {(_name(row), _column(row)): row for row in here}
    best = {
        column: min((t for name in PEERS.values() if (t := _time(cells.get((name, column))))), default=None)
        for column in columns
    }
    names = list(dict.fromkeys(map(_name, sorted(here, key=_rank))))
    text = {(n, c): _cell(cells.get((n, c)), best[c]) for n, c in product(names, columns)}
    lines = [f"| B={batch}, us | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {n} | {' | '.join(text[n, c] for c in columns)} |" for n in names]
    return "\n".join(lines) + "\n"


def _time(row: Row | None) -> float | None:
    return None if row is None else row["layer_us"]


def _cell(row: Row | None, peer: float | None) -> str:
    """Microseconds; how many times faster than the fastest peer; share of the time a copy of the bytes would take."""
    if row is None:
        return ""
    if row["layer_us"] is None:
        return "absent" if row["absent"] else "refused"
    us = row["layer_us"]
    notes = [f"{row['share']:.0%}".replace("%", " %")]
    if peer is not None and row["policy"] not in PEERS:
        notes.insert(0, f"{peer / us:.2f}x")
    return f"{us:.1f} ({', '.join(notes)})" if us < 20 else f"{us:.0f} ({', '.join(notes)})"
