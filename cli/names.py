"""How formats and labels are typed and printed."""

from ssmspec.geometry import DType

SHORT = {
    DType.FP32: "fp32",
    DType.BF16: "bf16",
    DType.FP16: "fp16",
    DType.FP8: "fp8",
    DType.NVFP4: "nvfp4",
}

TITLES = {
    "draft": "draft",
    "ring": "ring",
    "state_dtype": "state",
    "record_dtype": "records in",
    "read_copy": "read copy",
    "batch": "batch",
    "context": "context",
    "kv_dtype": "KV in",
    "cache_mode": "cache mode",
    "tp": "TP",
}
"""What tells combinations apart, as it is printed."""


def typed(*dtypes: DType) -> dict[str, DType]:
    """The formats by each name they may be typed with."""
    return {SHORT[dtype]: dtype for dtype in dtypes} | {str(dtype): dtype for dtype in dtypes}


def short(value: object) -> str:
    """A value as it is printed."""
    return SHORT[value] if isinstance(value, DType) else str(value)
