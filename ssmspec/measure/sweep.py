"""Every policy in every combination of what a user asked for: bytes, requests that fit, and bits."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, partial
from typing import TYPE_CHECKING

from ssmspec.acceptance import Acceptance
from ssmspec.geometry import Geometry, Mode, Window
from ssmspec.measure import capacity, rings, speeds, traffic
from ssmspec.measure.capacity import CapacityResult, Reuse, Settings
from ssmspec.measure.expected import Expected, expected
from ssmspec.measure.planner import CacheMode
from ssmspec.measure.speeds import Speed
from ssmspec.measure.traffic import Traffic
from ssmspec.model import Model
from ssmspec.runtime.setup import reduced

if TYPE_CHECKING:  # importing it imports torch
    from ssmspec.measure.exact import Exactness

ALIGN = 16  # tokens between the boundaries that a played life crosses in align mode, which the real block is too long for


class Part(StrEnum):
    EXACT = "exact"
    TRAFFIC = "traffic"
    CAPACITY = "capacity"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One combination. The model carries the formats of its state and records."""

    model: Model
    window: Window
    acceptance: Acceptance
    settings: Settings
    batch: int
    ring_asked: bool = False  # else a checkpointing row has the ring of `with_ring`

    def labels(self) -> dict[str, str | int]:
        """What tells one combination from another, by name."""
        g, s = self.model.geometry, self.settings
        return {
            "draft": self.window.max_len - 1,
            "ring": self.window.limit,
            "state_dtype": g.state_dtype,
            "record_dtype": g.record_dtype,
            "read_copy": g.read_dtype or "none",
            "batch": self.batch,
            "context": s.context,
            "kv_dtype": s.kv_dtype,
            "cache_mode": s.cache_mode,
            "tp": s.tp,
        }


@dataclass(frozen=True, kw_only=True)
class Row:
    """One policy in one combination; what was not asked for is None."""

    case: Case
    policy: str
    mode: Mode | None  # None: native, which has but one
    ring: int | None = None  # None: the case's
    exact: "Exactness | None" = None
    traffic: Traffic | None = None
    capacity: CapacityResult | None = None
    unfit: str = ""  # why there is no capacity, where that was asked for: the weights are too large
    reuse: Reuse | None = None  # align only, of a resent prompt that fills the context

    @property
    def window(self) -> Window:
        w = self.case.window
        return replace(w, mode=self.mode or w.mode, ring_len=self.ring or w.ring_len)

    @property
    def has_ring(self) -> bool:
        """A ring is checkpointing's alone; one that was asked for tells combinations apart."""
        return self.policy == "checkpointing" or self.case.ring_asked

    def labels(self) -> dict[str, str | int]:
        """The case's, with the row's own ring, or without one."""
        found = self.case.labels() | {"ring": self.window.limit}
        return found if self.has_ring else {name: value for name, value in found.items() if name != "ring"}

    @property
    def expected(self) -> Expected:
        return expected(self.policy, self.case.model.geometry, self.window)

    @property
    def model_step(self) -> tuple[float, float]:
        """Bytes (read, written) by all recurrent layers of one rank in one step of the batch."""
        assert self.traffic is not None
        return self.traffic.model_step(self.case.batch)

    @property
    def speed(self) -> Speed | None:
        """Of a whole layer beside vLLM's own kernels, where a layer and a load like these were timed, with this ring."""
        if self.mode is None:
            return None
        rank = self.case.model.geometry.shard(self.case.settings.tp)
        return speeds.measured().of(self.policy, rank, self.window, self.case.batch)

    @property
    def ok(self) -> bool:
        return self.exact is None or self.exact.ok

    @property
    def note(self) -> str:
        """What a reader should know of this row beyond its numbers."""
        notes = []
        if self.exact is not None and not self.exact.equal:
            notes.append(self.exact.expected.why if self.ok else "EXPECTED TO BE EQUAL, AND IS NOT")
        if self.policy == "native" and self.case.model.geometry.read_dtype:
            notes.append("keeps no read copy")
        if self.capacity is not None and self.capacity.limit is not capacity.Limit.MEMORY:
            notes.append(f"limited by {self.capacity.limit}")
        return "; ".join(notes)


