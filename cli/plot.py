"""Bytes over the number of drafts: a panel for each policy, bars stacked by what the bytes belong to."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ssmspec.geometry import Mode
from ssmspec.layout import POLICY_NAMES
from ssmspec.measure.curves import DRAFTS, Curve, over_drafts
from ssmspec.measure.sweep import Case

from . import files
from .errors import UsageError
from .names import TITLES, short

FORMATS = (".png", ".svg")
MAX_PANEL_ROWS = 4
# Okabe and Ito's palette: told apart by colour-blind readers, and in grey.
PARTS = {"state": "#0072B2", "records": "#E69F00", "conv": "#009E73", "activations": "#BBBBBB"}
CONSTANT = ("draft", "context", "kv_dtype", "cache_mode")  # what a curve over drafts does not depend on


def check(target: str, cases: Sequence[Case]) -> None:
    """Refuse what could not be drawn. Raises UsageError."""
    rows = len(_rows(cases))
    if rows > MAX_PANEL_ROWS:
        raise UsageError(f"--plot draws {MAX_PANEL_ROWS} combinations at most, and this sweep has {rows}")
    path = Path(target)
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"--plot {target} ends in {path.suffix!r}; {' and '.join(FORMATS)} can be drawn")
    if path.is_dir():
        raise UsageError(f"--plot {target} is a folder, and a file is needed")
    if find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, which is not installed: install ssmspec[plot]")
    files.check(path, "--plot")


def write(target: str, cases: Sequence[Case], policies: Sequence[str], mode: Mode) -> None:
    """Draw a row of panels for each combination that has a curve of its own, and move the picture into place."""
    from matplotlib.figure import Figure

    rows = _rows(cases)
    if len(rows) > MAX_PANEL_ROWS:
        raise UsageError(
            f"--plot draws {MAX_PANEL_ROWS} combinations at most, and this sweep has {len(rows)}"
        )
    names = [name for name in POLICY_NAMES if name == "native" or name in policies]
    figure = Figure(figsize=(2.6 * len(names) + 1, 2.6 * len(rows) + 1.2), layout="constrained")
    axes = figure.subplots(len(rows), len(names), sharey="row", squeeze=False)
    drafts = sorted({*DRAFTS, *(case.window.max_len - 1 for case in cases)})
    for line, (title, case) in zip(axes, rows.items(), strict=True):
        for axis, curve in zip(line, over_drafts(case, names, drafts, mode), strict=True):
            _panel(axis, curve, case.batch)
        line[0].set_ylabel(f"{title}\nMB per step" if title else "MB per step")
    for axis, name in zip(axes[0], names, strict=True):
        axis.set_title(name)
    for axis in axes[-1]:
        axis.set_xlabel("drafts per step, K")
    figure.suptitle(f"{cases[0].model.name}: bytes of the recurrent layers, and their share of native's")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", frameon=False)
    with files.whole(Path(target), "--plot") as path:
        figure.savefig(path, dpi=150)


def _rows(cases: Sequence[Case]) -> dict[str, Case]:
    """The first combination of each kind, by what tells it from the others."""
    labels = []
    for case in cases:
        ring = case.window.limit if case.ring_asked else "default"
        labels.append({k: v for k, v in case.labels().items() if k not in CONSTANT} | {"ring": ring})
    varied = [name for name in labels[0] if len({label[name] for label in labels}) > 1]
    found: dict[str, Case] = {}
    for label, case in zip(labels, cases, strict=True):
        found.setdefault(", ".join(f"{TITLES[name]} {short(label[name])}" for name in varied), case)
    return found


def _panel(axis: Any, curve: Curve, batch: int) -> None:
    places, bottom = range(len(curve.points)), [0.0] * len(curve.points)
    for part, colour in PARTS.items():
        heights = [getattr(t.parts, part) * t.num_layers * batch / 1e6 for t in curve.points.values()]
        axis.bar(places, heights, bottom=bottom, color=colour, label=part, width=0.8)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    for place, top, t in zip(places, bottom, curve.points.values(), strict=True):
        if curve.policy != "native":
            axis.annotate(f"{t.vs_native:.2f}", (place, top), ha="center", va="bottom", fontsize=6)
    axis.set_xticks(places, [str(k) for k in curve.points])
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.spines[["top", "right"]].set_visible(False)
