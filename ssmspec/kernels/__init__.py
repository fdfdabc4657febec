"""Backends, by name. A backend makes both primitives for a geometry and a window."""

import importlib.util
import os

import torch

from ssmspec.geometry import Geometry, Window
from ssmspec.kernels import reference
from ssmspec.kernels.base import Kernels

NEEDS_GPU = (
    "backend=triton needs a CUDA device, or TRITON_INTERPRET=1 set before Python starts, which takes many minutes for"
    " a life; backend=torch needs neither"
)


def _triton(g: Geometry, w: Window) -> Kernels:
    if importlib.util.find_spec("triton") is None:
        raise ValueError(
            "backend=triton needs the package triton: install ssmspec[triton], or take backend=torch"
        )
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(NEEDS_GPU)
    from ssmspec.kernels import triton_backend

    return triton_backend.make(g, w)


BACKENDS = {"torch": reference.make, "triton": _triton}


def make(backend: str, g: Geometry, w: Window) -> Kernels:
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is not one of {', '.join(BACKENDS)}")
    return BACKENDS[backend](g, w)
