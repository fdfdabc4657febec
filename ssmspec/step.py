"""One speculative step: static device buffers, refreshed in place. A batch row never outlives its step."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ssmspec.pool import NULL_SLOT


class StepError(RuntimeError):
    """A step was used against its contract: closed twice, or with counts that cannot be."""


@dataclass(frozen=True)
class Commit:
    """What a step decided, taken from it once. Rows with nothing to do sit on NULL_SLOT with zero lengths."""

    slots: Tensor  # [B]
    lens: Tensor  # [B]
    accepted: Tensor  # [B] 0..lens, bonus token included; 0 drops the window
    next_slots: Tensor  # [B] == slots for a dropped window
    mark: Tensor  # [B] tokens before the boundary; 0 where the accepted tokens do not reach it
    mark_slots: Tensor  # [B] NULL_SLOT where mark is 0
    force_flush: Tensor  # [B] bool

    @property
    def moved(self) -> Tensor:
        return self.next_slots != self.slots

    @property
    def settles(self) -> Tensor:
        """Rows whose accepted state must be in the checkpoint: those that move, end on a boundary, or are told to."""
        ends_on_boundary = (self.mark > 0) & (self.mark_slots == self.next_slots)
        return self.moved | ends_on_boundary | self.force_flush


@dataclass(frozen=True)
class Step:
    """Device buffers of one step; ``stage`` refreshes them in place, so a captured graph may hold them."""

    slots: Tensor  # [B] int64, where the state lives; NULL_SLOT (or negative) on padding rows
    lens: Tensor  # [B] int64, window length; 0 on padding rows
    accepted: Tensor  # [B] int64, written before close(): 0..lens, bonus included; clamped on the device
    next_slots: Tensor  # [B] int64, where the state lives afterwards; == slots unless an align block was left
    mark: Tensor  # [B] int64, tokens of this window before the align boundary; 0 = none in reach
    mark_slots: Tensor  # [B] int64, where the boundary state goes
    force_flush: Tensor  # [B] bool, the checkpoint must be exact in place when accept returns
    max_len: int  # T, fixed per captured graph

    @classmethod
    def empty(cls, batch: int, max_len: int, device: str = "cpu") -> "Step":
        """Buffers for up to ``batch`` rows with windows of up to ``max_len`` tokens; all rows are null rows."""
        ints = [torch.zeros(batch, dtype=torch.int64, device=device) for _ in range(6)]
        flags = torch.zeros(batch, dtype=torch.bool, device=device)
        slots, lens, accepted, next_slots, mark, mark_slots = ints
        return cls(slots, lens, accepted, next_slots, mark, mark_slots, flags, max_len)

    @classmethod
    def of(cls, slots: Sequence[int], lens: Sequence[int], max_len: int, **rest: Sequence[int]) -> "Step":
        """A step from host numbers; see ``stage`` for the names in ``rest``."""
        step = cls.empty(len(slots), max_len)
        step.stage(slots, lens, **rest)
        return step

    def stage(self, slots: Sequence[int], lens: Sequence[int], **rest: Sequence[int]) -> None:
        """Refresh every buffer in place; fewer rows than the buffers hold are padded with null rows.

        ``rest`` may name accepted, next_slots (default: slots), mark, mark_slots and force_flush. Raises ValueError
        where row counts disagree.
        """
        rest = {"slots": slots, "lens": lens, "next_slots": slots, **rest}
        rows = {name: len(values) for name, values in rest.items()}
        without_length = [s for s in slots[len(lens) :] if s > NULL_SLOT]
        if without_length or len(lens) > len(slots) or max(rows.values()) > len(self.slots):
            counts = ", ".join(f"{name} has {n} rows" for name, n in rows.items())
            raise ValueError(
                f"{counts}; each live row needs a length, and the buffers hold {len(self.slots)}"
            )
        for f in fields(self):
            buffer = getattr(self, f.name)
            if isinstance(buffer, Tensor):
                values = [*rest.get(f.name, ())]
                buffer.copy_(torch.tensor(values + [0] * (len(buffer) - len(values)), dtype=buffer.dtype))

    def close(self, *, debug: bool = False) -> Commit:
        """Take the decision out of the step and leave it empty, so that a second close changes nothing.

        In debug mode (which reads the device) a second close, an out-of-range count, and a live row that would go on
        in no slot raise StepError.
        """
        if debug:
            self._check()
        live = (self.lens > 0) & (self.slots > NULL_SLOT)
        lens = torch.where(live, self.lens, 0)
        accepted = torch.minimum(self.accepted.clamp(min=0), lens)
        slots = torch.where(live, self.slots, NULL_SLOT)
        crossed = (self.mark > 0) & (self.mark <= accepted)
        commit = Commit(
            slots,
            lens,
            accepted,
            torch.where(accepted > 0, self.next_slots, slots),
            torch.where(crossed, self.mark, 0),
            torch.where(crossed, self.mark_slots, NULL_SLOT),
            self.force_flush & live,
        )
        self.lens.zero_()
        return commit

    def _check(self) -> None:
        if not bool((self.lens > 0).any()) and bool((self.slots > NULL_SLOT).any()):
            raise StepError("this step is closed already: a window is accepted once")
        bad = (self.accepted < 0) | (self.accepted > self.lens)
        if bool(bad.any()):
            row = int(bad.nonzero()[0])
            raise StepError(
                f"accepted={int(self.accepted[row])} in row {row} is outside 0..{int(self.lens[row])}"
            )
        nowhere = (self.slots > NULL_SLOT) & (self.accepted > 0) & (self.next_slots <= NULL_SLOT)
        if bool(nowhere.any()):
            row = int(nowhere.nonzero()[0])
            raise StepError(
                f"next_slots={int(self.next_slots[row])} in row {row}: its state would be nowhere"
            )
