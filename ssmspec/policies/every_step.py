"""Every-step replay: each verify first folds, and stores, what the last step accepted. A ring with no room."""

from ssmspec.policies.ring import RingPolicy


class EveryStep(RingPolicy):
    name = "every-step"
