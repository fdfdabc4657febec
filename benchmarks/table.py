"""Write again from the JSON files here: the tables of docs/benchmarks.md, the rings of the H200's table of choices, and
the speeds that advice goes by: python benchmarks/table.py
"""

import json
from dataclasses import replace
from pathlib import Path

from ssmspec.kernels import choices
from ssmspec.kernels.choices import Table
from ssmspec.measure import speeds
from ssmspec.measure.tables import rendered
from ssmspec.measure.tune import rings_of

DEVICE, BATCH = "NVIDIA H200", 256
root = Path(__file__).resolve().parents[1]
page = root / "docs" / "benchmarks.md"
page.write_text(rendered(page.read_text(), root))
files = sorted((root / "benchmarks").glob("*-h200-2026-11-30.json"))
found = [json.loads(file.read_text()) for file in files]
records = [
    r
    for one in found
    if isinstance(one, list)
    for r in one
    if r.get("timings") and "model" in r["timings"][0]
]
target = choices.FOLDER / choices.file_name(DEVICE)
old = Table.loaded(target.read_text()) if target.exists() else Table(device=DEVICE)
target.parent.mkdir(exist_ok=True)
target.write_text(replace(old, rings=rings_of(records)).dumped())
table = speeds.Measured(device=DEVICE, batch=BATCH, speeds=speeds.speeds_of(records, BATCH))
speeds.FILE.parent.mkdir(exist_ok=True)
speeds.FILE.write_text(table.dumped())
