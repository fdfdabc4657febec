"""What the shapes that kernels are compiled for have in common."""

import hashlib
from dataclasses import dataclass
from pathlib import Path


def power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def revision(path: str) -> str:
    """Of a shape's source file and this one. Triton's cache on disk does not see the code of properties and layouts, so
    it is compiled in by this."""
    return hashlib.sha256(Path(__file__).read_bytes() + Path(path).read_bytes()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Heads:
    """T tokens in HV value heads, which share H key heads of K channels."""

    H: int
    HV: int
    K: int
    T: int

    @property
    def WINDOW(self) -> int:
        return power_of_2(self.T)

    @property
    def GROUP(self) -> int:
        return self.HV // self.H


@dataclass(frozen=True, kw_only=True)
class Recurrent(Heads):
    """Of any recurrence."""

    ARCH: str
    V: int

    @property
    def MAMBA(self) -> bool:
        return self.ARCH == "mamba2"

    @property
    def CHANNELS(self) -> bool:
        """Whether decays are per channel."""
        return self.ARCH == "kda"
