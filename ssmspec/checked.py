"""Values out of a JSON object from outside, each checked as it is taken. Every complaint is a ConfigError that names the key."""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
MAX_SIZE = 2**20  # of any head count or dimension; the largest published is 2**18


class ConfigError(ValueError):
    """What is wrong with a model's configuration, in one sentence."""


def show(value: object) -> str:
    """The value as text, shortened: a file may hold megabytes under one key."""
    return reprlib.repr(value)


@dataclass(frozen=True)
class Section:
    """One JSON object. A null counts as absent, as it does for Hugging Face's own config classes."""

    values: Mapping[str, Any]
    path: str = ""  # "text_config." in front of the keys of that object

    def find(self, *keys: str) -> tuple[str, Any]:
        """The first of several spellings that has a value, and that value; else the first spelling and None."""
        key = next((k for k in keys if self.values.get(k) is not None), keys[0])
        return self.path + key, self.values.get(key)

    def _typed(self, kind: type[T], named: str, keys: tuple[str, ...]) -> tuple[str, T | None]:
        key, value = self.find(*keys)
        if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise ConfigError(f"{key}={show(value)} is not {named}")
        return key, value

    def integer(self, *keys: str, least: int = 1, most: int = MAX_SIZE, default: int | None = None) -> int:
        """A whole number within least..most. Raises ConfigError where it is not, or is missing without a default."""
        key, value = self._typed(int, "an integer", keys)
        if value is None:
            if default is None:
                raise ConfigError(f"'{key}' is missing")
            return default
        if not least <= value <= most:
            nearest = min(max(value, least), most)
            raise ConfigError(
                f"{key}={show(value)} is not within {least}..{most}; the nearest legal value is {nearest}"
            )
        return value

    def string(self, *keys: str) -> tuple[str, str | None]:
        return self._typed(str, "a string", keys)

    def array(self, *keys: str, of: type[T]) -> tuple[str, list[T] | None]:
        """A list whose items are all of one type, with the key it was found under."""
        key, values = self._typed(list, "a list", keys)
        for position, value in enumerate(values or ()):
            if not isinstance(value, of) or isinstance(value, bool):
                raise ConfigError(f"{key}[{position}]={show(value)} is not of type {of.__name__}")
        return key, values

    def section(self, *keys: str) -> "Section":
        """The object under the key. Raises ConfigError where it is missing."""
        key, values = self._typed(dict, "a JSON object", keys)
        if values is None:
            raise ConfigError(f"'{key}' is missing")
        return Section(values, key + ".")
