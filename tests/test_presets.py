"""The presets are what the published files say, are found by name and Hub id, and nothing is downloaded."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from configs import BY_NAME, GRANITE, PUBLISHED

from ssmspec.checked import ConfigError
from ssmspec.geometry import Arch, Conv
from ssmspec.huggingface import read
from ssmspec.presets import PRESETS, find, load


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
