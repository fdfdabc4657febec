"""The four policies, by name."""

from collections.abc import Sequence

from ssmspec import kernels
from ssmspec.geometry import Geometry, Window
from ssmspec.kernels.base import LayerParams
from ssmspec.policies.base import Policy
from ssmspec.policies.checkpointing import Checkpointing
from ssmspec.policies.every_step import EveryStep
from ssmspec.policies.native import Native
from ssmspec.policies.recover import Recover
from ssmspec.pool import StatePool

POLICIES: dict[str, type[Policy]] = {p.name: p for p in (Native, Recover, EveryStep, Checkpointing)}
"""Name to class: ``POLICIES[name].layout(g, w)`` is what a slot holds, ``make(name, ...)`` a policy over such slots."""


def make(
    name: str,
    g: Geometry,
    w: Window,
    pool: StatePool,
    params: Sequence[LayerParams],
    backend: str = "torch",
) -> Policy:
    """A policy over a pool that was allocated for (at least) its layout; ``params`` has an entry per layer.

    Raises ValueError for an unknown name or backend, and for what the backend cannot run here.
    """
    if name not in POLICIES:
        raise ValueError(f"policy={name!r} is not one of {', '.join(POLICIES)}")
    return POLICIES[name](g, w, pool, kernels.make(backend, g, w), params)
