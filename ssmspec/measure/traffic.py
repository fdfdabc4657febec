"""Bytes that one request moves in one layer and one step: from the layout and a simulated acceptance process."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from math import floor
from typing import Protocol

from ssmspec import layout
from ssmspec.geometry import Arch, DType, Geometry, Mode, Window
from ssmspec.layout import Layout


class AcceptedCounts(Protocol):
    """A source of accepted counts per step, 1..T, the bonus token included."""

    @property
    def mean(self) -> float: ...

    def sample(self, n: int, seed: int) -> Iterator[int]: ...


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Bytes, split by what they belong to."""

    state: float = 0.0  # checkpoints, snapshots and read copies
    records: float = 0.0
    conv: float = 0.0  # settled inputs of the short conv
    activations: float = 0.0  # the layer's inputs and outputs
    cursors: float = 0.0

    @property
    def total(self) -> float:
        return self.state + self.records + self.conv + self.activations + self.cursors

    def __add__(self, other: "Parts") -> "Parts":
        return Parts(**{p.name: getattr(self, p.name) + getattr(other, p.name) for p in fields(self)})


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """Means over steps of what a ring went through."""

    accepted: float  # tokens of a step, bonus included
    flush_fraction: float = 0.0  # share of verifies that first fold their ring into the checkpoint
    fill: float = 0.0  # committed records that a verify reads, those that it folds included


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Mean bytes of one request in one layer and one step under a policy."""

    policy: str
    num_layers: int
    reads: Parts
    writes: Parts
    native_bytes: float  # read and written by native, without a read copy, in the same window
    record_fields: dict[str, int]  # bytes of one token's record, by field
    export_bytes: int  # of one request's exported state, all layers: what an offload moves, and a restore
    cadence: Cadence

    @property
    def read(self) -> float:
        return self.reads.total

    @property
    def write(self) -> float:
        return self.writes.total

    @property
    def parts(self) -> Parts:
        """Read and written bytes together."""
        return self.reads + self.writes

    @property
    def total(self) -> float:
        return self.read + self.write

    @property
    def vs_native(self) -> float:
        """Bytes as a share of native's: below 1 the policy moves less."""
        return self.total / self.native_bytes

    def model_step(self, batch: int = 1) -> tuple[float, float]:
        """Bytes (read, written) by all recurrent layers in one step of ``batch`` requests."""
        scale = self.num_layers * batch
        return scale * self.read, scale * self.write


