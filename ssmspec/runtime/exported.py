"""One slot's state outside the pool: a header that says what it is, and a safetensors file of its fields."""

import hashlib
import json
from dataclasses import asdict, dataclass, fields

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from ssmspec.checked import show
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
    geometry: dict[str, object]  # the recurrence and its dtypes among it
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


def _of_slot(pool: StatePool, f: Field, slot: int) -> Tensor:
    """A view: [layers, *shape], or [*shape] of a shared field."""
    return pool[f.name][slot] if f.shared else pool[f.name][:, slot]


def take(pool: StatePool, slot: int, header: Header) -> Exported:
    """Copy every durable field of a slot to the host."""
    tensors = {f.name: _of_slot(pool, f, slot).to("cpu", copy=True) for f in _durable(pool)}
    return Exported(header=header, tensors=tensors)


def put(pool: StatePool, slot: int, exported: Exported, wanted: Header) -> None:
    """Copy an exported state into a slot. Raises ExportError before anything is written."""
    check(exported, pool, wanted)
    for f in _durable(pool):
        _of_slot(pool, f, slot).copy_(exported.tensors[f.name])


def check(exported: Exported, pool: StatePool, wanted: Header) -> None:
    """Whether the state fits: the same policy, recurrence, geometry, window and token count, field by field.

    Its cursors must lie within the ring, since a kernel follows them. Raises ExportError.
    """
    found = vars(exported.header)
    _same(found, asdict(wanted) | {"settled": found["settled"]})
    durable = {f.name: f for f in _durable(pool)}
    if durable.keys() != exported.tensors.keys():
        odd = ", ".join(sorted(durable.keys() ^ exported.tensors.keys()))
        raise ExportError(f"exported state: fields {odd:.200} are missing or not wanted")
    for name, f in durable.items():
        t, slot = exported.tensors[name], _of_slot(pool, f, 0)
        if t.shape != slot.shape or t.dtype is not storage(f.dtype):
            raise ExportError(
                f"exported state: {name} is {t.dtype} {list(t.shape)}, wanted {f.dtype} {list(slot.shape)}"
            )
    for name, most in _cursor_limits(durable, wanted, settled=exported.header.settled).items():
        value = int(exported.tensors[name])
        if not 0 <= value <= most:
            raise ExportError(f"exported state: {name}={value} is outside 0..{most}")


def _cursor_limits(durable: dict[str, Field], wanted: Header, *, settled: bool) -> dict[str, int]:
    """The largest value of each cursor that positions are computed from; none is pending in a settled state."""
    window = wanted.window["max_len"]
    assert isinstance(window, int)
    limits = {"position": wanted.tokens, "winner": 0 if settled else window - 1}
    if "count" in durable:
        capacity = durable["rec_k"].shape[1]
        limits |= {"base": capacity - 1, "count": 0 if settled else capacity - window}
    return {name: most for name, most in limits.items() if name in durable}


def _same(found: object, wanted: object, path: str = "") -> None:
    """Raise ExportError at the first difference. Goes no deeper than ``wanted``."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in [*wanted, *(found.keys() - wanted.keys())]:
            _same(found.get(key), wanted.get(key), f"{path}.{key:.80}" if path else key[:80])
    elif found != wanted or isinstance(found, bool) != isinstance(wanted, bool):
        raise ExportError(f"exported state: {path}={_plain(found)}, wanted {_plain(wanted)}")


def _plain(value: object) -> str:
    """An enum's member as the text it stands for."""
    return show(str(value) if isinstance(value, str) else value)


def dumps(exported: Exported) -> bytes:
    """A safetensors file whose metadata holds the header and a SHA-256 of header and tensors."""
    tensors = {name: t.contiguous() for name, t in exported.tensors.items()}
    header = json.dumps(asdict(exported.header), sort_keys=True)
    return safetensors.torch.save(tensors, {"ssmspec": header, "sha256": _digest(header, tensors)})


def loads(data: bytes) -> Exported:
    """Read what ``dumps`` wrote. Raises ExportError on anything else; reads no further than the declared sizes."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(MAX_HEADER, len(data) - 8):
        raise ExportError(f"exported state: header of {size} bytes in a file of {len(data)}")
    try:
        metadata = json.loads(data[8 : 8 + size])["__metadata__"]
        raw, digest = metadata["ssmspec"], metadata["sha256"]
        header = _header(json.loads(raw))
        tensors = safetensors.torch.load(data)
        intact = _digest(raw, tensors) == digest
    except ExportError:
        raise
    except (ValueError, LookupError, TypeError, RuntimeError, SafetensorError) as e:
        raise ExportError(f"exported state: not one of ours: {type(e).__name__} {e!s:.200}") from None
    if not intact:
        raise ExportError("exported state: checksum does not match, the file is damaged")
    return Exported(header=header, tensors=tensors)


def _header(values: dict[str, object]) -> Header:
    """The header, each value of its type. The schema comes first: another one may hold other keys."""
    if values["schema"] != SCHEMA:
        raise ExportError(f"exported state: schema={show(values['schema'])}, wanted {SCHEMA}")
    header = Header(**values)  # type: ignore[arg-type]
    kinds = {"policy": str, "geometry": dict, "window": dict, "tokens": int, "settled": bool, "schema": int}
    for f in fields(Header):
        value = getattr(header, f.name)
        if type(value) is not kinds[f.name]:
            raise ExportError(
                f"exported state: {f.name}={show(value)} is not of type {kinds[f.name].__name__}"
            )
    return header


def _digest(header: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(header.encode())
    for name in sorted(tensors):
        t = tensors[name]
        digest.update(f"{name}{t.dtype}{list(t.shape)}".encode())
        digest.update(t.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