def with_ring(case: Case, policy: str, w: Window) -> Window:
    """With the ring that `bench` and the plugin take on the GPU whose speeds are known, where none was asked for."""
    if policy != "checkpointing" or case.ring_asked:
        return w
    return replace(w, ring_len=rings.tuned(speeds.measured().device, case.model.geometry, w) or w.ring_len)


def run(
    cases: Sequence[Case],
    policies: Sequence[str],
    modes: Sequence[Mode],
    parts: Iterable[Part],
    *,
    seed: int = 0,
    backend: str = "torch",
    progress: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """A row for each case, mode and policy, native first and once. What cannot be raises ValueError, before a life is played."""
    wanted, rows = set(parts), []
    moved = cache(partial(traffic.of, seed=seed))  # loads and contexts share it
    for number, case in enumerate(cases, start=1):
        progress(f"combination {number:,} of {len(cases):,}")
        for row in _blank(case, policies, modes):
            ring = None if wanted == {Part.EXACT} else with_ring(case, row.policy, row.window).ring_len
            rows.append(_counted(replace(row, ring=ring), wanted, moved))
    if wanted == {Part.CAPACITY} and all(row.unfit for row in rows):
        raise capacity.DoesNotFit(rows[0].unfit)
    return _played(rows, modes, seed, backend, progress) if Part.EXACT in wanted else rows


def _blank(case: Case, policies: Sequence[str], modes: Sequence[Mode]) -> list[Row]:
    native = [Row(case=case, policy="native", mode=None)] if "native" in policies else []
    others = [name for name in policies if name != "native"]
    return native + [Row(case=case, policy=name, mode=mode) for mode in modes for name in others]


def life_of(case: Case) -> tuple[Geometry, Window]:
    """What is played for a combination: a small shape of its layer, and its window. Many combinations share one."""
    t = case.window.max_len
    align = max(ALIGN, t) if case.settings.cache_mode is CacheMode.ALIGN else 0
    return reduced(case.model.geometry), replace(case.window, align=align)


def _counted(row: Row, parts: set[Part], moved: Callable[..., Traffic]) -> Row:
    case, model = row.case, row.case.model
    if row.policy == "native":
        model = replace(model, geometry=replace(model.geometry, read_dtype=None))
    if Part.TRAFFIC in parts:
        shard = model.geometry.shard(case.settings.tp)
        row = replace(row, traffic=moved(row.policy, shard, row.window, case.acceptance))
    if Part.CAPACITY in parts:
        try:
            row = replace(row, capacity=capacity.of(row.policy, model, row.window, case.settings))
        except capacity.DoesNotFit as error:
            return replace(row, unfit=str(error))
        if case.settings.cache_mode is CacheMode.ALIGN:
            found = capacity.reuse(row.policy, model, row.window, case.settings, case.settings.context)
            row = replace(row, reuse=found)
    return row


def _played(
    rows: Sequence[Row], modes: Sequence[Mode], seed: int, backend: str, progress: Callable[[str], None]
) -> list[Row]:
    """The rows with what their lives showed; a life is played once for all combinations that share it."""
    from ssmspec.measure import exact

    policies = list(dict.fromkeys(row.policy for row in rows))
    lives = list(dict.fromkeys(life_of(row.case) for row in rows))
    found: dict[tuple[Geometry, Window, str, Mode | None], Exactness] = {}
    for number, (g, w) in enumerate(lives, start=1):
        tell = partial(_tell, progress, f"life {number} of {len(lives)}: ")
        windows = [replace(w, mode=mode) for mode in modes]
        results = exact.compare(g, windows, policies, seed=seed, backend=backend, progress=tell)
        found |= {(g, w, r.policy, None if r.policy == "native" else r.mode): r for r in results}
    return [replace(row, exact=found[*life_of(row.case), row.policy, row.mode]) for row in rows]


def _tell(progress: Callable[[str], None], before: str, text: str) -> None:
    progress(before + text)
