"""How long checkpointing's ring is where none was asked for: the table that `bench` and the plugin take it from.

They read it through ssmspec.kernels.choices, which imports torch.
"""

import json
from functools import cache
from pathlib import Path

from ssmspec.geometry import Geometry, Window

FOLDER = Path(__file__).parents[1] / "kernels" / "tuned"
SHAPE = ("arch", "head_k", "head_v", "state_dtype")


def tuned(device: str, g: Geometry, w: Window) -> int | None:
    """L for windows of this length and mode on that GPU; None where that was not measured."""
    return _rings().get((device, w.mode, w.max_len, *(getattr(g, name) for name in SHAPE)))


@cache
def _rings() -> dict[tuple[str | int, ...], int]:
    found: dict[tuple[str | int, ...], int] = {}
    for path in sorted(FOLDER.glob("*.json")):
        table = json.loads(path.read_text(encoding="utf-8"))
        for row in table.get("rings", ()):
            shape = (row["shape"][name] for name in SHAPE)
            found[table["device"], row["mode"], row["window"], *shape] = row["ring"]
    return found