def bytes_per_record(slot: Layout, capacity: int) -> dict[str, int]:
    """Bytes of one token's record by field, of a layout whose rings hold ``capacity`` records."""
    return {f.name: f.nbytes // capacity for f in slot if f.name.startswith("rec_")}


def cadence(limit: int | None, max_len: int, counts: Iterable[int]) -> Cadence:
    """Play accepted ``counts`` through a ring: a verify that finds count + T > L folds, and starts at 0.

    ``limit`` is L; None where no record outlives its step. Raises ValueError for a count outside 1..T.
    """
    steps = accepted = flushes = fill = count = 0
    for n in counts:
        if not 1 <= n <= max_len:
            raise ValueError(
                f"an accepted count of {n} is outside 1..{max_len}, the window's max_len;"
                f" the nearest legal value is {min(max(n, 1), max_len)}"
            )
        steps, accepted = steps + 1, accepted + n
        if limit is not None:
            flush = count + max_len > limit
            flushes, fill = flushes + flush, fill + count
            count = n if flush else count + n
    return Cadence(accepted=accepted / steps, flush_fraction=flushes / steps, fill=fill / steps)


def _ring_bytes(policy: str, slot: Layout, w: Window, record: int, c: Cadence) -> tuple[Parts, Parts]:
    """State and records, (read, written). With a read copy an output reads the copy, a fold the anchor."""
    size = {f.name: f.nbytes for f in slot}
    t, p = w.max_len, c.flush_fraction
    if policy == "native":
        snapshot = size["snapshots"] / t
        return Parts(state=snapshot), Parts(state=t * snapshot)
    anchor, copy = size["state"], size.get("read", 0)
    output = copy or anchor
    if policy == "recover":
        reads = Parts(state=output + anchor, records=c.accepted * record)
        return reads, Parts(state=anchor + copy, records=t * record)
    reads = Parts(state=p * anchor + (1 - p) * output, records=c.fill * record)
    return reads, Parts(state=p * (anchor + copy), records=t * record)


def _between(g: Geometry, w: Window, c: Cadence) -> float:
    """Bytes from launch to launch of an unfused layer: the conv's outputs, and the verify's.

    The windows of fast mode norm a head's outputs themselves. KDA's read probes in fp32, a key and a query per token
    and value head, and of a row that flushes the keys of its records and their decay.
    """
    value, fast = g.num_v_heads * g.head_v, w.mode is Mode.FAST
    outputs = 2 * g.num_k_heads * g.head_k + value
    if not fast or g.arch is Arch.MAMBA2:
        outputs += value
    vectors = 0.0
    if fast and g.arch is Arch.KDA:
        folded = c.accepted + c.flush_fraction if c.flush_fraction else 0.0
        vectors = g.num_v_heads * (2 * w.max_len + folded)
    return g.act_dtype.nbytes(w.max_len * outputs) + vectors * DType.FP32.nbytes(g.head_k)


def _layer_bytes(g: Geometry, w: Window, c: Cadence, *, fused: bool) -> tuple[Parts, Parts]:
    """What every policy moves alike, (read, written): packed inputs, gates, output gate, output, conv window.

    Fused is one launch of conv, verify and gated norm; unfused adds what lies between, written and read once. The
    conv window is read as W - 1 inputs and written as W - 1 + T - 1, the state of vLLM 0.33.0's
    ``causal_conv1d_update``.
    """
    t, value = w.max_len, g.num_v_heads * g.head_v
    packed = 2 * g.num_k_heads * g.head_k + value
    gates = {
        Arch.GDN: 2 * g.num_v_heads,
        Arch.KDA: g.num_v_heads * (g.head_k + 1),
        Arch.MAMBA2: g.num_v_heads,
    }[g.arch]
    between = 0.0 if fused else _between(g, w, c)
    history = g.conv.history
    per_input = layout.conv(g.conv, t, g.act_dtype).nbytes // (history + t)
    reads = Parts(
        activations=g.act_dtype.nbytes(t * (packed + gates + value)) + between, conv=history * per_input
    )
    kept = history + t - 1 if history else 0
    return reads, Parts(activations=g.act_dtype.nbytes(t * value) + between, conv=kept * per_input)


def _cursor_bytes(slot: Layout, num_layers: int) -> tuple[Parts, Parts]:
    """Cursors, (read, written): every layer's verify reads them, one launch for all layers moves them."""
    size = sum(f.nbytes for f in slot if f.shared)
    moved = size / max(1, num_layers)
    return Parts(cursors=size + moved), Parts(cursors=moved)


def _traffic(policy: str, g: Geometry, w: Window, c: Cadence, *, fused: bool) -> Traffic:
    slot = layout.of(policy, g, w)
    record = {} if policy == "native" else bytes_per_record(slot, layout.ring(policy, w).capacity)
    pieces = (
        _ring_bytes(policy, slot, w, sum(record.values()), c),
        _layer_bytes(g, w, c, fused=fused),
        _cursor_bytes(slot, g.num_layers),
    )
    reads, writes = (sum(side, Parts()) for side in zip(*pieces, strict=True))
    native = reads.total + writes.total
    if policy != "native":
        native = _traffic("native", replace(g, read_dtype=None), w, c, fused=fused).total
    return Traffic(
        policy=policy,
        num_layers=g.num_layers,
        reads=reads,
        writes=writes,
        native_bytes=native,
        record_fields=record,
        export_bytes=sum(
            f.nbytes if f.shared else g.num_layers * f.nbytes
            for f in (*slot, layout.conv(g.conv, w.max_len, g.act_dtype))
            if f.durable
        ),
        cadence=c,
    )


def _limit(policy: str, w: Window) -> int | None:
    """L of a policy whose records outlive their step."""
    return layout.ring(policy, w).limit if policy in ("every-step", "checkpointing") else None


def of(
    policy: str,
    g: Geometry,
    w: Window,
    acceptance: AcceptedCounts,
    *,
    steps: int = 10_000,
    seed: int = 0,
    fused: bool = True,
) -> Traffic:
    """Bytes per layer-step with full windows of T tokens, the flush cadence simulated over ``steps`` steps.

    A flush is part of the verify that needs it; accept moves cursors, except for recover, whose accept folds.
    Boundary snapshots of a prefix cache, one state in ``align`` tokens, are left out. Raises ValueError where
    the policy cannot serve the geometry or a sampled count does not fit the window.
    """
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1")
    c = cadence(_limit(policy, w), w.max_len, acceptance.sample(steps, seed))
    return _traffic(policy, g, w, c, fused=fused)


def closed_form(policy: str, g: Geometry, w: Window, a: float, *, fused: bool = True) -> Traffic:
    """Bytes per layer-step where every step accepts ``a`` tokens, bonus included.

    The ring then holds a, 2a, .., na records when a verify starts, and the last of these n = floor((L-T)/a) + 1
    verifies folds them: a share 1/n of flushes and a mean fill of a(n+1)/2. Raises ValueError for a outside 1..T.
    """
    if not 1 <= a <= w.max_len:
        raise ValueError(
            f"a={a} accepted tokens are outside 1..{w.max_len}, the window's max_len;"
            f" the nearest legal value is {1 if a < 1 else w.max_len}"
        )
    limit = _limit(policy, w)
    if limit is None:
        return _traffic(policy, g, w, Cadence(accepted=a), fused=fused)
    n = max(1, floor((limit - w.max_len) / a) + 1)
    c = Cadence(accepted=a, flush_fraction=1 / n, fill=a * (n + 1) / 2)
    return _traffic(policy, g, w, c, fused=fused)
