"""How long a speculative step takes on this GPU, over whole flush cycles, of what has passed the check of its bits there."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ssmspec import layout
from ssmspec.acceptance import Acceptance
from ssmspec.geometry import Geometry, Mode, Window
from ssmspec.measure import traffic
from ssmspec.measure.expected import expected
from ssmspec.measure.rig import Rig

STEPS = 16  # of one timed graph: several flushes of every row
REPEATS = 15
COLD = 256 * 2**20  # bytes of state that a step must walk through, so that none is found in the L2 cache
POOL = 24 * 2**30  # bytes of state, at most, whose accepts are timed together
FAST_BOUND = 2**-6  # of the largest output: two ulp of a bf16 output


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Of repeated measurements, in microseconds."""

    median: float
    iqr: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        low, middle, high = statistics.quantiles(values, n=4)
        return cls(median=middle, iqr=high - low)

    def over(self, times: int) -> "Spread":
        """Of one part in ``times``."""
        return Spread(median=self.median / times, iqr=self.iqr / times)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One policy, or one peer, at one shape: times of a layer from its projections to its normed, gated output."""

    policy: str  # or a peer's name
    mode: Mode
    state_dtype: str
    draft: int
    ring: int
    batch: int
    accepted: float  # mean tokens of a step
    refused: str | None = None  # why it was not timed
    absent: str | None = None  # why a peer cannot be timed here
    fused: bool = True  # False: a launch for every piece of a layer
    layers: int = 0  # that were timed together
    step_us: Spread | None = None  # of one layer, on the device
    core_us: Spread | None = None  # of that, without conv and norm
    accept_us: Spread | None = None  # of one layer: its part of an accept of all the model's layers
    host_us: float | None = None  # of one step's launches without a graph, all timed layers together
    bytes: float = 0.0  # of one layer and step, predicted
    bandwidth: float = 0.0  # bytes per second of a large copy, read and written, in the same run

    @property
    def layer_us(self) -> float | None:
        """A layer's share of a step: its own time, and its part of the accept."""
        if self.step_us is None or self.accept_us is None:
            return None
        return self.step_us.median + self.accept_us.median

    @property
    def share(self) -> float | None:
        """Of the time a copy of the predicted bytes would take."""
        return None if self.layer_us is None else self.bytes / self.bandwidth * 1e6 / self.layer_us


def copy_bandwidth() -> float:
    """Bytes read and written per second by a device copy of 2 GiB; the median of 10."""
    a = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.numel() / (timed(lambda: b.copy_(a), 10).median * 1e-6)


def disagreement(
    policy: str, g: Geometry, w: Window, acceptance: Acceptance, *, seed: int, device: str, backend: str
) -> str | None:
    """Play 24 steps beside native, piece by piece, on 8 requests of one layer; a sentence where a promise is broken."""
    one, plain, steps = replace(g, num_layers=1), replace(w, mode=Mode.EXACT), 24

    def rig(name: str, window: Window, fused: bool) -> Rig:
        return Rig(
            name, one, window, 8, acceptance,
            steps=steps, seed=seed, device=device, backend=backend, fused=fused,
        )  # fmt: skip

    ours, native = rig(policy, w, True), rig("native", plain, False)
    promised = expected(policy, one, w, backend)
    for i in range(steps):
        (a,), (b,) = ours.verify(i), native.verify(i)
        if promised.outputs and not torch.equal(a, b):
            return f"outputs differ from native's at step {i + 1}"
        if (apart := gap(a, b)) is not None:
            return f"outputs are {apart} away from native's at step {i + 1}"
        ours.accept()
        native.accept()
    if promised.states and not torch.equal(ours.settled(), native.settled()):
        return "states differ from native's"
    return None


def gap(got: Tensor, want: Tensor) -> str | None:
    """The largest difference, where it is above FAST_BOUND, or no number."""
    apart, scale = float((got.float() - want.float()).abs().max()), float(want.float().abs().max())
    return None if apart <= FAST_BOUND * max(1.0, scale) else f"{apart:.2g}"


