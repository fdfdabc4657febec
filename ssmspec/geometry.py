"""The vocabulary: shapes of a recurrent layer and of a speculative window. Imports nothing heavy.

Letters, everywhere in this project:
    H   key heads (Mamba2: groups)      HV  value heads        K  key dim (Mamba2: state size N)
    V   value dim (Mamba2: head dim P)  T   window length      L  committed records before a flush is due
    R   allocated ring length           B   batch rows         D  conv channels     W  conv width
"""

from dataclasses import dataclass, replace
from enum import StrEnum


class Arch(StrEnum):
    GDN = "gdn"
    KDA = "kda"
    MAMBA2 = "mamba2"


class Mode(StrEnum):
    EXACT = "exact"  # token by token, the bits of the native policy
    FAST = "fast"  # outputs through matrix products (UT/WY form), within a tolerance


class DType(StrEnum):
    FP64 = "float64"  # the oracle's
    FP32 = "float32"
    BF16 = "bfloat16"
    FP16 = "float16"
    FP8 = "float8_e4m3fn"
    NVFP4 = "nvfp4"  # 4-bit values, an e4m3 scale per 16 values, one fp32 scale per head; emulated
    INT32 = "int32"
    INT64 = "int64"

    def nbytes(self, numel: int, heads: int = 1) -> int:
        """Bytes of ``numel`` values in ``heads`` heads, block and head scales included."""
        if self is DType.NVFP4:
            return numel // 2 + -(-numel // 16) + 4 * heads
        return numel * _ITEMSIZE[self]


_ITEMSIZE = {
    DType.FP64: 8,
    DType.FP32: 4,
    DType.BF16: 2,
    DType.FP16: 2,
    DType.FP8: 1,
    DType.INT32: 4,
    DType.INT64: 8,
}
STATE_DTYPES = (DType.FP32, DType.BF16, DType.FP16, DType.NVFP4, DType.FP64)
RECORD_DTYPES = (DType.FP32, DType.BF16, DType.FP16)
READ_DTYPES = (DType.FP16, DType.BF16, DType.FP8, DType.NVFP4)
ACT_DTYPES = (DType.BF16, DType.FP16, DType.FP32)


def _one_of(name: str, value: DType, legal: tuple[DType, ...]) -> None:
    if value not in legal:
        raise ValueError(f"{name}={value} is not one of {', '.join(legal)}")


