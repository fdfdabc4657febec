"""Which policy must give native's bits, computed from what it records, in which order it sums, and where it rounds."""

from dataclasses import dataclass

from ssmspec import layout
from ssmspec.geometry import Arch, DType, Geometry, Mode, Window


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Whether outputs and settled states must be bit-equal to native's, and what speaks against it."""

    outputs: bool
    states: bool
    why: str = ""

    @property
    def equal(self) -> bool:
        return self.outputs and self.states


def expected(policy: str, g: Geometry, w: Window, backend: str = "torch") -> Expected:
    """Computed from what is recorded, in which order it is summed, and where the state is rounded."""
    if policy == "native":
        return Expected(outputs=True, states=True)
    fast = w.mode is Mode.FAST
    raw = g.arch is Arch.MAMBA2 or g.read_dtype is not None  # records do not depend on the state
    lossy = g.record_dtype is not DType.FP32 and not raw
    products = fast and (backend == "triton" or not raw)  # triton's fast mode folds by products, too
    flushes = policy == "checkpointing" and g.state_dtype is not DType.FP32
    at_flush = flushes and not layout.rounds_at_ends(policy, g, w)
    reasons = [
        text
        for holds, text in (
            (lossy, f"{g.record_dtype} records lose bits"),
            (fast, "matrix products sum in another order"),
            (at_flush, f"the {g.state_dtype} state is rounded at a flush, not at every step's end"),
            (g.read_dtype is not None, f"outputs read the {g.read_dtype} copy"),
        )
        if holds
    ]
    states = not (lossy or at_flush or products)
    outputs = states and not fast and g.read_dtype is None
    return Expected(outputs=outputs, states=states, why="; ".join(reasons))
