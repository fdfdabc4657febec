"""How large the checkpoint beside a config.json is, as its index says."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ssmspec.measure.capacity import GIB
from ssmspec.model import Model

INDEX = "model.safetensors.index.json"
MAX_BYTES = 64 * 2**20  # of an index; published ones stay below 20 MiB


def weighed(model: Model) -> Model:
    """The model with its weights' size, where that was unknown and an index beside its config.json tells."""
    index = Path(model.source).parent / INDEX
    if model.weights_gib is not None or not index.is_file():
        return model
    with suppress(OSError, ValueError, RecursionError, LookupError, TypeError):
        if index.stat().st_size <= MAX_BYTES:
            size = json.loads(index.read_bytes())["metadata"]["total_size"]
            if isinstance(size, int) and size > 0:
                note = f"weights: {size / GIB:.2f} GiB, by the {INDEX} beside the config"
                return replace(model, weights_gib=size / GIB, notes=(*model.notes, note))
    return model
