"""Speculative decoding on hybrid models: four policies for the recurrent state, behind one interface.

Public names are resolved when first used, so that importing the vocabulary does not import torch.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "Arch": "geometry",
    "Conv": "geometry",
    "DType": "geometry",
    "Geometry": "geometry",
    "Mode": "geometry",
    "Window": "geometry",
    "Model": "model",
    "POLICY_NAMES": "layout",
    "POLICIES": "policies",
    "make_policy": "policies",
    "StatePool": "pool",
    "Step": "step",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ssmspec' has no attribute {name!r}")
    module = importlib.import_module(f"ssmspec.{_HOME[name]}")
    return getattr(module, "make" if name == "make_policy" else name)
