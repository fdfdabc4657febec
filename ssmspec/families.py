"""How each family of hybrid models spells its layers and its recurrence in config.json.

Key names: the configuration classes of huggingface/transformers, and vllm/transformers_utils/configs/kimi_linear.py.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from ssmspec import layer_lists
from ssmspec.checked import ConfigError, Section, show
from ssmspec.geometry import Arch, Conv, DType, Geometry
from ssmspec.layer_lists import MAX_LAYERS


@dataclass(frozen=True, kw_only=True)
class Family:
    title: str
    layers: Callable[[Section], str]
    recurrence: Callable[[Section, int], Geometry]  # of that many recurrent layers
    looked_for: str  # what marks a recurrent layer
    state: DType | None = None  # where the config names none, as vLLM 0.33.0; None: the model's own dtype
    drafts: Callable[[Section], int | None] = lambda text: None  # attention layers of the MTP head
    default_drafts: int = 0  # where the config is silent, as vLLM 0.33.0
    needs_head_dim: bool = False  # head_dim is not hidden_size // num_attention_heads where it is missing


def _heads(section: Section, key_heads: tuple[str, ...], value_heads: str) -> tuple[int, int]:
    h, hv = section.integer(*key_heads), section.integer(value_heads)
    if hv % h:
        nearest = max(1, hv // h) * h
        raise ConfigError(
            f"{value_heads}={hv} is not a multiple of {key_heads[0]}={h}; the nearest legal value is {nearest}"
        )
    return h, hv


def _gdn(text: Section, layers: int) -> Geometry:
    h, hv = _heads(text, ("linear_num_key_heads",), "linear_num_value_heads")
    k, v = text.integer("linear_key_head_dim"), text.integer("linear_value_head_dim")
    conv = Conv(channels=2 * h * k + hv * v, width=text.integer("linear_conv_kernel_dim"))
    return Geometry(
        arch=Arch.GDN, num_layers=layers, num_k_heads=h, num_v_heads=hv, head_k=k, head_v=v, conv=conv
    )


def _kda(text: Section, layers: int) -> Geometry:
    linear = text.section("linear_attn_config")
    h, k = linear.integer("num_heads"), linear.integer("head_dim")
    key, bound = linear.find("gate_lower_bound")
    if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int | float)):
        raise ConfigError(f"{key}={show(bound)} is not a number")
    if bound is not None and not -math.inf < bound < 0:
        raise ConfigError(f"{key}={show(bound)} must be negative and finite")
    return Geometry(
        arch=Arch.KDA,
        num_layers=layers,
        num_k_heads=h,
        num_v_heads=h,
        head_k=k,
        head_v=k,
        conv=Conv(channels=3 * h * k, width=linear.integer("short_conv_kernel_size")),
        gate_lower_bound=None if bound is None else float(bound),
    )


def _mamba2(layers: int, groups: int, heads: int, head_dim: int, state: int, width: int) -> Geometry:
    return Geometry(
        arch=Arch.MAMBA2,
        num_layers=layers,
        num_k_heads=groups,
        num_v_heads=heads,
        head_k=state,
        head_v=head_dim,
        conv=Conv(channels=heads * head_dim + 2 * groups * state, width=width),
    )


def _nemotron_mamba(text: Section, layers: int) -> Geometry:
    groups, heads = _heads(text, ("n_groups", "mamba_n_groups"), "mamba_num_heads")
    state, width = text.integer("ssm_state_size"), text.integer("conv_kernel", "mamba_d_conv")
    return _mamba2(layers, groups, heads, text.integer("mamba_head_dim"), state, width)


def _granite_mamba(text: Section, layers: int) -> Geometry:
    """mamba_d_head may be "auto": the inner width, mamba_d_ssm or mamba_expand * hidden_size, over the heads."""
    groups, heads = _heads(text, ("mamba_n_groups",), "mamba_n_heads")
    expanded = text.integer("mamba_expand", default=0) * text.integer("hidden_size")
    inner = text.integer("mamba_d_ssm", default=expanded)
    auto = text.find("mamba_d_head")[1] in (None, "auto")
    head_dim = inner // heads if auto else text.integer("mamba_d_head")
    if head_dim < 1 or (inner and head_dim * heads != inner):
        raise ConfigError(
            f"mamba_n_heads={heads} times mamba_d_head={head_dim} must be the inner width of {inner}"
            " (mamba_d_ssm, or mamba_expand * hidden_size)"
        )
    return _mamba2(
        layers, groups, heads, head_dim, text.integer("mamba_d_state"), text.integer("mamba_d_conv")
    )


def _mtp(text: Section) -> int | None:
    """Layers of the MTP head, all of them attention (qwen3_5_mtp.py, kimi_k3); None where the config is silent."""
    layers = text.integer(
        "mtp_num_hidden_layers", "num_nextn_predict_layers", least=0, most=MAX_LAYERS, default=-1
    )
    return None if layers < 0 else layers


def _nemotron_mtp(text: Section) -> int | None:
    """The pattern of one step, "*E" where it is absent, as often as there are steps (nemotron_h_mtp.py)."""
    steps = text.integer("num_nextn_predict_layers", least=0, most=MAX_LAYERS, default=0)
    key, letters = text.string("mtp_hybrid_override_pattern")
    list_key, names = text.array("mtp_layers_block_type", of=str)
    layers = (
        layer_lists.named(list_key, names)
        if letters is None and names is not None
        else layer_lists.pattern(key, letters or "*E")
    )
    if "M" in layers:
        raise ConfigError(
            f"{key} has 'M' at position {layers.index('M')}; a draft head has no recurrent layers"
        )
    return steps * layers.count("*")


_QWEN = Family(
    title="Qwen3-Next, Qwen3.5, 3.6, 3.8, Qwen4Exp",
    layers=layer_lists.qwen,
    recurrence=_gdn,
    looked_for="'linear_attention' in layer_types",
    drafts=_mtp,
    default_drafts=1,
    needs_head_dim=True,
)
_KIMI = Family(
    title="Kimi-Linear, Kimi-K3",
    layers=layer_lists.kimi,
    recurrence=_kda,
    looked_for="an entry of linear_attn_config.kda_layers",
    state=DType.FP32,
    drafts=_mtp,
)
_NEMOTRON = Family(
    title="Nemotron-H, Nemotron-3",
    layers=layer_lists.nemotron,
    recurrence=_nemotron_mamba,
    looked_for="an M in hybrid_override_pattern",
    state=DType.FP32,
    drafts=_nemotron_mtp,
)
_GRANITE = Family(
    title="Granite-4-H, Bamba",
    layers=layer_lists.granite,
    recurrence=_granite_mamba,
    looked_for="'mamba' in layer_types, or a layer outside attn_layer_indices",
)
_FALCON = Family(
    title="Falcon-H1",
    layers=layer_lists.falcon,
    recurrence=_granite_mamba,
    looked_for="any layer",
)

FAMILIES = {
    "qwen3next": _QWEN,
    "qwen35": _QWEN,
    "qwen35moe": _QWEN,
    "qwen4exp": _QWEN,
    "kimilinear": _KIMI,
    "kimik3": _KIMI,
    "nemotronh": _NEMOTRON,
    "granitemoehybrid": _GRANITE,
    "bamba": _GRANITE,
    "falconh1": _FALCON,
}


def find(*sections: Section) -> Family:
    """The family that model_type or architectures names, the innermost object first. Raises ConfigError for others."""
    named_so: list[str] = []
    for section in sections:
        kind, classes = section.string("model_type")[1], section.array("architectures", of=str)[1]
        named_so += ([kind] if kind else []) + (classes or [])
    for name in named_so:
        plain = name.split("For")[0].removesuffix("_text").replace("_", "").lower()
        if plain in FAMILIES:
            return FAMILIES[plain]
    known = "; ".join(dict.fromkeys(family.title for family in FAMILIES.values()))
    if not named_so:
        raise ConfigError(f"'model_type' is missing, and so is 'architectures'; families known: {known}")
    raise ConfigError(f"model_type={show(named_so[0])} is of no hybrid family; families known: {known}")
