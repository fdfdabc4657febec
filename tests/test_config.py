"""A published config.json is read right, whatever the family's key names."""

import json
from pathlib import Path
from typing import Any

import pytest
from configs import BAMBA, BY_NAME, FALCON, FLASH_NEXT, GRANITE, KIMI_K3, QWEN, changed, complaint

from ssmspec.checked import ConfigError
from ssmspec.geometry import Conv, DType
from ssmspec.huggingface import from_config, read
from ssmspec.presets import DEFAULT, PRESETS


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


def test_a_folder_is_read_and_gives_the_model_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"config\.json: there is no such file"):
        read(folder)
    (folder / "config.json").write_text(json.dumps(QWEN))
    m = read(folder)
    assert (m.name, m.source) == ("my-model", str(folder / "config.json"))
    assert m.geometry == PRESETS[DEFAULT].geometry


def test_unread_keys_may_hold_anything() -> None:
    more = changed(
        QWEN, time_step_limit=[0.0, float("inf")], rope_parameters=None, quantization_config={"x": [1]}
    )
    assert from_config(more, "m") == from_config(QWEN, "m")
