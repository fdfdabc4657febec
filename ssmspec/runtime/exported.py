"""One slot's state outside the pool: a header that says what it is, and a safetensors file of its fields."""

import hashlib
import json
from dataclasses import asdict, dataclass

import safetensors.torch
import torch
from torch import Tensor

from ssmspec.geometry import Geometry, Window
from ssmspec.layout import Field
from ssmspec.pool import StatePool, storage

SCHEMA = 1
MAX_HEADER = 1 << 20


class ExportError(ValueError):
    """An exported state is damaged, or is not what the importer holds: names the field, found and wanted."""


@dataclass(frozen=True, kw_only=True)
class Header:
    policy: str
    geometry: dict[str, object]
    window: dict[str, object]
    tokens: int  # accepted tokens the state covers
    settled: bool  # nothing is pending behind the checkpoint
    schema: int = SCHEMA

    @classmethod
    def of(cls, policy: str, g: Geometry, w: Window, tokens: int, settled: bool) -> "Header":
        return cls(policy=policy, geometry=asdict(g), window=asdict(w), tokens=tokens, settled=settled)


@dataclass(frozen=True, kw_only=True)
class Exported:
    header: Header
    tensors: dict[str, Tensor]  # [layers, *shape] on the host; shared fields [*shape]


def _durable(pool: StatePool) -> list[Field]:
    return [f for f in pool.layout if f.durable]


def take(pool: StatePool, slot: int, header: Header) -> Exported:
    """Copy every durable field of a slot to the host."""
    tensors = {}
    for f in _durable(pool):
        t = pool[f.name]
        tensors[f.name] = (t[slot] if f.shared else t[:, slot]).to("cpu", copy=True)
    return Exported(header=header, tensors=tensors)


def put(pool: StatePool, slot: int, exported: Exported, wanted: Header) -> None:
    """Copy an exported state into a slot. Raises ExportError before anything is written."""
    check(exported, pool, wanted)
    for name, t in exported.tensors.items():
        target = pool[name]
        (target[slot] if target.dim() == t.dim() + 1 and _shared(pool, name) else target[:, slot]).copy_(t)


def _shared(pool: StatePool, name: str) -> bool:
    return any(f.name == name and f.shared for f in pool.layout)


def check(exported: Exported, pool: StatePool, wanted: Header) -> None:
    """Whether the state fits: the same policy, recurrence, geometry, window and token count, field by field."""
    found_values, wanted_values = _flat(asdict(exported.header)), _flat(asdict(wanted))
    for key in wanted_values.keys() | found_values.keys():
        found, want = found_values.get(key), wanted_values.get(key)
        if key != "settled" and found != want:
            raise ExportError(f"exported state: {key}={found!r}, wanted {want!r}")
    fields = {f.name: f for f in _durable(pool)}
    if fields.keys() != exported.tensors.keys():
        odd = sorted(fields.keys() ^ exported.tensors.keys())
        raise ExportError(f"exported state: fields {', '.join(odd)} are missing or not wanted")
    for name, f in fields.items():
        t, layers = exported.tensors[name], pool[name].shape[0]
        shape = f.shape if f.shared else (layers, *f.shape)
        if tuple(t.shape) != shape or t.dtype is not storage(f.dtype):
            raise ExportError(
                f"exported state: {name} is {t.dtype} {list(t.shape)}, wanted {f.dtype} {list(shape)}"
            )


def _flat(values: dict[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def dumps(exported: Exported) -> bytes:
    """A safetensors file whose metadata holds the header and a SHA-256 of the tensors."""
    tensors = {name: t.contiguous() for name, t in exported.tensors.items()}
    header = json.dumps(asdict(exported.header), sort_keys=True)
    metadata = {"ssmspec": header, "sha256": _digest(header, tensors)}
    return safetensors.torch.save(tensors, metadata)


def loads(data: bytes) -> Exported:
    """Read what ``dumps`` wrote. Raises ExportError on anything else; reads no further than the declared sizes."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(MAX_HEADER, len(data) - 8):
        raise ExportError(f"exported state: header of {size} bytes in a file of {len(data)}")
    try:
        metadata = json.loads(data[8 : 8 + size])["__metadata__"]
        raw, digest = metadata["ssmspec"], metadata["sha256"]
        header = Header(**json.loads(raw))
        tensors = safetensors.torch.load(data)
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        safetensors.SafetensorError,
    ) as e:
        raise ExportError(f"exported state: not one of ours: {e}") from None
    if _digest(raw, tensors) != digest:
        raise ExportError("exported state: checksum does not match, the file is damaged")
    if header.schema != SCHEMA:
        raise ExportError(f"exported state: schema={header.schema}, wanted {SCHEMA}")
    return Exported(header=header, tensors=tensors)


def _digest(header: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(header.encode())
    for name in sorted(tensors):
        t = tensors[name]
        digest.update(f"{name}{t.dtype}{list(t.shape)}".encode())
        digest.update(t.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
