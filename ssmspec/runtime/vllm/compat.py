"""The one way to vLLM's internals, and the check that they are those that this was written for."""

import ast
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ssmspec.runtime.vllm.internals import DEVICES, FINGERPRINTS, NAMES


def resolve(name: str) -> Any:
    """The object behind a name of NAMES. Raises RuntimeError where this vLLM does not have it."""
    module, attribute = NAMES[name].split(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(f"this vLLM has no {module}.{attribute}, which ssmspec needs") from error


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return resolve(name)


@contextmanager
def layer_replaced(name: str, layer: type[Any]) -> Iterator[None]:
    """Inside, vLLM builds ``layer`` wherever it would build its pluggable layer ``name``."""
    registered = resolve("op_registry_oot")
    if name in registered:
        raise RuntimeError(f"another plugin has replaced vLLM's {name} by {registered[name]}")
    resolve("PluggableLayer").register_oot(name=name)(layer)
    try:
        yield
    finally:
        del registered[name]


@contextmanager
def metadata_replaced(context: Any, prefix: str, metadata: object) -> Iterator[None]:
    """Inside, the layer ``prefix`` finds ``metadata`` in the forward context."""
    everything = context.attn_metadata
    context.attn_metadata = {**everything, prefix: metadata}
    try:
        yield
    finally:
        context.attn_metadata = everything


def version() -> str:
    """Version of the installed vLLM."""
    return str(importlib.import_module("vllm").__version__)


def source_root() -> Path:
    """The folder of the installed vllm package. Raises RuntimeError where there is none."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("vllm is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def fingerprint(root: Path, name: str) -> str | None:
    """Hash of the source of `file.py:Class.method` below ``root``; None where it is not there."""
    file, _, path = name.partition(":")
    if not (root / file).is_file():
        return None
    text = (root / file).read_text()
    node: ast.AST | None = ast.parse(text)
    for part in path.split("."):
        body = getattr(node, "body", [])
        node = next((n for n in body if getattr(n, "name", None) == part), None)
    if node is None:
        return None
    return hashlib.sha256((ast.get_source_segment(text, node) or "").encode()).hexdigest()[:16]


def check(found: str | None = None, root: Path | None = None) -> str:
    """The device that this vLLM was checked on.

    Raises RuntimeError with what was found and what is wanted, unless this vLLM is one that was checked.
    """
    found = version() if found is None else found
    if found not in FINGERPRINTS:
        raise RuntimeError(
            f"vllm {found} was not checked with ssmspec: wanted {' or '.join(FINGERPRINTS)}."
            " Install one of these, or serve with --ssm-policy native"
        )
    root = source_root() if root is None else root
    for name, wanted in FINGERPRINTS[found].items():
        actual = fingerprint(root, name)
        if actual != wanted:
            raise RuntimeError(
                f"vllm {found} differs from the one that ssmspec was checked with: {name} is {actual or 'missing'},"
                f" wanted {wanted}. Install an unmodified vllm {found}, or serve with --ssm-policy native"
            )
    return DEVICES[found]


def finding(found: str | None = None, root: Path | None = None) -> str:
    """What `ssmspec doctor` says about this vLLM: whether policies are served here, or why not."""
    try:
        device = check(found, root)
        here = resolve("current_platform").device_type
    except RuntimeError as error:
        return str(error)
    if not importlib.metadata.entry_points(group="vllm.general_plugins", name="ssmspec"):
        return "the plugin is not installed as one: pip install ssmspec"
    named = os.environ.get("VLLM_PLUGINS", "ssmspec")
    if "ssmspec" not in named.split(","):
        return f"VLLM_PLUGINS={named} leaves the plugin out: add ssmspec to it, or unset it"
    served = f"served on {device}"
    if here != device:
        return f"{served}, but vLLM's platform here is {here or 'none'}"
    return _unresolved() or served


def _unresolved() -> str | None:
    """The first name that cannot be had, and why; any exception is a finding here."""
    for name in NAMES:
        try:
            resolve(name)
        except Exception as error:
            return f"{NAMES[name]} cannot be imported: {error}"
    return None


if __name__ == "__main__":
    sys.stdout.write(finding() + "\n")
