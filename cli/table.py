"""Tables that fit the terminal: columns side by side as far as it goes, the others below. A row is text by column title."""

from collections.abc import Mapping, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

Cells = dict[str, str]

STYLES = {"equal": "green", "differs": "yellow", "DIFFERS": "bold red", "ok": "green", "OFF": "bold red"}
SPEED, TIMED = "speed\nvs vLLM", "timed at"
_NAMES = ("preset", "arch", "Hub id", "what", "found", "policy", "mode", "check", "source")
LEFT = (*_NAMES, TIMED, "match", "first difference", "limit", "note")
WRAPPED, WRAP = ("note", "found"), 24  # columns whose cells may wrap, and where at the earliest
GAP = 2  # between columns
OPTIONAL = ("note", SPEED, TIMED)  # columns that are left out where they are empty


def squared(table: Sequence[Cells]) -> list[Cells]:
    """Every row with every column, but for those of OPTIONAL that are empty."""
    said = {title for row in table for title in row if title not in OPTIONAL or row[title]}
    titles = [title for title in dict.fromkeys(title for row in table for title in row) if title in said]
    return [{title: row.get(title, "") for title in titles} for row in table]


def _widths(table: Sequence[Cells]) -> dict[str, int]:
    """What each column needs; one whose cells may wrap is content with less."""
    found = {}
    for title in table[0]:
        lines = [line for text in (title, *(row[title] for row in table)) for line in text.split("\n")]
        found[title] = min(max(map(cell_len, lines)), WRAP if title in WRAPPED else 1000)
    return found


def _needed(widths: Mapping[str, int], titles: Sequence[str]) -> int:
    return sum(widths[title] + GAP for title in titles) - GAP


def _pages(widths: Mapping[str, int], keys: Sequence[str], width: int) -> list[list[str]]:
    """The columns side by side as far as ``width`` goes, the others below; each page starts with ``keys``."""
    found = [[*keys]]
    for title in widths:
        if title in keys:
            continue
        if _needed(widths, [*found[-1], title]) > width and len(found[-1]) > len(keys):
            found.append([*keys])
        found[-1].append(title)
    return found


def show(console: Console, table: Sequence[Cells], keys: Sequence[str], sections: Sequence[int] = ()) -> None:
    """A table that fits the terminal, a line behind the rows of ``sections``."""
    widths, ends = _widths(table), set(sections)
    for titles in _pages(widths, keys, console.width):
        fits = _needed(widths, titles) <= console.width
        drawn = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
        for title in titles:
            side: JustifyMethod = "left" if title in LEFT else "right"
            drawn.add_column(title, justify=side, no_wrap=fits and title not in WRAPPED, overflow="fold")
        for number, row in enumerate(table):
            styled = (Text(row[title], STYLES.get(row[title], "")) for title in titles)
            drawn.add_row(*styled, end_section=number in ends)
        console.print(drawn)
        console.print()


def grid(table: Sequence[Cells]) -> list[str]:
    """The lines of a Markdown table."""

    def line(items: Sequence[str]) -> str:
        return "| " + " | ".join(item.replace("\n", " ").replace("|", "\\|") for item in items) + " |"

    rule = "|" + "|".join(":--" if title in LEFT else "--:" for title in table[0]) + "|"
    return [line([*table[0]]), rule, *(line([*row.values()]) for row in table)]
