"""Published shapes, written out: what the planner is tested on does not depend on the presets."""

from ssmspec.geometry import Arch, Conv, DType, Geometry
from ssmspec.model import Attention, Model


def qwen(
    layers: int = 24, value_heads: int = 32, kv_layers: int = 8, kv_heads: int = 4, state: DType = DType.FP32
) -> Model:
    """Gated DeltaNet, 16 key heads of 128; the defaults are Qwen3.5-4B."""
    geometry = Geometry(
        arch=Arch.GDN,
        num_layers=layers,
        num_k_heads=16,
        num_v_heads=value_heads,
        head_k=128,
        head_v=128,
        conv=Conv(channels=2 * 16 * 128 + value_heads * 128),
        state_dtype=state,
    )
    attention = Attention(num_layers=kv_layers, num_kv_heads=kv_heads, head_dim=256, draft_layers=1)
    return Model(
        name="qwen",
        geometry=geometry,
        attention=attention,
        num_layers=layers + kv_layers,
        hidden_size=2560,
        weights_gib=8.0,
    )


def kimi() -> Model:
    """Kimi-Linear-48B: 20 KDA layers, 7 of MLA with 512 + 64 values a token, no MTP head."""
    geometry = Geometry(
        arch=Arch.KDA,
        num_layers=20,
        num_k_heads=32,
        num_v_heads=32,
        head_k=128,
        head_v=128,
        conv=Conv(channels=12288),
    )
    attention = Attention(num_layers=7, num_kv_heads=32, head_dim=72, latent=576)
    return Model(name="kimi", geometry=geometry, attention=attention, num_layers=27, hidden_size=2304)


def nemotron() -> Model:
    """Nemotron-H-8B: 24 Mamba2 layers, 128 heads of 64, state size 128, 8 groups; 4 attention layers."""
    geometry = Geometry(
        arch=Arch.MAMBA2,
        num_layers=24,
        num_k_heads=8,
        num_v_heads=128,
        head_k=128,
        head_v=64,
        conv=Conv(channels=10240),
    )
    attention = Attention(num_layers=4, num_kv_heads=8, head_dim=128)
    return Model(name="nemotron", geometry=geometry, attention=attention, num_layers=52, hidden_size=4096)
