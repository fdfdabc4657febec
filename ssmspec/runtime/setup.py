"""What a script is played on: the first line of a script file, and what a soak writes there."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import StrEnum
from typing import Any

from ssmspec import layout, presets
from ssmspec.checked import show
from ssmspec.geometry import (
    ACT_DTYPES,
    READ_DTYPES,
    RECORD_DTYPES,
    STATE_DTYPES,
    Arch,
    Conv,
    DType,
    Geometry,
    Mode,
    Window,
)
from ssmspec.runtime.events import ScriptError

USER_STATE_DTYPES = tuple(dtype for dtype in STATE_DTYPES if dtype is not DType.FP64)
MAX_POOL_BYTES = 2**28  # of one policy: a setup is read from outside


class Device(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"

    @classmethod
    def of(cls, backend: str) -> "Device":
        """Where a backend computes if nobody says otherwise."""
        return cls.CUDA if backend == "triton" and os.environ.get("TRITON_INTERPRET") != "1" else cls.CPU


def reduced(g: Geometry) -> Geometry:
    """Two layers, a group of heads and 16 rows of a geometry: layers, heads and rows of S do not mix."""
    h, v = 1 if g.group > 1 else min(2, g.num_k_heads), min(16, g.head_v)
    hv = h * min(g.group, 2)
    conv = replace(g.conv, channels=2 * h * g.head_k + hv * v)
    return replace(g, num_layers=2, num_k_heads=h, num_v_heads=hv, head_v=v, conv=conv)


_SMALL = Geometry(
    arch=Arch.GDN,
    num_layers=2,
    num_k_heads=1,
    num_v_heads=2,
    head_k=16,
    head_v=8,
    conv=Conv(channels=2 * 16 + 2 * 8),
)
_WINDOW = Window(max_len=4)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A made-up model, its window, and the engine around it."""

    geometry: Geometry = _SMALL
    window: Window = _WINDOW
    slots: int = 32
    seed: int = 0
    backend: str = "torch"
    device: Device = Device.CPU
    poison: int | None = None  # a byte that unused memory is filled with

    def dump(self) -> str:
        """The line from which ``load`` makes this setup again. A conv's channels follow from the heads."""
        parts = {"shape": self.geometry, "conv": self.geometry.conv, "window": self.window, "engine": self}
        found = {name: getattr(parts[k.part], k.field or name) for name, k in KEYS.items() if k.part in parts}
        return json.dumps(found)


@dataclass(frozen=True, kw_only=True)
class Key:
    """A key of a setup line: which part of a setup it belongs to, and what is legal."""

    part: str  # model, shape, conv, window or engine
    kind: type[Any] = str
    legal: tuple[StrEnum, ...] = ()  # empty: any of that kind
    field: str = ""  # of that part; empty: called like the key
    least: int = 1
    most: int = 4096
    optional: bool = False  # null is legal


KEYS = {
    "model": Key(part="model"),  # a preset, whose layer is played in a reduced shape
    "arch": Key(part="shape", legal=tuple(Arch)),
    "layers": Key(part="shape", kind=int, field="num_layers", most=64),
    "key_heads": Key(part="shape", kind=int, field="num_k_heads"),
    "value_heads": Key(part="shape", kind=int, field="num_v_heads"),
    "head_k": Key(part="shape", kind=int),
    "head_v": Key(part="shape", kind=int),
    "act_dtype": Key(part="shape", legal=ACT_DTYPES),
    "state_dtype": Key(part="shape", legal=USER_STATE_DTYPES),
    "stochastic": Key(part="shape", kind=bool),
    "record_dtype": Key(part="shape", legal=RECORD_DTYPES),
    "read_dtype": Key(part="shape", legal=READ_DTYPES, optional=True),
    "gate_lower_bound": Key(part="shape", kind=float, optional=True),
    "dt_softplus": Key(part="shape", kind=bool),
    "conv_width": Key(part="conv", kind=int, field="width", most=64),
    "conv_dilation": Key(part="conv", kind=int, field="dilation", most=64),
    "window": Key(part="window", kind=int, field="max_len"),
    "ring": Key(part="window", kind=int, field="ring_len", optional=True),
    "align": Key(part="window", kind=int, least=0, most=2**20),
    "mode": Key(part="window", legal=tuple(Mode)),
    "slots": Key(part="engine", kind=int, least=2),
    "seed": Key(part="engine", kind=int, least=0, most=2**31 - 1),
    "backend": Key(part="engine"),
    "device": Key(part="engine", legal=tuple(Device)),
    "poison": Key(part="engine", kind=int, least=0, most=255, optional=True),
}
_FIXED_BY_MODEL = ("arch", "layers", "key_heads", "value_heads", "head_k", "head_v")


