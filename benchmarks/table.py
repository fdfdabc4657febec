"""Write the tables of docs/benchmarks.md again from the JSON files here: python benchmarks/table.py"""

from pathlib import Path

from ssmspec.measure.tables import rendered

root = Path(__file__).resolve().parents[1]
page = root / "docs" / "benchmarks.md"
page.write_text(rendered(page.read_text(), root))
