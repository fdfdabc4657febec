"""Checkpointing replay (ReplaySSM): an old checkpoint, a ring of records, a write only when the ring is full."""

from ssmspec.policies.ring import RingPolicy


class Checkpointing(RingPolicy):
    name = "checkpointing"
