"""docs/faults.md names tests that exist, and every kind of fault that a test here cites."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
INDEX = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| ([A-N]\d+) \|", re.M)
NAMED = re.compile(r"`(?:(tests/\S+?\.py)::)?(test_\w+)`")


def rows() -> dict[str, list[tuple[str, str]]]:
    """Id -> the (file, test) of its row."""
    found, file = {}, ""
    for line in INDEX.splitlines():
        heading = re.match(r"^`(tests/\S+\.py)`", line)
        file = heading[1] if heading else file
        row = ROW.match(line)
        if row:
            assert row[1] not in found, f"{row[1]} twice"
            found[row[1]] = [(where or file, test) for where, test in NAMED.findall(line)]
    return found


def test_every_test_that_the_index_names_exists() -> None:
    for fault, tests in rows().items():
        for file, test in tests:
            assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), f"{fault}: {file}::{test}"


def test_a_row_has_a_test_or_says_why_not() -> None:
    lines = {row[1]: line for line in INDEX.splitlines() if (row := ROW.match(line))}
    assert len(lines) == 94
    for fault, tests in rows().items():
        assert tests or re.search(r"Open:|Cannot apply", lines[fault]), fault


def test_every_fault_that_a_test_cites_has_that_test_in_its_row() -> None:
    index = rows()
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        source = path.read_text(encoding="utf-8")
        for test, cited in re.findall(
            r'def (test_\w+)\([^)]*\) -> None:\n    """((?:[A-N]\d+(?:, )?)+)', source
        ):
            for fault in re.findall(r"[A-N]\d+", cited):
                assert test in [name for _, name in index[fault]], f"{fault} cites {test}"
