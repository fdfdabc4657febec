"""A result as text, and the same as Markdown. Formats numbers, and works nothing out."""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from ssmspec.measure.capacity import weights_of
from ssmspec.measure.checks import Check
from ssmspec.measure.report import Played, Report
from ssmspec.measure.sweep import Row

from . import table
from .names import TITLES, short
from .table import Cells

if TYPE_CHECKING:  # importing it imports torch
    from ssmspec.measure.exact import Exactness

_EVERY = ("draft", "ring", "state_dtype", "record_dtype", "read_copy", "cache_mode")
_MOVED, _FIT = ("batch", "tp"), ("context", "kv_dtype", "tp")
_USUAL = {"read_copy": "none", "cache_mode": "none", "tp": 1}  # goes without saying
BYTES = "bytes\nvs native"
FIT = "requests\nthat fit"
ULP, ABS = "max ulp\nout / state", "max |Δ|\nout / state"


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.1f}"


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.1f}"


def _kib(*nbytes: float) -> str:
    return " / ".join(f"{n / 2**10:,.1f}" for n in nbytes)


def match(e: "Exactness | None", policy: str) -> Cells:
    """What a life showed of a policy: small letters where that is as expected."""
    if e is None or policy == "native":
        return {"match": "native" if e else "", "first difference": "", ULP: ""}
    f = e.first
    return {
        "match": "equal" if e.equal else "differs" if e.ok else "DIFFERS",
        "first difference": f"step {f.step}, layer {f.layer}, {f.field}" if f else "",
        ULP: "0" if e.equal else f"{e.outputs.max_ulp:,} / {e.states.max_ulp:,}",
    }


def _apart(e: "Exactness", policy: str) -> Cells:
    own = policy == "native"
    return {
        ABS: "" if own else f"{e.outputs.max_abs:.0e} / {e.states.max_abs:.0e}".replace("0e+00", "0"),
        "outputs apart": "" if own else f"{e.outputs.different:,} of {e.outputs.compared:,}",
        "states apart": "" if own else f"{e.states.different:,} of {e.states.compared:,}",
    }


def _exact(row: Row) -> Cells:
    e = row.exact
    assert e is not None
    return match(e, row.policy) | _apart(e, row.policy) | {"error": f"{e.error.relative:.2e}"}


def _moved(row: Row) -> Cells:
    assert row.traffic is not None
    read, write = row.model_step
    return {
        "read MB": _mb(read),
        "write MB": _mb(write),
        BYTES: f"{row.traffic.vs_native:.2f}x",
        table.SPEED: f"{row.speed.times:.2f}x" if row.speed else "",
        table.TIMED: row.speed.cell if row.speed else "",
    }


def _traffic(row: Row) -> Cells:
    t = row.traffic
    assert t is not None
    reads, writes, shared = t.reads, t.writes, t.parts
    return {
        "state r/w": _kib(reads.state, writes.state),
        "records r/w": _kib(reads.records, writes.records),
        "conv": _kib(shared.conv),
        "activations": _kib(shared.activations),
        "flushes": f"{t.cadence.flush_fraction:.1%}",
        **_moved(row),
        "export MB": _mb(t.export_bytes),
    }


def _fit(row: Row) -> Cells:
    if row.capacity is None:
        return {"MiB/request": "", FIT: "none"}
    return {"MiB/request": _mib(row.capacity.parts.total), FIT: f"{row.capacity.requests:,}"}


def _capacity(row: Row) -> Cells:
    c, titles = row.capacity, ("checkpoint", "snapshots", "records", "conv", "KV", "padding")
    if c is None:
        return dict.fromkeys(titles, "") | _fit(row) | dict.fromkeys(("limit", "block"), "")
    cells = {title: _mib(getattr(c.parts, title.lower())) for title in titles} | _fit(row)
    cells |= {"limit": c.limit, "block": f"{c.plan.block_tokens:,}"}
    return cells | ({"reused": f"{row.reuse.tokens:,}"} if row.reuse else {})


def _headline(row: Row) -> Cells:
    return match(row.exact, row.policy) | _moved(row) | _fit(row)


