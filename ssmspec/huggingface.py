"""Reads a Hugging Face config.json. The file comes from outside: whatever is wrong with it is one ConfigError."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from ssmspec import families, layer_lists
from ssmspec.checked import ConfigError, Section, show
from ssmspec.families import Family
from ssmspec.geometry import ACT_DTYPES, STATE_DTYPES, Conv, DType
from ssmspec.model import Attention, Model

MAX_BYTES = 4 * 2**20  # of a file; published ones stay below 200 KiB
MAX_CONTEXT = 2**40


def read(path: str | Path) -> Model:
    """The model that a config.json, or the folder that holds one, describes. Raises ConfigError, and nothing else."""
    try:
        file = Path(path)
        file = file / "config.json" if file.is_dir() else file
        if not file.is_file():
            raise ConfigError(f"{file}: {'not a regular file' if file.exists() else 'there is no such file'}")
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ConfigError(f"{file}: larger than {MAX_BYTES} bytes, the limit for a config.json")
        config = json.loads(data)
        name = file.resolve().parent.name if file.name == "config.json" else file.stem
    except ConfigError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        what = "cannot be read" if isinstance(error, OSError) else "is not JSON"
        raise ConfigError(f"{path}: {what}: {error}") from None
    return replace(from_config(config, name), source=str(file))


def from_config(config: dict[str, Any], name: str) -> Model:
    """The model that a parsed config.json describes; a nested text_config is found. Raises ConfigError only.

    Defaults of absent dtypes and draft layers are those of vLLM 0.33.0 (model_executor/models/config.py,
    layers/mamba/mamba_utils.py, models/qwen3_next_mtp.py); each one taken adds a sentence to ``notes``.
    """
    try:
        if not isinstance(config, dict):
            raise ConfigError(f"a JSON object is needed, not {show(config)}")
        return _model(Section(config), name)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None


def _model(outer: Section, name: str) -> Model:
    nested = outer.find("text_config", "llm_config")[1] is not None
    text = outer.section("text_config", "llm_config") if nested else outer
    family = families.find(text, outer)
    layers = family.layers(text)
    num_recurrent = layers.count("M") + layers.count("H")
    if not num_recurrent:
        raise ConfigError(f"no recurrent layer among {len(layers)}: looked for {family.looked_for}")
    act, state, notes = _dtypes(family, text, outer)
    drafts = family.drafts(text)
    if drafts is None:
        drafts = family.default_drafts
        if drafts:
            notes.append(f"'mtp_num_hidden_layers' is absent: {drafts} draft layer, as vLLM 0.33.0 takes")
    if text.find("indexer_n_heads")[1] is not None:
        notes.append("the keys of the sparse attention's indexer are not counted")
    ple_layers = layer_lists.indices(text, "ple_layer_ids", 1, len(layers)) or ()
    return Model(
        name=name,
        geometry=replace(family.recurrence(text, num_recurrent), act_dtype=act, state_dtype=state),
        attention=_attention(text, family, layers.count("*") + layers.count("H"), drafts),
        num_layers=len(layers),
        hidden_size=text.integer("hidden_size"),
        ple=_ple(text) if ple_layers else None,
        num_ple_layers=len(ple_layers),
        max_context=text.integer("max_position_embeddings", "model_max_length", most=MAX_CONTEXT, default=0)
        or None,
        notes=tuple(notes),
    )


def _dtypes(family: Family, text: Section, outer: Section) -> tuple[DType, DType, list[str]]:
    """Of activations and of the state, with a note for each one that the config leaves open."""
    notes = []
    act = _dtype((text, outer), ("dtype", "torch_dtype"), ACT_DTYPES)
    if act is None:
        act = DType.BF16
        notes.append(f"'dtype' is absent: activations in {act}")
    state = _dtype((text, outer), ("mamba_ssm_dtype", "mamba_ssm_cache_dtype"), STATE_DTYPES[:3])
    if state is None:
        state = family.state or act
        whose = "" if family.state else "the model's own dtype, "
        notes.append(f"'mamba_ssm_dtype' is absent: state in {state}, {whose}as vLLM 0.33.0 takes")
    return act, state, notes


def _dtype(sections: tuple[Section, ...], keys: tuple[str, ...], legal: tuple[DType, ...]) -> DType | None:
    """The one dtype that these keys name, None where none does or says "auto".

    Two that disagree are an error: every size of the state or of the KV cache hangs on it.
    """
    found: dict[str, str] = {}
    for section in sections:
        for key in keys:
            path, value = section.string(key)
            if value is not None and value != "auto":
                found[path] = value.removeprefix("torch.")
    for path, value in found.items():
        if value not in legal:
            raise ConfigError(f"{path}={show(value)} is not one of {', '.join(legal)}")
    if len(set(found.values())) > 1:
        raise ConfigError(" and ".join(f"{path}={value}" for path, value in found.items()) + " disagree")
    return DType(next(iter(found.values()))) if found else None


def _attention(text: Section, family: Family, num_layers: int, draft_layers: int) -> Attention:
    rank = text.integer("kv_lora_rank", default=0)
    if rank:
        latent = rank + text.integer("qk_rope_head_dim", least=0)
        return Attention(
            num_layers=num_layers, num_kv_heads=1, head_dim=latent, latent=latent, draft_layers=draft_layers
        )
    heads, hidden = text.integer("num_attention_heads"), text.integer("hidden_size")
    shared = None if family.needs_head_dim or hidden % heads else hidden // heads
    return Attention(
        num_layers=num_layers,
        num_kv_heads=text.integer(
            "num_key_value_heads", default=heads if "num_key_value_heads" in text.values else None
        ),
        head_dim=text.integer("head_dim", "attention_head_dim", default=shared),
        draft_layers=draft_layers,
    )


def _ple(text: Section) -> Conv:
    """The conv over hc_count streams of hidden_size (vllm/models/qwen4_exp/nvidia/model.py)."""
    channels = text.integer("hc_count") * text.integer("hidden_size")
    return Conv(
        channels=channels, width=text.integer("ple_conv_kernel_size"), dilation=text.integer("ngram_size")
    )
