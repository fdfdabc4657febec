"""What the user asked for, from the flags, `additional_config` and the environment, as one frozen value."""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ssmspec.geometry import Mode, Window
from ssmspec.layout import POLICY_NAMES

KEY = "ssmspec"  # of vLLM's additional_config
FLAGS = {"policy": "--ssm-policy", "mode": "--ssm-mode"}
ENVIRONMENT = "SSMSPEC_"  # + the key in capitals
BACKENDS = ("engine", "torch", "triton")
BEST = {"cpu": "torch", "cuda": "triton"}  # backend "engine", by device

Values = Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """One policy for every recurrent layer of a server."""

    policy: str = "native"
    mode: Mode = Mode.EXACT
    ring_len: int | None = None  # checkpointing only; None: Window's default
    backend: str = (
        "engine"  # "engine": the best that serves; with native, vLLM's own code and nothing of ours
    )

    @property
    def stock(self) -> bool:
        """Whether vLLM is to be left as it is."""
        return self.policy == "native" and self.backend == "engine"

    def window(self, num_drafts: int, align: int = 0) -> Window:
        """The speculative window that this asks for. Raises ValueError where it cannot be."""
        return Window(max_len=1 + num_drafts, ring_len=self.ring_len, align=align, mode=self.mode)

    def kernels(self, device_type: str) -> str:
        """The name, in ssmspec.kernels, of the backend that runs on the device."""
        return BEST[device_type] if self.backend == "engine" else self.backend

    def to_dict(self) -> dict[str, Any]:
        """What travels in additional_config, and so into every worker and the compile hash."""
        return {k: v for k, v in asdict(self).items() if v is not None}


_LEGAL: dict[str, tuple[str, ...]] = {
    "policy": POLICY_NAMES,
    "mode": tuple(Mode),
    "backend": BACKENDS,
}
KEYS = tuple(f.name for f in fields(ServeConfig))


def _nearest(value: str, legal: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(value, legal, n=1, cutoff=0.0)
    return close[0] if close else legal[0]


def _parsed(key: str, value: object, name: str) -> object:
    """The value of one key as the config holds it. Raises ValueError that names the source and the nearest legal."""
    if key == "ring_len":
        number = int(value) if isinstance(value, str) and value.lstrip("-").isdigit() else value
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(f"{name}={value!r} is not a positive number; the nearest legal value is 16")
        return number
    legal = _LEGAL[key]
    if value not in legal:
        raise ValueError(
            f"{name}={value!r} is not one of {', '.join(legal)};"
            f" the nearest legal value is {_nearest(str(value), legal)}"
        )
    return Mode(str(value)) if key == "mode" else str(value)


def _from_flags(flags: Values) -> Iterator[tuple[str, str, object]]:
    for key, value in flags.items():
        if value is not None:
            yield key, FLAGS[key], value


def _from_additional(additional: Values) -> Iterator[tuple[str, str, object]]:
    section = additional.get(KEY, {})
    if not isinstance(section, Mapping):
        raise ValueError(
            f'additional_config["{KEY}"]={section!r} is not an object such as {{"policy": "recover"}}'
        )
    for key, value in section.items():
        if key not in KEYS:
            raise ValueError(
                f'additional_config["{KEY}"] has no key {key!r}; the nearest legal key is {_nearest(str(key), KEYS)!r}'
            )
        yield key, f'additional_config["{KEY}"]["{key}"]', value


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[str, str, object]]:
    legal = {ENVIRONMENT + key.upper(): key for key in KEYS}
    for name, value in environ.items():
        if name in legal:
            yield legal[name], name, value
        elif name.startswith(ENVIRONMENT):
            raise ValueError(
                f"the environment variable {name} is not known; the nearest legal name is {_nearest(name, tuple(legal))}"
            )


def resolve(flags: Values, additional: Values, environ: Mapping[str, str]) -> ServeConfig:
    """Bring the three sources together; they may repeat, but not contradict, each other.

    Raises ValueError naming both sources of a contradiction, and for unknown keys and values the nearest legal one.
    """
    found: dict[str, tuple[str, object]] = {}
    for key, name, raw in (
        *_from_flags(flags),
        *_from_additional(additional),
        *_from_environment(environ),
    ):
        value = _parsed(key, raw, name)
        other, before = found.setdefault(key, (name, value))
        if before != value:
            raise ValueError(f"{other}={before} and {name}={value} contradict each other; set one of them")
    config = ServeConfig(**{key: value for key, (_, value) in found.items()})  # type: ignore[arg-type]
    if config.ring_len is not None and config.policy != "checkpointing":
        raise ValueError(
            f"{found['ring_len'][0]}={config.ring_len} is for the policy checkpointing, not for {config.policy};"
            " leave it out"
        )
    if config.mode is Mode.FAST and config.policy == "native":
        raise ValueError(
            f"{found['mode'][0]}=fast is for a policy, not for native; choose one with {FLAGS['policy']}, or leave it out"
        )
    return config
