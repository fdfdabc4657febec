"""Who owns a slot: a free list over slots 1.., with a conservation check. Slot 0 is the null slot and never given out."""

from collections import deque
from collections.abc import Iterable


class SlotError(RuntimeError):
    """No slot is free, or a slot is given back that was not taken."""


class Slots:
    def __init__(self, num_slots: int) -> None:
        if num_slots < 2:
            raise ValueError(f"num_slots={num_slots}: the null slot and at least one more are needed")
        self.num_slots = num_slots
        self._free = deque(range(1, num_slots))  # first in, first out: a recycled slot is reused late

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        if not self._free:
            raise SlotError(f"all {self.num_slots - 1} slots are taken")
        return self._free.popleft()

    def give(self, slot: int) -> None:
        if not 0 < slot < self.num_slots or slot in self._free:
            raise SlotError(f"slot {slot} is not taken")
        self._free.append(slot)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Every slot is free or held, and once. Raises SlotError with the numbers."""
        held = list(held)
        seen = sorted([*self._free, *held])
        if seen != list(range(1, self.num_slots)):
            raise SlotError(
                f"{len(self._free)} free + {len(held)} held slots are not the {self.num_slots - 1} there are: {seen}"
            )
