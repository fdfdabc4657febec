"""Which slots hold what: requests take slots, cached prefixes make room for them, oldest first."""

from collections.abc import Callable, Iterable, Sequence

from ssmspec.pool import NULL_SLOT
from ssmspec.runtime.slots import SlotError, Slots

Prefix = tuple[int, ...]  # token ids


class PrefixCache:
    """Settled states at block boundaries, by the tokens that lead to them. ``wipe`` is called with each slot given back."""

    def __init__(self, num_slots: int, wipe: Callable[[int], None]) -> None:
        self.slots, self.wipe = Slots(num_slots), wipe
        self.of: dict[Prefix, int] = {}  # oldest first

    def longest(self, tokens: Sequence[int]) -> Prefix:
        """The longest cached prefix that leaves at least one token to compute; empty if there is none."""
        return max(
            (p for p in self.of if len(p) < len(tokens) and tuple(tokens[: len(p)]) == p), key=len, default=()
        )

    def take(self, keep: Prefix = ()) -> int:
        """A slot for a request. Raises SlotError when requests hold all of them."""
        while not self.slots.free:
            oldest = next((p for p in self.of if p != keep), None)
            if oldest is None:
                raise SlotError(f"all {self.slots.num_slots - 1} slots are held by requests")
            self.give(self.of.pop(oldest))
        return self.slots.take()

    def spare(self) -> int:
        """A slot for a prefix, or NULL_SLOT: caching never takes a request's place."""
        return self.take() if self.slots.free or self.of else NULL_SLOT

    def give(self, slot: int) -> None:
        self.slots.give(slot)
        self.wipe(slot)

    def keep(self, prefix: Prefix, slot: int) -> None:
        """Cache a slot that holds the prefix's state; a second copy is given back."""
        if prefix in self.of:
            self.give(slot)
        else:
            self.of[prefix] = slot

    def check_integrity(self, held: Iterable[int]) -> None:
        """Every slot is free, a request's, or a cached prefix's."""
        self.slots.check_integrity([*held, *self.of.values()])
