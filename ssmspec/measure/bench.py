"""How long a speculative step takes on this GPU, over whole flush cycles, of what has passed the check of its bits there."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ssmspec import layout
from ssmspec.acceptance import Acceptance
from ssmspec.geometry import Geometry, Mode, Window
from ssmspec.measure import traffic
from ssmspec.measure.expected import expected
from ssmspec.measure.rig import Rig

STEPS = 16  # of one timed graph: several flushes of every row
REPEATS = 15
COLD = 256 * 2**20  # bytes of state that a step must walk through, so that none is found in the L2 cache
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


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One policy at one shape. ``refused``: why it was not timed."""

    policy: str
    mode: Mode
    state_dtype: str
    draft: int
    ring: int
    batch: int
    accepted: float  # mean tokens of a step
    refused: str | None = None
    layers: int = 0  # that were timed together
    verify_us: Spread | None = None  # of one layer, on the device
    accept_us: Spread | None = None  # of one step, all timed layers together, on the device
    host_us: float | None = None  # of one step's launches without a graph, all timed layers together
    bytes: float = 0.0  # of one layer and step, predicted
    bandwidth: float = 0.0  # bytes per second of a large copy, read and written, in the same run

    @property
    def layer_us(self) -> float | None:
        """A layer's share of a step: its verify, and its part of the accept."""
        if self.verify_us is None or self.accept_us is None:
            return None
        return self.verify_us.median + self.accept_us.median / self.layers

    @property
    def share(self) -> float | None:
        """Of the time a copy of the predicted bytes would take."""
        return None if self.layer_us is None else self.bytes / self.bandwidth * 1e6 / self.layer_us


def copy_bandwidth() -> float:
    """Bytes read and written per second by a device copy of 2 GiB; the median of 10."""
    a = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.numel() / (_timed(lambda: b.copy_(a), 10).median * 1e-6)


def disagreement(
    policy: str, g: Geometry, w: Window, acceptance: Acceptance, *, seed: int, device: str, backend: str
) -> str | None:
    """Play 24 steps beside native on 8 requests of one layer; a sentence where a promise is broken."""
    one, plain, steps = replace(g, num_layers=1), replace(w, mode=Mode.EXACT), 24

    def rig(name: str, window: Window) -> Rig:
        return Rig(name, one, window, 8, acceptance, steps=steps, seed=seed, device=device, backend=backend)

    ours, native, promised = rig(policy, w), rig("native", plain), expected(policy, one, w)
    for i in range(steps):
        (a,), (b,) = ours.verify(i), native.verify(i)
        if promised.outputs and not torch.equal(a, b):
            return f"outputs differ from native's at step {i + 1}"
        gap = float((a.float() - b.float()).abs().max())
        if not gap <= FAST_BOUND * max(1.0, float(b.float().abs().max())):
            return f"outputs are {gap:.2g} away from native's at step {i + 1}"
        ours.accept()
        native.accept()
    if promised.states and not torch.equal(ours.settled(), native.settled()):
        return "states differ from native's"
    return None


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
) -> Timing:
    """Check the bits, then time. Needs a CUDA device."""
    layers = max(1, min(64, -(-COLD // (batch * layout.state(g).nbytes))))
    timing = Timing(
        policy=policy,
        mode=w.mode,
        state_dtype=g.state_dtype,
        draft=w.max_len - 1,
        ring=w.limit,
        batch=batch,
        accepted=acceptance.mean,
        layers=layers,
        bytes=traffic.of(policy, g, w, acceptance).total * batch,
        bandwidth=bandwidth,
    )
    where = {"device": "cuda", "backend": backend}
    if (why := disagreement(policy, g, w, acceptance, seed=seed, **where)) is not None:
        return replace(timing, refused=why)
    r = Rig(policy, replace(g, num_layers=layers), w, batch, acceptance, steps=STEPS, seed=seed, **where)
    r.cycle()  # compiles, and spreads the rows over their flush cycles
    host = _host(r)
    whole = _timed(_graph(r.cycle), REPEATS)
    accepts = _timed(_graph(lambda: _accepts(r)), REPEATS)
    each = STEPS * layers
    return replace(
        timing,
        verify_us=Spread(median=(whole.median - accepts.median) / each, iqr=whole.iqr / each),
        accept_us=Spread(median=accepts.median / STEPS, iqr=accepts.iqr / STEPS),
        host_us=host,
    )


def _accepts(r: Rig) -> None:
    """The steps of a cycle without their verifies: the cursors move alike."""
    for i in range(r.steps):
        r.step.lens.fill_(r.w.max_len)
        r.step.accepted.copy_(r.accepted[i])
        r.accept()


def _host(r: Rig) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    r.cycle()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent / r.steps * 1e6


def _graph(work: Callable[[], object]) -> Callable[[], object]:
    """Capture once; what is returned replays it."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def _timed(work: Callable[[], object], repeats: int) -> Spread:
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
