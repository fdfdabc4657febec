"""A config.json that is wrong gets one sentence that names the key, and nothing but a ConfigError."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from configs import (
    BAMBA,
    EVERY,
    GRANITE,
    KIMI,
    NEMOTRON,
    QWEN,
    changed,
    complaint,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from ssmspec.checked import ConfigError
from ssmspec.huggingface import MAX_BYTES, from_config, read


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