def cells(report: Report) -> list[Cells]:
    """The table: what tells rows apart, then the numbers."""
    first = report.rows[0]
    modes = len({row.mode for row in report.rows} - {None}) > 1
    whole = first.exact and first.traffic
    body = _headline if whole else _exact if first.exact else _traffic if first.traffic else _capacity
    found = []
    for row in report.rows:
        labels = row.labels()
        keys = {"policy": row.policy} | ({"mode": row.mode or ""} if modes else {})
        keys |= {TITLES[name]: short(labels.get(name, "")) for name in report.varied}
        found.append(keys | body(row) | {"note": row.note})
    return table.squared(found)


def show(console: Console, report: Report, *, checks: bool) -> None:
    """The table with what is common above it, and advice, checks and notes below."""
    found = cells(report)
    keys = ["policy", *(t for t in found[0] if t == "mode" or t in TITLES.values())]
    console.print(Text("\n".join(heading(report)), "bold"))
    ends = [i for i, (a, b) in enumerate(pairwise(report.rows)) if a.case is not b.case]
    table.show(console, found, keys, ends)
    for line in report.advice:
        console.print(Text(line))
    if checks:
        _show_checks(console, report.checks)
    for note in report.notes:
        console.print(Text(note, "dim"))


def show_played(console: Console, played: Played) -> None:
    """A row for each policy that a script was played under."""
    g, w = played.setup.geometry, played.setup.window
    facts = f"{g.arch}, {short(g.state_dtype)} state, {w.mode} mode, T={w.max_len}, ring {w.limit}, align {w.align}"
    console.print(Text(f"{played.script}: {played.events:,} events; {facts}", "bold"))
    found = [
        {"policy": e.policy, **match(e, e.policy), **_apart(e, e.policy), "note": _why(e)}
        for e in played.results
    ]
    table.show(console, table.squared(found), ["policy"])
    if played.wrong:
        console.print(Text(played.wrong, "red"))


def _why(e: "Exactness") -> str:
    return "" if e.equal else e.expected.why if e.ok else "expected to be equal, and is not"


def heading(report: Report) -> list[str]:
    """The model, and what all rows have in common."""
    m, g, row = report.model, report.model.geometry, report.rows[0]
    shape = f"H={g.num_k_heads} HV={g.num_v_heads} K={g.head_k} V={g.head_v}"
    asked = [*_EVERY, *(_MOVED if row.traffic else ()), *(_FIT if row.capacity or row.unfit else ())]
    found = {name: report.values(name) for name in row.case.labels() if name in asked}
    same = [
        f"{TITLES[name]} {short(values[0])}"
        for name, values in found.items()
        if len(values) == 1 and values[0] != _USUAL.get(name)
    ]
    if row.traffic and "draft" not in report.varied:
        same.append(f"{row.case.acceptance.mean:.2f} tokens accepted a step")
    if row.capacity and weights_of(m, row.case.settings) is None:
        same.append("weights unknown, counted as 0")
    layers = f"{g.num_layers} of {m.num_layers} layers recurrent"
    return [f"{m.name}: {g.arch}, {layers}, {shape}", ", ".join(same)]


def _show_checks(console: Console, checks: Sequence[Check]) -> None:
    for c in checks:
        verdict = "ok" if c.ok else "OFF"
        found = f"published {c.expected:,.4g}, here {c.got:,.4g} {c.unit} (within {c.tolerance:,.2g})"
        console.print(Text.assemble((verdict, table.STYLES[verdict]), f" {c.name}: {found}"))
        for text in filter(None, (f"Source: {c.source}", c.note)):
            console.print(Padding(Text(text, "dim"), (0, 0, 0, 4)))
    console.print()


def markdown(report: Report) -> str:
    """The same as `show`, for a page."""
    parts = [f"**{line}**  " for line in heading(report)] + ["", *table.grid(cells(report)), ""]
    parts += [f"- {line}" for line in report.advice]
    if report.checks:
        parts += ["", *table.grid([_check_cells(check) for check in report.checks])]
    parts += ["", *(f"- {note}" for note in report.notes), "", f"`{report.command}`"]
    return "\n".join(parts) + "\n"


def _check_cells(c: Check) -> Cells:
    return {
        "check": c.name,
        "published": f"{c.expected:,.4g}",
        "here": f"{c.got:,.4g}",
        "unit": c.unit,
        "within": f"{c.tolerance:,.2g}",
        "": "ok" if c.ok else "OFF",
        "source": c.source,
        "note": c.note,
    }
