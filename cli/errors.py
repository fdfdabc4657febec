"""From a complaint about a value to a sentence about the flag that set it."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

from ssmspec.checked import ConfigError

FLAGS = {
    "max_len": "T",
    "num_k_heads": "H",
    "num_v_heads": "HV",
    "head_k": "K",
    "head_v": "V",
    "ring_len": "--ring",
    "state_dtype": "--state-dtype",
    "record_dtype": "--record-dtype",
    "read_dtype": "--read-copy",
    "kv_dtype": "--kv-dtype",
    "cache_mode": "--cache-mode",
    "gpu_memory_gib": "--gpu-memory",
    "gpu_utilization": "--gpu-utilization",
    "weights_gib": "--weights-gib",
    "max_num_seqs": "--max-num-seqs",
    "context": "--context",
    "tp": "--tp",
    "policy": "--policy",
    "backend": "--backend",
    "device": "--device",
    "jobs": "--jobs",
    "seed": "--seed",
}
"""Fields that a flag sets, by the name they have in ValueErrors. A window's T is --draft plus one."""

_FIELD = re.compile(rf"\b({'|'.join(FLAGS)})(?==)|\b({'|'.join(n for n in FLAGS if '_' in n)})\b")


class UsageError(ValueError):
    """What the user asked for cannot be: one sentence, with the flag in it."""


def sentence(error: Exception) -> str:
    """The message with flags for field names; a sentence about a file or a flag is one already."""
    text = " ".join(str(error).split())
    if isinstance(error, ConfigError | UsageError):
        return text
    return _FIELD.sub(lambda match: FLAGS[match[0]], text)


@contextmanager
def about(flag: str, value: str) -> Iterator[None]:
    """Any complaint inside is about this flag."""
    try:
        yield
    except ValueError as error:
        text = sentence(error)
        raise UsageError(f"{flag}: {text}" if value in text else f"{flag} {value}: {text}") from None


def close(word: str, among: Iterable[str]) -> str:
    """A guess at what was meant, or nothing; fp64 is nobody's fp16."""
    found = get_close_matches(word, list(among), 1) if len(word) > 4 else []
    return f" Did you mean {found[0]}?" if found else ""
