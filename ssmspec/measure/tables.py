"""The tables of docs/benchmarks.md, generated from the JSON that `ssmspec bench --json` printed."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from ssmspec.layout import POLICY_NAMES

Row = Mapping[str, Any]
PEERS = {
    "vllm-fused-op": "vLLM, conv and fused op",
    "vllm-triton": "vLLM, Triton kernels",
    "flash-linear-attention": "flash-linear-attention",
    "flashinfer": "FlashInfer, a state per token",
    "flashinfer-ring": "FlashInfer, rings",
}
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
WHOLE, CORE, COUNTERS = "bench", "core", "counters"
PAGE = re.compile(rf"(<!-- ({WHOLE}|{CORE}|{COUNTERS}): ([^\n]*?) -->\n).*?(<!-- end -->)", re.DOTALL)
LEAST = 0.02  # of a layer's time: what takes less has no row


def rendered(page: str, root: Path) -> str:
    """The page with every block between ``<!-- bench: FILES -->`` and ``<!-- end -->`` generated again: whole layers;
    with ``core:`` recurrences alone, with ``counters:`` what a profiler counted.

    Files are named from ``root``, with spaces between them; a file holds what one run printed, or a list of such.
    """

    @cache
    def read(names: str) -> list[Mapping[str, Any]]:
        files = [json.loads((root / name).read_text()) for name in names.split()]
        return [record for one in files for record in (one if isinstance(one, list) else [one])]

    whole = (names for _, kind, names, _ in PAGE.findall(page) if kind == WHOLE)
    fastest = max((copy_of(read(names)) for names in whole), default=0.0)

    def block(found: re.Match[str]) -> str:
        records, kind = read(found[3]), found[2]
        text = counters(records) if kind == COUNTERS else tables(records, core=kind == CORE, copy=fastest)
        return found[1] + text + found[4]

    return PAGE.sub(block, page)


def copy_of(records: Sequence[Mapping[str, Any]]) -> float:
    """Bytes per second of the fastest copy that was timed beside the rows; runs differ by a tenth."""
    return max((row.get("bandwidth", 0.0) for record in records for row in record["timings"]), default=0.0)


def tables(records: Sequence[Mapping[str, Any]], *, core: bool = False, copy: float = 0.0) -> str:
    """One table per model and batch size, a row per policy and mode, a column per state dtype and window.

    ``core``: of times without conv and norm, without the sources. ``copy``: bytes per second that shares are of; at
    least those of the fastest copy beside the rows. What was refused comes last.
    """
    copy = max(copy, copy_of(records))
    rows = [_shared(row, copy) for record in records for row in record["timings"]]
    groups = sorted({(row.get("model", ""), row["batch"]) for row in rows}, key=lambda key: (key[0], -key[1]))
    parts = [] if core else [_sources(records)]
    for model, batch in groups:
        here = [row for row in rows if (row.get("model", ""), row["batch"]) == (model, batch)]
        parts.append(_table(", ".join(filter(None, (model, f"B={batch}, us"))), here, core))
    refused = [] if core else [
        f"- {_name(row)}, {_column(row)}, B={row['batch']}: {row['refused']}" for row in rows if row["refused"]
    ]  # fmt: skip
    return "\n".join(
        [*parts, *([f"Not timed, since a check failed:\n\n{chr(10).join(refused)}\n"] if refused else [])]
    )


def counters(records: Sequence[Mapping[str, Any]]) -> str:
    """A row per run with its bytes, and a row per kernel of it: its time, and its shares of what the GPU could do."""
    lines = [
        "| of a layer and step | us | DRAM busy | issue slots | FMA pipe | shared memory "
        "| MB counted | MB predicted |",
        "|---" * 8 + "|",
    ]
    for record in records:
        times = record["layers"] * record["steps"]
        measured, predicted = (record[f"{name}_bytes"] / times / 1e6 for name in ("measured", "predicted"))
        off = f"{measured / predicted - 1:+.1%}".replace("%", " %")
        what = f"{record['model']}, {_name(record)}, {_column(record)}, B={record['batch']}"
        lines.append(f"| {what} | | | | | | {measured:.0f} ({off}) | {predicted:.0f} |")
        all_ns = sum(k["ns"] for k in record["kernels"].values())
        for name, k in record["kernels"].items():
            if k["ns"] > LEAST * all_ns and "at::" not in name:  # torch's, of the rows that the rig stages
                mb = (k["read_bytes"] + k["write_bytes"]) / times / 1e6
                us = k["ns"] / times / 1e3
                shares = " | ".join(f"{k[share]:.0f} %" for share in ("dram", "issue", "fma", "l1"))
                lines.append(f"| `{name}` | {us:.0f} | {shares} | {mb:.0f} | |")
    return "\n".join(lines) + "\n"


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
    pieces = "" if row.get("fused", True) else ", in pieces"
    return str(row["policy"]) + ring + (", fast" if row["mode"] == "fast" else "") + pieces


def _shared(row: Row, copy: float) -> Row:
    """With the share of a copy of so many bytes per second."""
    if not copy or not row.get("share") or "bandwidth" not in row:
        return row
    return {**row, "share": row["share"] * row["bandwidth"] / copy}


def _column(row: Row) -> str:
    """With the mean of accepted tokens, where that was recorded."""
    accepted = f" ({row['accepted']:.2g})" if "accepted" in row else ""
    return f"{SHORT.get(row['state_dtype'], row['state_dtype'])} T={row['draft'] + 1}{accepted}"


def _place(row: Row) -> tuple[int, int, float]:
    """fp32 first, then what is typed after it; windows rise."""
    return [*SHORT, row["state_dtype"]].index(row["state_dtype"]), row["draft"], row.get("accepted", 0)


def _rank(row: Row) -> tuple[bool, int, int]:
    """Peers first, fast mode last, policies in their order."""
    order = (*PEERS, *POLICY_NAMES)
    return row["mode"] == "fast", order.index(row["policy"]), row["ring"]


def _table(title: str, rows: Sequence[Row], core: bool) -> str:
    if core:
        rows = [row for row in rows if _time(row, core) is not None]
    columns = list(dict.fromkeys(map(_column, sorted(rows, key=_place))))
    cells = {(_name(row), _column(row)): row for row in rows}
    best = {
        column: min(
            (t for name in PEERS.values() if (t := _time(cells.get((name, column)), core))), default=None
        )
        for column in columns
    }
    names = list(dict.fromkeys(map(_name, sorted(rows, key=_rank))))
    text = {(n, c): _cell(cells.get((n, c)), best[c], core) for n, c in product(names, columns)}
    lines = [f"| {title} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {n} | {' | '.join(text[n, c] for c in columns)} |" for n in names]
    return "\n".join(lines) + "\n"


def _time(row: Row | None, core: bool) -> float | None:
    if row is None:
        return None
    if not core:
        us: float | None = row["layer_us"]
        return us
    return None if row["core_us"] is None else row["core_us"]["median"] + row["accept_us"]["median"]


def _cell(row: Row | None, peer: float | None, core: bool) -> str:
    """Microseconds; how many times faster than the fastest peer; share of the time a copy of the bytes would take."""
    if row is None:
        return ""
    us = _time(row, core)
    if us is None:
        return "absent" if row["absent"] else "refused" if row["refused"] else "core only"
    notes = [] if core else [f"{row['share']:.0%}".replace("%", " %")]
    if peer is not None and row["policy"] not in PEERS:
        notes.insert(0, f"{peer / us:.2f}x")
    return f"{us:.1f}" * (us < 20) + f"{us:.0f}" * (us >= 20) + (f" ({', '.join(notes)})" if notes else "")
