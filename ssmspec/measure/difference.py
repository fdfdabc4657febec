"""How far two tensors are apart: bits, values, and units in the last place."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def ulps(a: Tensor, b: Tensor) -> int:
    """The largest number of representable values between elements of one dtype; 0 for bit-equal up to signed zeros."""
    bits = _BITS.get(a.dtype)
    if bits is None or a.numel() == 0:
        return 0

    def ordered(t: Tensor) -> Tensor:
        i = t.contiguous().view(bits).to(torch.int64)
        return torch.where(i < 0, torch.iinfo(bits).min - i, i)

    return int((ordered(a) - ordered(b)).abs().max())


@dataclass(frozen=True, kw_only=True)
class Tally:
    """What was seen of many pairs of tensors."""

    compared: int = 0
    different: int = 0
    max_abs: float = 0.0
    max_ulp: int = 0

    def add(self, a: Tensor, b: Tensor) -> "Tally":
        if torch.equal(a, b):
            return replace(self, compared=self.compared + 1)
        gap = (a.double() - b.double()).abs()
        return Tally(
            compared=self.compared + 1,
            different=self.different + 1,
            max_abs=max(self.max_abs, float(gap.nan_to_num(torch.inf, torch.inf).max())),
            max_ulp=max(self.max_ulp, ulps(a, b)),
        )


@dataclass(frozen=True, kw_only=True)
class Error:
    """Root mean square distance from the oracle, over the oracle's root mean square."""

    square: float = 0.0
    reference: float = 0.0

    def add(self, a: Tensor, oracle: Tensor) -> "Error":
        return Error(
            square=self.square + float((a.double() - oracle.double()).square().sum()),
            reference=self.reference + float(oracle.double().square().sum()),
        )

    @property
    def relative(self) -> float:
        return (self.square / self.reference) ** 0.5 if self.reference else 0.0