def layers_of(g: Geometry, batch: int) -> int:
    """As many as keep a step's states out of the L2 cache."""
    return max(1, min(64, -(-COLD // (batch * layout.state(g).nbytes))))


def run(
    policy: str,
    g: Geometry,
    w: Window,
    batch: int,
    acceptance: Acceptance,
    *,
    bandwidth: float,
    seed: int = 0,
    backend: str = "triton",
    fused: bool = True,
) -> Timing:
    """Check the bits, then time. Needs a CUDA device."""
    layers = layers_of(g, batch)
    timing = Timing(
        policy=policy,
        mode=w.mode,
        state_dtype=g.state_dtype,
        draft=w.max_len - 1,
        ring=w.limit,
        batch=batch,
        accepted=acceptance.mean,
        fused=fused,
        layers=layers,
        bytes=traffic.of(policy, g, w, acceptance).total * batch,
        bandwidth=bandwidth,
    )
    why = disagreement(policy, g, w, acceptance, seed=seed, device="cuda", backend=backend)
    if why is not None:
        return replace(timing, refused=why)

    def rig(layers: int) -> Rig:
        some = replace(g, num_layers=layers)
        return Rig(
            policy, some, w, batch, acceptance,
            steps=STEPS, seed=seed, device="cuda", backend=backend, fused=fused,
        )  # fmt: skip

    r = rig(layers)
    r.spread()
    r.cycle()  # compiles
    launches = host(r.cycle, STEPS)
    whole, core, accepts = (
        timed(graph(work), REPEATS) for work in (r.cycle, lambda: _cores(r), lambda: _accepts(r))
    )
    slot = sum(f.nbytes for f in layout.of(policy, g, w))
    together = max(1, min(g.num_layers, POOL // (slot * batch)))
    model = rig(together)
    _accepts(model)  # builds the table of its layers
    accept = timed(graph(lambda: _accepts(model)), REPEATS)
    return replace(
        timing,
        step_us=less(whole, accepts, STEPS * layers),
        core_us=less(core, accepts, STEPS * layers),
        accept_us=accept.over(STEPS * together),
        host_us=launches,
    )


def core_us(
    policy: str, g: Geometry, w: Window, batch: int, acceptance: Acceptance, *, seed: int = 0
) -> float:
    """Microseconds of a layer's part of the recurrence, its flushes with their share, on the current CUDA device."""
    layers = layers_of(g, batch)
    some = replace(g, num_layers=layers)
    r = Rig(policy, some, w, batch, acceptance, steps=STEPS, seed=seed, device="cuda", backend="triton")
    r.spread()
    _cores(r)
    core, accepts = (timed(graph(work), REPEATS) for work in (lambda: _cores(r), lambda: _accepts(r)))
    return less(core, accepts, STEPS * layers).median


def less(whole: Spread, part: Spread, times: int) -> Spread:
    """Of one part in ``times``, without another measurement's work."""
    return Spread(median=(whole.median - part.median) / times, iqr=whole.iqr / times)


def _cores(r: Rig) -> None:
    """The steps of a cycle without conv and norm."""
    for i in range(r.steps):
        r.recur(i)
        r.accept()


def _accepts(r: Rig) -> None:
    """The steps of a cycle without their verifies: the cursors move alike."""
    for i in range(r.steps):
        r.stage(i)
        r.accept()


def host(cycle: Callable[[], object], steps: int) -> float:
    """Microseconds that the host needs to launch a step."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    cycle()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent / steps * 1e6


def graph(work: Callable[[], object]) -> Callable[[], object]:
    """Capture what has run before, so that all is compiled; what is returned replays it."""
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        work()
    return captured.replay


def timed(work: Callable[[], object], repeats: int) -> Spread:
    """Device time of a call, after one that warms up."""
    work()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return Spread.of(times)
