"""Speculative decoding on hybrid models: four policies for the recurrent state, behind one interface.

A policy (``make_policy``) works on the slots of a ``StatePool``: ``verify`` runs windows of tokens, layer by layer,
``accept`` keeps the first tokens of each, ``settle`` makes the checkpoint the state. docs/python.md has a program.

Public names are resolved when first used, so that importing the vocabulary does not import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ssmspec.geometry import Arch, Conv, DType, Geometry, Mode, Window
    from ssmspec.kernels.base import LayerParams, Tokens
    from ssmspec.layout import POLICY_NAMES
    from ssmspec.model import Model
    from ssmspec.policies import POLICIES
    from ssmspec.policies import make as make_policy
    from ssmspec.policies.base import Policy
    from ssmspec.pool import StatePool
    from ssmspec.runtime.engine import Engine
    from ssmspec.runtime.setup import Setup
    from ssmspec.step import Commit, Step

__version__ = "0.1.0"
__all__ = [
    "POLICIES",
    "POLICY_NAMES",
    "Arch",
    "Commit",
    "Conv",
    "DType",
    "Engine",
    "Geometry",
    "LayerParams",
    "Mode",
    "Model",
    "Policy",
    "Setup",
    "StatePool",
    "Step",
    "Tokens",
    "Window",
    "make_policy",
]

_HOME = {
    "geometry": ("Arch", "Conv", "DType", "Geometry", "Mode", "Window"),
    "kernels.base": ("LayerParams", "Tokens"),
    "layout": ("POLICY_NAMES",),
    "model": ("Model",),
    "policies": ("POLICIES", "make_policy"),
    "policies.base": ("Policy",),
    "pool": ("StatePool",),
    "runtime.engine": ("Engine",),
    "runtime.setup": ("Setup",),
    "step": ("Commit", "Step"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOME.items():
        if name in names:
            module = importlib.import_module(f"ssmspec.{home}")
            return getattr(module, "make" if name == "make_policy" else name)
    raise AttributeError(f"module 'ssmspec' has no attribute {name!r}")
