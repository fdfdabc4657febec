"""Which layers of a hybrid model are recurrent: the spellings that config.json has for it, each read into one string.

One letter a layer: M recurrent, * attention, - neither (Nemotron-H's letters), H both.
"""

from ssmspec.checked import ConfigError, Section, show

MAX_LAYERS = 10_000

_PATTERN = {"M": "M", "*": "*", "-": "-", "E": "-"}
_NAMES = {
    "linear_attention": "M",
    "mamba": "M",
    "full_attention": "*",
    "attention": "*",
    "deepseek_sparse_attention": "*",
    "qwen_sparse_attention": "*",
    "hybrid_indexed": "*",
    "mlp": "-",
    "moe": "-",
}


def pattern(key: str, letters: str) -> str:
    """A pattern such as Nemotron-H's "M-M*E" as layers. Raises ConfigError at an unknown letter."""
    for position, letter in enumerate(letters):
        if letter not in _PATTERN:
            raise ConfigError(f"{key} has {letter!r} at position {position}; known are {' '.join(_PATTERN)}")
    return "".join(_PATTERN[letter] for letter in letters)


def named(key: str, names: list[str]) -> str:
    """A list such as layer_types as layers. Raises ConfigError at an unknown name."""
    for position, name in enumerate(names):
        if name not in _NAMES:
            raise ConfigError(f"{key}[{position}]={show(name)} is unknown; known are {', '.join(_NAMES)}")
    return "".join(_NAMES[name] for name in names)


def num_layers(text: Section, default: int | None = None) -> int:
    return text.integer("num_hidden_layers", most=MAX_LAYERS, default=default)


def _of_length(key: str, layers: str, text: Section) -> str:
    expected = num_layers(text, default=len(layers))
    if len(layers) != expected:
        raise ConfigError(f"{key} describes {len(layers)} layers, but num_hidden_layers={expected}")
    if len(layers) > MAX_LAYERS:
        raise ConfigError(f"{key} describes {len(layers)} layers; the limit is {MAX_LAYERS}")
    return layers


def _listed(text: Section, *keys: str) -> str | None:
    key, names = text.array(*keys, of=str)
    return None if names is None else _of_length(key, named(key, names), text)


def indices(section: Section, key: str, first: int, last: int) -> set[int] | None:
    """Layer numbers within first..last; None where the key is absent. Raises ConfigError for any other."""
    path, values = section.array(key, of=int)
    for value in values or ():
        if not first <= value <= last:
            raise ConfigError(f"{path} names layer {show(value)}; layers go from {first} to {last}")
    return None if values is None else set(values)


def _neither(text: Section, key: str, other: str) -> ConfigError:
    return ConfigError(f"'{text.path}{key}' is missing, and so is '{text.path}{other}'")


def qwen(text: Section) -> str:
    """layer_types, or an attention layer every full_attention_interval; where both are there they must agree."""
    layers = _listed(text, "layer_types")
    interval = text.integer("full_attention_interval", most=MAX_LAYERS, default=0)
    if not interval:
        if layers is None:
            raise _neither(text, "layer_types", "full_attention_interval")
        return layers
    number = num_layers(text, default=None if layers is None else len(layers))
    regular = "".join("M" if i % interval else "*" for i in range(1, number + 1))
    if layers is not None and layers != regular:
        first = next(i for i, (a, b) in enumerate(zip(layers, regular, strict=True)) if a != b)
        raise ConfigError(
            f"{text.path}layer_types disagrees with full_attention_interval={interval} at layer {first}"
        )
    return regular


def kimi(text: Section) -> str:
    """linear_attn_config names the layers by number, from 1: kda_layers, and full_attn_layers for the rest."""
    linear, last = text.section("linear_attn_config"), num_layers(text)
    kda = indices(linear, "kda_layers", 1, last)
    full = indices(linear, "full_attn_layers", 1, last)
    if kda is None:
        raise ConfigError(f"'{linear.path}kda_layers' is missing")
    for layer in range(1, last + 1):
        if full is not None and (layer in kda) == (layer in full):
            where = "both" if layer in kda else "neither"
            raise ConfigError(f"layer {layer} is in {where} of {linear.path}kda_layers and full_attn_layers")
    return "".join("M" if layer in kda else "*" for layer in range(1, last + 1))


def nemotron(text: Section) -> str:
    """hybrid_override_pattern, or layers_block_type, its successor."""
    key, letters = text.string("hybrid_override_pattern")
    if letters is not None:
        return _of_length(key, pattern(key, letters), text)
    layers = _listed(text, "layers_block_type", "layer_types")
    if layers is None:
        raise _neither(text, "hybrid_override_pattern", "layers_block_type")
    return layers


def granite(text: Section) -> str:
    """Granite lists its layers; Bamba lists the attention layers alone, by number from 0, null for none."""
    layers = _listed(text, "layer_types", "layers_block_type")
    if layers is not None:
        return layers
    if not {"layer_types", "attn_layer_indices"} & text.values.keys():
        raise _neither(text, "layer_types", "attn_layer_indices")
    number = num_layers(text)
    attention = indices(text, "attn_layer_indices", 0, number - 1) or set()
    return "".join("*" if layer in attention else "M" for layer in range(number))


def falcon(text: Section) -> str:
    """Every layer is both."""
    return "H" * num_layers(text)
