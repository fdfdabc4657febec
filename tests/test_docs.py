"""The pages: their programs run and print what they say, and their links lead somewhere."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
PROGRAM = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", re.M | re.S)
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")


def test_the_programs_of_the_python_page_print_what_it_says() -> None:
    names: dict[str, Any] = {"__name__": "page"}
    programs = PROGRAM.findall((ROOT / "docs" / "python.md").read_text())
    assert len(programs) == 3
    for source, printed in programs:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(source, names)
        assert out.getvalue() == printed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_a_page_and_a_heading(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if not link.startswith("https://"):
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            assert target.is_file(), link
            assert not anchor or anchor in anchors(target), link
    for number in re.findall(r"\[([^\[\]]*#\d+)\]", page.read_text()):
        assert f"\n[{number}]: https://" in page.read_text(), number


def test_the_tests_that_pages_name_exist() -> None:
    sources = {path.stem: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    everything = "".join(sources.values())
    for page in ("mutations.md", "how-it-works.md"):
        for name in re.findall(r"\btest_\w+", (ROOT / "docs" / page).read_text()):
            assert name in sources or f"def {name}(" in everything, f"{page}: {name}"


def anchors(page: Path) -> list[str]:
    """Of headings: lower case, punctuation left out, a hyphen for each space."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return [re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings]
