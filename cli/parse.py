"""From typed options to the combinations that they ask for. Raises UsageError, or a ValueError of what cannot be."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import isfinite, prod
from typing import Any, TypeVar

from ssmspec import acceptance, presets
from ssmspec.acceptance import DEFAULT_RATE
from ssmspec.geometry import MAX_RING, READ_DTYPES, RECORD_DTYPES, DType, Mode, Window
from ssmspec.layout import POLICY_NAMES
from ssmspec.measure.capacity import Settings
from ssmspec.measure.planner import CacheMode
from ssmspec.measure.sweep import Case, Part, life_of
from ssmspec.model import Model

from . import weights
from .errors import UsageError, about, close
from .names import SHORT, typed
from .options import Options, flag

MAX_ROWS, MAX_LIVES = 2000, 50
MAX_WINDOW = MAX_RING // 2
STATES = typed(DType.FP32, DType.BF16, DType.FP16, DType.NVFP4)
KV = typed(DType.BF16, DType.FP16, DType.FP32, DType.FP8)
NO_COPY: dict[str, DType | None] = {"none": None}
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is compared with what."""

    options: Options  # with the defaults filled in that were taken
    model: Model
    cases: tuple[Case, ...]
    policies: tuple[str, ...]
    modes: tuple[Mode, ...]


def study(o: Options, parts: Collection[Part]) -> Study:
    """Every combination, checked for size before anything is computed."""
    with about(flag("model"), o.model):
        model = weights.weighed(presets.load(o.model))
    o = _filled(o, model, Part.EXACT in parts)
    policies = sorted(
        choices("policy", o.policy, {name: name for name in POLICY_NAMES}), key=POLICY_NAMES.index
    )
    modes = choices("mode", o.mode, {str(mode): mode for mode in Mode})
    axes = _axes(o)
    count, rows = prod(map(len, axes.values())), len(policies) * len(modes)
    if count * rows > MAX_ROWS:
        raise UsageError(
            f"{count:,} combinations of {rows} rows are {count * rows:,}, and {MAX_ROWS:,} is the limit: sweep less"
        )
    cases = [_case(o, model, dict(zip(axes, values, strict=True))) for values in product(*axes.values())]
    lives = len({life_of(case) for case in cases})
    if Part.EXACT in parts and lives > MAX_LIVES:
        raise UsageError(
            f"{lives} lives would be played, some seconds each, and {MAX_LIVES} is the limit: sweep less, or use"
            " `compare traffic` and `compare capacity`, which play none"
        )
    return Study(options=o, model=model, cases=tuple(cases), policies=tuple(policies), modes=tuple(modes))


def _filled(o: Options, model: Model, played: bool) -> Options:
    """The defaults that depend on the command: a played comparison shows where formats and modes make a difference."""
    if o.draft is not None and o.window is not None:
        raise UsageError("--draft and --window say the same, T = K + 1: give one of them")
    own = model.geometry.state_dtype
    states = (own, DType.BF16) if played and own is DType.FP32 else (own,)
    taken: dict[str, Any] = {
        "draft": None if o.window is not None else "3",
        "policy": ",".join(POLICY_NAMES),
        "mode": ",".join(Mode) if played else Mode.EXACT.value,
        "state_dtype": ",".join(SHORT[dtype] for dtype in states),
        "acceptance": str(DEFAULT_RATE),
    }
    o = replace(o, **{name: value for name, value in taken.items() if getattr(o, name) is None})
    if o.stochastic_rounding and not set(choices("state_dtype", o.state_dtype, STATES)) <= {
        DType.FP16,
        DType.BF16,
    }:
        raise UsageError(
            f"--stochastic-rounding rounds to 16 bits, and --state-dtype is {o.state_dtype}: give fp16, bf16 or both"
        )
    return o


def _axes(o: Options) -> dict[str, Sequence[Any]]:
    if o.draft is not None:
        windows = [k + 1 for k in _numbers("draft", o.draft, 0, MAX_WINDOW - 1)]
    else:
        windows = _numbers("window", o.window, 1, MAX_WINDOW)
    return {
        "window": windows,
        "ring": [None] if o.ring is None else _numbers("ring", o.ring, 1, MAX_RING),
        "state": choices("state_dtype", o.state_dtype, STATES),
        "record": choices("record_dtype", o.record_dtype, typed(*RECORD_DTYPES)),
        "read": choices("read_copy", o.read_copy, NO_COPY | typed(*READ_DTYPES)),
        "batch": _numbers("batch", o.batch, 1),
        "context": _numbers("context", o.context, 1),
        "kv": choices("kv_dtype", o.kv_dtype, KV),
        "cache": choices("cache_mode", o.cache_mode, {str(mode): mode for mode in CacheMode}),
        "tp": _numbers("tp", o.tp, 1),
    }


def _case(o: Options, model: Model, c: Mapping[str, Any]) -> Case:
    formats = {"state_dtype": c["state"], "record_dtype": c["record"], "read_dtype": c["read"]}
    geometry = replace(model.geometry, **formats, stochastic=o.stochastic_rounding)
    assert o.acceptance is not None
    with about(flag("acceptance"), o.acceptance):
        process = acceptance.parse(o.acceptance, c["window"] - 1)
    return Case(
        model=replace(model, geometry=geometry),
        window=Window(max_len=c["window"], ring_len=c["ring"]),
        acceptance=process,
        settings=Settings(
            gpu_memory_gib=_finite(o, "gpu_memory"),
            gpu_utilization=_finite(o, "gpu_utilization"),
            weights_gib=None if o.weights_gib is None else _finite(o, "weights_gib"),
            max_num_seqs=o.max_num_seqs,
            context=c["context"],
            kv_dtype=c["kv"],
            cache_mode=c["cache"],
            tp=c["tp"],
        ),
        batch=c["batch"],
        ring_asked=c["ring"] is not None,
    )


def _words(name: str, text: str | None) -> list[str]:
    """The items of a comma list, each once."""
    assert text is not None
    words = [word.strip().lower() for word in text.split(",")]
    if not all(words):
        raise UsageError(f"{flag(name)} {text!r} has an empty item")
    return list(dict.fromkeys(words))


def choices(name: str, text: str | None, legal: Mapping[str, T]) -> list[T]:
    """What the items of a comma list stand for, each once. Raises UsageError for one that stands for nothing."""
    found: list[T] = []
    for word in _words(name, text):
        if word not in legal:
            names: dict[T, str] = {}
            for typed_name, value in legal.items():
                names.setdefault(value, typed_name)
            listed, guess = ", ".join(names.values()), close(word, names.values())
            raise UsageError(f"{flag(name)} {word!r:.80} is not one of {listed}{guess and '.' + guess}")
        if legal[word] not in found:
            found.append(legal[word])
    return found


def _numbers(name: str, text: str | None, least: int, most: int | None = None) -> list[int]:
    found = []
    for word in _words(name, text):
        try:
            value = int(word)
        except ValueError:
            raise UsageError(f"{flag(name)} {word!r:.80} is not a whole number") from None
        if value < least or (most is not None and value > most):
            legal = f"at least {least}" if most is None else f"within {least}..{most}"
            nearest = least if value < least else most
            raise UsageError(f"{flag(name)} {value} is not {legal}; the nearest legal value is {nearest}")
        found.append(value)
    return list(dict.fromkeys(found))


def _finite(o: Options, name: str) -> float:
    value: float = getattr(o, name)
    if not isfinite(value):
        raise UsageError(f"{flag(name)} {value} is not a finite number")
    return value
