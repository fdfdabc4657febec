"""Small shapes, one of everything: grouped heads, K != V, every gate form, every way to store the state."""

from ssmspec.geometry import Arch, Conv, DType, Geometry

GATES = {
    "gdn": {"arch": Arch.GDN},
    "kda": {"arch": Arch.KDA},
    "kda-bounded": {"arch": Arch.KDA, "gate_lower_bound": -5.0},
    "mamba2": {"arch": Arch.MAMBA2},
    "mamba2-raw-dt": {"arch": Arch.MAMBA2, "dt_softplus": False},
}
STORES = {
    "fp32": {"state_dtype": DType.FP32},
    "bf16": {"state_dtype": DType.BF16},
    "fp16": {"state_dtype": DType.FP16},
    "bf16-stochastic": {"state_dtype": DType.BF16, "stochastic": True},
    "fp16-stochastic": {"state_dtype": DType.FP16, "stochastic": True},
    "nvfp4": {"state_dtype": DType.NVFP4},
}


def geometry(gate: str = "gdn", store: str = "fp32", **changes: object) -> Geometry:
    values = {
        "num_layers": 2,
        "num_k_heads": 2,
        "num_v_heads": 4,
        "head_k": 16,
        "head_v": 8,
        **GATES[gate],
        **STORES[store],
        **changes,
    }
    h, hv, k, v = (values[name] for name in ("num_k_heads", "num_v_heads", "head_k", "head_v"))
    return Geometry(**{"conv": Conv(channels=2 * h * k + hv * v), **values})
