"""Backends, by name. A backend makes both primitives for a geometry and a window."""

from ssmspec.geometry import Geometry, Window
from ssmspec.kernels import reference
from ssmspec.kernels.base import Kernels

BACKENDS = {"torch": reference.make}


def make(backend: str, g: Geometry, w: Window) -> Kernels:
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is not one of {', '.join(BACKENDS)}")
    return BACKENDS[backend](g, w)