def load(data: Mapping[str, Any]) -> Setup:
    """A setup from a parsed line; absent keys keep their defaults. Raises ScriptError."""
    try:
        setup = _setup({name: _value(name, value) for name, value in data.items()})
        size = max(_pool_bytes(setup, policy) for policy in layout.POLICY_NAMES)
    except ValueError as error:
        raise ScriptError(f"setup: {_renamed(str(error))}") from None
    if size > MAX_POOL_BYTES:
        fit = MAX_POOL_BYTES * setup.slots // size
        nearest = f"the nearest legal value is {fit}" if fit > 1 else "no number of slots fits this shape"
        raise ScriptError(
            f"setup: slots={setup.slots} of this shape take {size / 2**20:,.0f} MiB, and"
            f" {MAX_POOL_BYTES // 2**20} MiB is the limit; {nearest}"
        )
    return setup


def _value(name: str, value: Any) -> Any:
    if name not in KEYS:
        close = get_close_matches(name, KEYS, 1)
        guess = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"unknown key {show(name)}; it takes {', '.join(KEYS)}{guess}")
    key = KEYS[name]
    if value is None and key.optional:
        return None
    if key.legal:
        if value not in key.legal:
            raise ValueError(f"{name}={show(value)} is not one of {', '.join(key.legal)}")
        return key.legal[key.legal.index(value)]
    if type(value) is not key.kind and not (key.kind is float and type(value) is int):
        named = {int: "a whole number", float: "a number", bool: "true or false", str: "a name"}
        raise ValueError(f"{name}={show(value)} is not {named[key.kind]}")
    if key.kind is int and not key.least <= value <= key.most:
        nearest = min(max(value, key.least), key.most)
        raise ValueError(
            f"{name}={show(value)} is outside {key.least}..{key.most}; the nearest legal value is {nearest}"
        )
    return value


def _setup(values: Mapping[str, Any]) -> Setup:
    def part(name: str) -> dict[str, Any]:
        return {KEYS[key].field or key: value for key, value in values.items() if KEYS[key].part == name}

    shape = part("shape")
    if "model" in values:
        fixed = [key for key in values if key in _FIXED_BY_MODEL or KEYS[key].part == "conv"]
        if fixed:
            raise ValueError(f"model={show(values['model'])} sets the shape: leave out {', '.join(fixed)}")
        g = replace(_preset(values["model"]), **shape)
    else:
        g = replace(_SMALL, **shape)
        channels = 2 * g.num_k_heads * g.head_k + g.num_v_heads * g.head_v
        g = replace(g, conv=Conv(channels=channels, **part("conv")))
    window = {"max_len": _WINDOW.max_len, **part("window")}
    return Setup(geometry=g, window=Window(**window), **part("engine"))


def _preset(name: str) -> Geometry:
    model = presets.find(name)
    if model is None:
        raise ValueError(f"model={show(name)} is no preset; presets are {', '.join(presets.PRESETS)}")
    return reduced(model.geometry)


def _pool_bytes(setup: Setup, policy: str) -> int:
    g = replace(setup.geometry, read_dtype=None) if policy == "native" else setup.geometry
    slot = (*layout.of(policy, g, setup.window), layout.conv(g.conv, setup.window.max_len, g.act_dtype))
    return setup.slots * sum(f.nbytes if f.shared else g.num_layers * f.nbytes for f in slot)


def _renamed(message: str) -> str:
    """A complaint about a field, as one about the key that sets it."""
    for name, key in KEYS.items():
        if key.field:
            message = message.replace(f"{key.field}=", f"{name}=")
    return message
