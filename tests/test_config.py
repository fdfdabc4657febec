"""A published config.json is read right, and a broken one gets a sentence."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssmspec.checked import ConfigError
from ssmspec.geometry import Arch, Conv, DType
from ssmspec.huggingface import MAX_BYTES, from_config, read
from ssmspec.presets import DEFAULT, PRESETS, find, load

CONFIGS = Path(__file__).parent / "data" / "configs"
PUBLISHED = sorted(CONFIGS.glob("*.json"))
BY_NAME = {path.stem: json.loads(path.read_text()) for path in PUBLISHED}

# Published config.json of ibm-granite/granite-4.0-h-small, ibm-ai-platform/Bamba-9B, tiiuae/Falcon-H1-0.5B-Base,
# moonshotai/Kimi-K3 and Qwen/Qwen3.8-Flash-Next, the keys that are read.
GRANITE: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "hidden_size": 4096,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
BAMBA: dict[str, Any] = {
    **{k: v for k, v in GRANITE.items() if k not in ("architectures", "layer_types")},
    "model_type": "bamba",
    "num_hidden_layers": 32,
    "attn_layer_indices": [9, 18, 27],
    "mamba_d_head": "auto",
}
FALCON: dict[str, Any] = {
    "model_type": "falcon_h1",
    "attn_layer_indices": None,
    "hidden_size": 1024,
    "num_hidden_layers": 36,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "mamba_n_heads": 24,
    "mamba_d_head": 64,
    "mamba_d_ssm": 1536,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "torch_dtype": "bfloat16",
}
KIMI_K3: dict[str, Any] = {
    "model_type": "kimi_k3",
    "text_config": {
        "hidden_size": 7168,
        "num_hidden_layers": 93,
        "num_attention_heads": 96,
        "num_key_value_heads": 96,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "linear_attn_config": {
            "full_attn_layers": [*range(4, 93, 4), 93],
            "kda_layers": [i for i in range(1, 93) if i % 4],
            "gate_lower_bound": -5.0,
            "num_heads": 96,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
        "dtype": "bfloat16",
    },
}
FLASH_NEXT: dict[str, Any] = {
    "model_type": "qwen4_exp",
    "text_config": {
        **BY_NAME["qwen3.5-4b"]["text_config"],
        "model_type": "qwen4_exp_text",
        "hidden_size": 2560,
        "num_hidden_layers": 48,
        "layer_types": [*["linear_attention"] * 3, "qwen_sparse_attention"] * 12,
        "linear_num_value_heads": 48,
        "hc_count": 4,
        "ple_layer_ids": [2],
        "ple_conv_kernel_size": 4,
        "ngram_size": 3,
        "indexer_n_heads": 4,
    },
}
EVERY = [*BY_NAME.values(), GRANITE, BAMBA, FALCON, KIMI_K3, FLASH_NEXT]


def changed(config: dict[str, Any], **values: Any) -> dict[str, Any]:
    """A copy with these keys replaced, in text_config where there is one; ... takes a key out."""
    result = copy.deepcopy(config)
    text = result.get("text_config", result)
    for key, value in values.items():
        if value is ...:
            del text[key]
        else:
            text[key] = value
    return result


def complaint(config: Any) -> str:
    with pytest.raises(ConfigError) as error:
        from_config(config, "m")
    return str(error.value)


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda p: p.stem)
def test_a_preset_is_exactly_what_its_published_config_says(path: Path) -> None:
    preset = PRESETS[path.stem]
    assert replace(read(path), source=preset.source, weights_gib=preset.weights_gib) == preset


# Table of layers, heads, K x V, conv channels, hidden size in the public config.json of each model.
@pytest.mark.parametrize(
    ("name", "recurrent", "total", "h", "hv", "k", "v", "channels", "hidden", "arch"),
    [
        ("qwen3.5-0.8b", 18, 24, 16, 16, 128, 128, 6144, 1024, Arch.GDN),
        ("qwen3.5-4b", 24, 32, 16, 32, 128, 128, 8192, 2560, Arch.GDN),
        ("qwen3.5-27b", 48, 64, 16, 48, 128, 128, 10240, 5120, Arch.GDN),
        ("qwen3.5-35b-a3b", 30, 40, 16, 32, 128, 128, 8192, 2048, Arch.GDN),
        ("qwen3.5-122b-a10b", 36, 48, 16, 64, 128, 128, 12288, 3072, Arch.GDN),
        ("qwen3.5-397b-a17b", 45, 60, 16, 64, 128, 128, 12288, 4096, Arch.GDN),
        ("qwen3-next-80b-a3b", 36, 48, 16, 32, 128, 128, 8192, 2048, Arch.GDN),
        ("kimi-linear-48b-a3b", 20, 27, 32, 32, 128, 128, 12288, 2304, Arch.KDA),
        ("nemotron-h-8b", 24, 52, 8, 128, 128, 64, 10240, 4096, Arch.MAMBA2),
        ("nemotron-3-super-120b-a12b", 40, 88, 8, 128, 128, 64, 10240, 4096, Arch.MAMBA2),
    ],
)
def test_the_presets_have_the_published_geometry(
    name: str,
    recurrent: int,
    total: int,
    h: int,
    hv: int,
    k: int,
    v: int,
    channels: int,
    hidden: int,
    arch: Arch,
) -> None:
    m = PRESETS[name]
    g = m.geometry
    assert (g.num_layers, m.num_layers, g.num_k_heads, g.num_v_heads) == (recurrent, total, h, hv)
    assert (g.head_k, g.head_v, g.conv, m.hidden_size, g.arch) == (
        k,
        v,
        Conv(channels=channels),
        hidden,
        arch,
    )


@pytest.mark.parametrize(
    ("name", "layers", "kv_heads", "head_dim", "latent", "drafts"),
    [
        ("qwen3.5-4b", 8, 4, 256, 0, 1),
        ("qwen3.5-35b-a3b", 10, 2, 256, 0, 1),
        ("qwen3-next-80b-a3b", 12, 2, 256, 0, 1),  # vLLM 0.33.0: one, where the config is silent
        ("kimi-linear-48b-a3b", 7, 1, 576, 576, 0),
        ("nemotron-h-8b", 4, 8, 128, 0, 0),
        ("nemotron-3-super-120b-a12b", 8, 2, 128, 0, 1),
    ],
)
def test_attention_layers_heads_and_draft_layers_are_counted(
    name: str, layers: int, kv_heads: int, head_dim: int, latent: int, drafts: int
) -> None:
    a = PRESETS[name].attention
    assert (a.num_layers, a.num_kv_heads, a.head_dim) == (layers, kv_heads, head_dim)
    assert (a.latent, a.draft_layers) == (latent, drafts)


def test_granite_bamba_and_falcon_key_names_are_read() -> None:
    for config, recurrent, attention in ((GRANITE, 36, 4), (BAMBA, 29, 3)):
        m = from_config(config, "m")
        g = m.geometry
        assert (g.num_layers, m.attention.num_layers, m.attention.head_dim) == (recurrent, attention, 128)
        assert (g.num_k_heads, g.num_v_heads, g.head_k, g.head_v) == (1, 128, 128, 64)
        assert g.conv.channels == 8192 + 2 * 128
    m = from_config(FALCON, "m")
    assert (m.geometry.num_layers, m.attention.num_layers, m.num_layers) == (36, 36, 36)
    assert (m.geometry.num_v_heads, m.geometry.head_v, m.geometry.conv.channels) == (24, 64, 1536 + 2 * 128)


def test_kimi_k3_brings_its_gate_lower_bound() -> None:
    m = from_config(KIMI_K3, "m")
    assert (m.geometry.num_layers, m.attention.num_layers, m.geometry.num_v_heads) == (69, 24, 96)
    assert m.geometry.gate_lower_bound == -5.0
    assert PRESETS["kimi-linear-48b-a3b"].geometry.gate_lower_bound is None


def test_the_dilated_conv_of_qwen4exp_is_read() -> None:
    m = from_config(FLASH_NEXT, "m")
    assert (m.ple, m.num_ple_layers) == (Conv(channels=4 * 2560, width=4, dilation=3), 1)
    assert m.ple is not None
    assert m.ple.history == 9
    assert (m.geometry.num_layers, m.attention.num_layers) == (36, 12)
    assert any("indexer" in note for note in m.notes)
    assert PRESETS["qwen3.5-4b"].ple is None


def test_text_only_files_and_class_names_alone_are_enough() -> None:
    text = BY_NAME["qwen3.5-4b"]["text_config"]
    nested = from_config(BY_NAME["qwen3.5-4b"], "m")
    assert from_config(text, "m") == nested
    bare = {k: v for k, v in text.items() if k != "model_type"}
    for name in ("Qwen3_5ForCausalLM", "Qwen3_5MoeForConditionalGeneration", "Qwen3NextForCausalLM"):
        assert from_config({**bare, "architectures": [name]}, "m") == nested
    assert from_config({"model_type": "some_wrapper", "text_config": text}, "m") == nested


def test_nemotron_accepts_a_list_of_layer_names_and_a_draft_pattern() -> None:
    base = BY_NAME["nemotron-3-super-120b-a12b"]
    names = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
    listed = changed(
        base,
        hybrid_override_pattern=...,
        layers_block_type=[names[letter] for letter in base["hybrid_override_pattern"]],
        mtp_hybrid_override_pattern=...,
        mtp_layers_block_type=["attention", "moe"],
    )
    assert from_config(listed, "m") == from_config(base, "m")
    drafts = from_config(changed(base, mtp_hybrid_override_pattern="**E", num_nextn_predict_layers=2), "m")
    assert drafts.attention.draft_layers == 4
    assert "'M' at position 1" in complaint(changed(base, mtp_hybrid_override_pattern="*M"))


# vLLM 0.33.0: model_executor/models/config.py and layers/mamba/mamba_utils.py
@pytest.mark.parametrize(
    ("config", "state"),
    [
        (changed(BY_NAME["qwen3.5-4b"], mamba_ssm_dtype=...), DType.BF16),
        (BY_NAME["qwen3-next-80b-a3b"], DType.BF16),
        (BY_NAME["kimi-linear-48b-a3b"], DType.FP32),
        (BY_NAME["nemotron-h-8b"], DType.FP32),
        (GRANITE, DType.BF16),
        (changed(BY_NAME["qwen3-next-80b-a3b"], torch_dtype="float16"), DType.FP16),
    ],
)
def test_a_missing_state_dtype_takes_vllms_default_and_says_so(config: dict[str, Any], state: DType) -> None:
    m = from_config(config, "m")
    assert m.geometry.state_dtype is state
    assert any("mamba_ssm_dtype" in note and state in note for note in m.notes)


def test_a_named_state_dtype_is_taken_without_a_note() -> None:
    for key in ("mamba_ssm_dtype", "mamba_ssm_cache_dtype"):
        m = from_config(changed(BY_NAME["nemotron-h-8b"], **{key: "float16"}), "m")
        assert m.geometry.state_dtype is DType.FP16
        assert m.notes == ()
    assert "float8_e4m3fn" in complaint(changed(BY_NAME["qwen3.5-4b"], mamba_ssm_dtype="float8_e4m3fn"))


def test_dtype_and_torch_dtype_may_agree_but_not_disagree() -> None:
    base = BY_NAME["nemotron-h-8b"]
    assert from_config(changed(base, dtype="torch.bfloat16"), "m") == from_config(base, "m")
    text = complaint(changed(base, dtype="float16"))
    assert "dtype=float16" in text
    assert "torch_dtype=bfloat16" in text
    assert any("'dtype'" in note for note in from_config(changed(base, torch_dtype=...), "m").notes)


QWEN, NEMOTRON, KIMI = (BY_NAME[n] for n in ("qwen3.5-4b", "nemotron-h-8b", "kimi-linear-48b-a3b"))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (changed(QWEN, linear_num_value_heads=...), ["linear_num_value_heads", "missing"]),
        (changed(QWEN, head_dim=...), ["head_dim", "missing"]),
        (
            changed(QWEN, linear_num_value_heads=33),
            ["linear_num_value_heads=33", "linear_num_key_heads=16", "32"],
        ),
        (changed(QWEN, hidden_size="2560"), ["hidden_size='2560'", "integer"]),
        (changed(QWEN, hidden_size=True), ["hidden_size=True", "integer"]),
        (changed(QWEN, hidden_size=2560.0), ["hidden_size=2560.0", "integer"]),
        (changed(QWEN, linear_key_head_dim=-128), ["linear_key_head_dim=-128", "nearest legal value is 1"]),
        (
            changed(QWEN, linear_key_head_dim=10**30),
            ["linear_key_head_dim", "nearest legal value is 1048576"],
        ),
        (changed(QWEN, linear_key_head_dim=10**5000), ["m: "]),
        (changed(QWEN, num_hidden_layers=10**6), ["num_hidden_layers=1000000", "10000"]),
        (changed(QWEN, num_hidden_layers=31), ["layer_types describes 32", "num_hidden_layers=31"]),
        (changed(QWEN, full_attention_interval=5), ["layer_types", "full_attention_interval=5", "layer 3"]),
        (
            changed(QWEN, layer_types=..., full_attention_interval=...),
            ["layer_types", "full_attention_interval"],
        ),
        (changed(QWEN, layer_types=["conv"] * 32), ["layer_types[0]='conv'"]),
        (changed(QWEN, layer_types=[3] * 32), ["layer_types[0]=3"]),
        (
            changed(QWEN, layer_types=["full_attention"] * 32, full_attention_interval=...),
            ["no recurrent layer among 32", "linear_attention"],
        ),
        (changed(QWEN, model_type=7), ["model_type=7", "string"]),
        ({"text_config": [1]}, ["text_config", "object"]),
        (
            changed(NEMOTRON, hybrid_override_pattern="MX" + NEMOTRON["hybrid_override_pattern"][2:]),
            ["'X' at position 1", "M * - E"],
        ),
        (
            changed(NEMOTRON, hybrid_override_pattern=NEMOTRON["hybrid_override_pattern"][1:]),
            ["hybrid_override_pattern describes 51", "num_hidden_layers=52"],
        ),
        (changed(NEMOTRON, hybrid_override_pattern=...), ["hybrid_override_pattern", "layers_block_type"]),
        (
            changed(NEMOTRON, hybrid_override_pattern="*" * 52),
            ["no recurrent layer", "M in hybrid_override_pattern"],
        ),
        (changed(KIMI, linear_attn_config=...), ["linear_attn_config", "missing"]),
        (
            changed(KIMI, linear_attn_config={**KIMI["linear_attn_config"], "kda_layers": [1, 28]}),
            ["28", "1 to 27"],
        ),
        (
            changed(KIMI, linear_attn_config={**KIMI["linear_attn_config"], "kda_layers": [1]}),
            ["layer 2", "neither"],
        ),
        (
            changed(
                KIMI, linear_attn_config={**KIMI["linear_attn_config"], "gate_lower_bound": float("nan")}
            ),
            ["gate_lower_bound=nan", "negative"],
        ),
        (
            changed(
                KIMI, linear_attn_config={**KIMI["linear_attn_config"], "gate_lower_bound": float("-inf")}
            ),
            ["gate_lower_bound=-inf", "finite"],
        ),
        (
            changed(KIMI, linear_attn_config={**KIMI["linear_attn_config"], "gate_lower_bound": 0.5}),
            ["gate_lower_bound=0.5", "negative"],
        ),
        (changed(GRANITE, layer_types=...), ["layer_types", "attn_layer_indices"]),
        (changed(GRANITE, layer_types=["attention"] * 40), ["no recurrent layer among 40", "mamba"]),
        (changed(BAMBA, attn_layer_indices=[32]), ["attn_layer_indices", "32", "0 to 31"]),
        (changed(GRANITE, mamba_d_head=32), ["mamba_n_heads=128", "mamba_d_head=32", "8192"]),
        ({"model_type": "llama"}, ["'llama'", "Qwen3", "Kimi", "Nemotron", "Granite", "Falcon"]),
        ({"architectures": ["LlamaForCausalLM"]}, ["LlamaForCausalLM", "Nemotron"]),
        ({}, ["model_type", "architectures"]),
        ([], ["object"]),
        (None, ["object"]),
    ],
)
def test_a_wrong_config_gets_a_sentence_that_names_the_key(config: Any, words: list[str]) -> None:
    text = complaint(config)
    for word in words:
        assert word in text
    assert text.startswith("m: ")
    assert len(text) < 500


def test_a_folder_is_read_and_gives_the_model_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"config\.json: there is no such file"):
        read(folder)
    (folder / "config.json").write_text(json.dumps(QWEN))
    m = read(folder)
    assert (m.name, m.source) == ("my-model", str(folder / "config.json"))
    assert m.geometry == PRESETS[DEFAULT].geometry


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe\x00",
        b"not json",
        json.dumps(QWEN).encode()[:-3],
        b"[" * 100_000,
        b'{"model_type": ' + b"9" * 5000 + b"}",
        b"NaN",
        b'{"model_type": "nemotron_h", "hybrid_override_pattern": "' + b"Z" * 1_000_000 + b'"}',
        json.dumps(QWEN).encode().ljust(MAX_BYTES + 1),
    ],
    ids=lambda data: repr(data[:16]),
)
def test_a_file_that_is_no_config_gets_a_sentence(data: bytes, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(data)
    with pytest.raises(ConfigError) as error:
        read(file)
    assert len(str(error.value)) < 500


def test_unread_keys_may_hold_anything() -> None:
    more = changed(
        QWEN, time_step_limit=[0.0, float("inf")], rope_parameters=None, quantization_config={"x": [1]}
    )
    assert from_config(more, "m") == from_config(QWEN, "m")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [p for key, inner in items for p in [(*path, key), *_places(inner, (*path, key))]]


@settings(max_examples=600, deadline=None)
@given(data=st.data())
def test_a_mutated_config_is_read_or_refused_by_a_config_error(data: st.DataObject) -> None:
    config = copy.deepcopy(data.draw(st.sampled_from(EVERY)))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from(_places(config) or [()]))
        if not place:
            break
        holder: Any = config
        for key in place[:-1]:
            holder = holder[key]
        if data.draw(st.booleans()):
            holder[place[-1]] = data.draw(JSON | st.sampled_from([0, -1, 1, 2**70, "auto", float("nan")]))
        else:
            del holder[place[-1]]
    try:
        m = from_config(config, "m")
    except ConfigError as error:
        refusal = str(error)
    else:
        refusal = ""
        assert 0 < m.geometry.num_layers <= m.num_layers
    assert len(refusal) < 700


@settings(max_examples=200, deadline=None)
@given(JSON)
def test_random_json_is_refused_by_a_config_error(value: Any) -> None:
    with pytest.raises(ConfigError):
        from_config(value, "m")


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("qwen3.5-4b", "qwen3.5-4b"),
        ("Qwen/Qwen3.5-4B", "qwen3.5-4b"),
        ("QWEN/qwen3.5-122b-A10B", "qwen3.5-122b-a10b"),
        ("Qwen/Qwen3.8-27B", "qwen3.5-27b"),
        ("moonshotai/Kimi-Linear-48B-A3B-Instruct", "kimi-linear-48b-a3b"),
        ("Kimi-Linear-48B-A3B-Instruct", "kimi-linear-48b-a3b"),
        ("nvidia/Nemotron-H-8B-Base-8K", "nemotron-h-8b"),
    ],
)
def test_a_preset_is_found_by_name_and_by_hub_id(name: str, preset: str) -> None:
    assert find(name) is PRESETS[preset]
    assert load(name) is PRESETS[preset]


def test_an_unknown_name_is_told_that_nothing_is_downloaded() -> None:
    assert find("Qwen/Qwen3.5-5B") is None
    for name in ("Qwen/Qwen3.5-5B", "qwen3.5-122b", "no-such-thing", "\0", "", "x" * 10_000):
        with pytest.raises(ConfigError, match="Nothing is downloaded") as error:
            load(name)
        assert all(preset in str(error.value) for preset in PRESETS)
        assert len(str(error.value)) < 600
    with pytest.raises(ConfigError, match=r"Did you mean qwen3\.5-122b-a10b\?"):
        load("qwen3.5-122b")


def test_a_path_is_read_where_no_preset_has_that_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(GRANITE))
    assert load(str(file)) == read(file)
    assert read(file).name == "mine"


def _language_model_parameters(config: dict[str, Any]) -> int:
    """Embeddings, attention with its output gate, GDN and MLPs, counted tensor by tensor; norms and biases left out."""
    c = config.get("text_config", config)
    d, layers = c["hidden_size"], c["num_hidden_layers"]
    full = layers // 4
    heads, kv, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    attention = d * dim * (2 * heads + 2 * kv + heads)
    keys, values = 16 * 128, c["linear_num_value_heads"] * 128
    gdn = d * (2 * keys + values + values + values + 2 * c["linear_num_value_heads"])
    if "num_experts" in c:
        one = 3 * d * c["moe_intermediate_size"]
        mlp = c["num_experts"] * (one + d) + 3 * d * c["shared_expert_intermediate_size"]
    else:
        mlp = 3 * d * c["intermediate_size"]
    embeddings = c["vocab_size"] * d * (1 if c["tie_word_embeddings"] else 2)
    return int(embeddings + full * attention + (layers - full) * gdn + layers * mlp)


@pytest.mark.parametrize("name", [name for name in BY_NAME if name.startswith("qwen")])
def test_the_weights_of_a_qwen_preset_are_its_parameters_in_bf16(name: str) -> None:
    gib = _language_model_parameters(BY_NAME[name]) * 2 / 2**30
    assert PRESETS[name].weights_gib == pytest.approx(gib, rel=0.01)