@dataclass(frozen=True, kw_only=True)
class Conv:
    """A causal short conv: output t is a weighted sum of inputs t, t-dilation, .., t-(W-1)*dilation."""

    channels: int = 0  # D
    width: int = 4  # W
    dilation: int = 1

    def __post_init__(self) -> None:
        for name in ("width", "dilation"):
            if getattr(self, name) < 1:
                raise ValueError(f"conv {name}={getattr(self, name)} must be at least 1")

    @property
    def history(self) -> int:
        """Inputs that must be kept between steps."""
        return (self.width - 1) * self.dilation


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """One recurrent layer, and how its state is stored. S is [HV, V, K]; key head h // (HV // H) serves value head h."""

    arch: Arch
    num_layers: int
    num_k_heads: int  # H
    num_v_heads: int  # HV
    head_k: int  # K
    head_v: int  # V
    conv: Conv = Conv()
    act_dtype: DType = DType.BF16
    state_dtype: DType = DType.FP32
    stochastic: bool = False  # round the state stochastically, by (request seed, position)
    record_dtype: DType = DType.FP32  # of the recorded update c; lower is an explicit loss
    read_dtype: DType | None = None  # a low-precision copy that outputs read; the recurrence never does
    gate_lower_bound: float | None = None  # KDA only
    dt_softplus: bool = True  # Mamba2 only

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_k_heads", "num_v_heads", "head_k", "head_v"):
            if getattr(self, name) < (0 if name == "num_layers" else 1):
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        if self.num_v_heads % self.num_k_heads:
            h = self.num_k_heads
            raise ValueError(
                f"num_v_heads={self.num_v_heads} is not a multiple of num_k_heads={h};"
                f" the nearest legal value is {max(1, self.num_v_heads // h) * h}"
            )
        _one_of("act_dtype", self.act_dtype, ACT_DTYPES)
        _one_of("state_dtype", self.state_dtype, STATE_DTYPES)
        _one_of("record_dtype", self.record_dtype, RECORD_DTYPES)
        if self.read_dtype is not None:
            _one_of("read_dtype", self.read_dtype, READ_DTYPES)
        if self.stochastic and self.state_dtype not in (DType.FP16, DType.BF16):
            raise ValueError(f"stochastic rounding needs a 16-bit state, not {self.state_dtype}")
        if self.gate_lower_bound is not None and (self.arch is not Arch.KDA or self.gate_lower_bound >= 0):
            raise ValueError(f"gate_lower_bound={self.gate_lower_bound} must be negative, and is KDA's alone")

    @property
    def group(self) -> int:
        """Value heads served by one key head."""
        return self.num_v_heads // self.num_k_heads

    def shard(self, tp: int) -> "Geometry":
        """One rank of ``tp``: heads are divided; Mamba2 groups are replicated where tp is a multiple of them."""
        if tp < 1:
            raise ValueError(f"tp={tp} must be at least 1")
        h, hv, d = self.num_k_heads, self.num_v_heads, self.conv.channels
        if hv % tp:
            legal = max(t for t in range(1, min(tp, hv) + 1) if hv % t == 0)
            raise ValueError(f"tp={tp} does not divide num_v_heads={hv}; the nearest legal value is {legal}")
        if h % tp == 0:
            heads = h // tp
        elif self.arch is Arch.MAMBA2 and tp % h == 0:
            heads = 1  # replicated: every rank of a group holds that group
        else:
            legal = max(t for t in range(1, min(tp, h) + 1) if h % t == 0 and hv % t == 0)
            rule = " (Mamba2 groups are replicated only where tp is a multiple of them)"
            raise ValueError(
                f"tp={tp} does not divide num_k_heads={h}; the nearest legal value is {legal}"
                + (rule if self.arch is Arch.MAMBA2 else "")
            )
        keys = 2 * self.head_k * (heads - h)
        values = self.head_v * (hv // tp - hv)
        return replace(
            self,
            num_k_heads=heads,
            num_v_heads=hv // tp,
            conv=replace(self.conv, channels=max(0, d + keys + values)),
        )


MAX_RING = 63  # step ends are a bitmask in one int64


@dataclass(frozen=True, kw_only=True)
class Window:
    """One speculative step: T tokens at most, the first of them already sampled. T = 1 is standard decode."""

    max_len: int  # T = 1 + number of drafts
    ring_len: int | None = None  # L, checkpointing only; None: 16, or 2T where T > 8
    align: int = 0  # prefix-cache block in tokens; 0 switches boundary snapshots off
    mode: Mode = Mode.EXACT

    def __post_init__(self) -> None:
        t = self.max_len
        if t < 1:
            raise ValueError(f"max_len={t}: a window has at least one token")
        if t > MAX_RING // 2:
            raise ValueError(
                f"max_len={t}: a ring of {MAX_RING} records holds two windows; the nearest legal value is {MAX_RING // 2}"
            )
        if 0 < self.align < t:
            raise ValueError(
                f"align={self.align} < max_len={t}: a window may cross one boundary at most;"
                f" the nearest legal value is {t}"
            )
        if self.align < 0:
            raise ValueError(f"align={self.align} must not be negative")
        if self.ring_len is None:
            object.__setattr__(self, "ring_len", 16 if t <= 8 else 2 * t)
        if self.limit < t:
            raise ValueError(
                f"ring_len={self.limit} cannot hold a window of max_len={t}; the nearest legal value is {t}"
            )
        if self.limit + t > MAX_RING:
            raise ValueError(
                f"ring_len={self.limit} + max_len={t} exceeds {MAX_RING} records;"
                f" the nearest legal value is {max(t, MAX_RING - t)}"
            )

    @property
    def limit(self) -> int:
        """L as a number: the most committed records that a checkpointing ring keeps."""
        assert self.ring_len is not None
        return self.ring_len
