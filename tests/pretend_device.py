"""A device that is not there: its tensors hold their values on the host, and none of them meets a tensor of the host.

On a real device such a meeting raises; here it does, too, so a life can be played without one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CLAIMED = "meta"  # what such a tensor names as its device: indexing asks for one that this PyTorch knows
CROSSING = ("aten::copy_", "aten::_to_copy")  # the operations that take a value from one side to the other


class Met(RuntimeError):
    """An operation met tensors of both sides."""


def _is_pretended(device: object) -> bool:
    return isinstance(device, str | torch.device) and torch.device(device).type in ("cuda", CLAIMED)


class Away(Tensor):
    """A tensor of the pretended device."""

    @staticmethod
    def __new__(cls, held: Tensor) -> "Away":
        return Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=CLAIMED,
        )

    def __init__(self, held: Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    name, device = func._schema.name, kwargs.get("device")
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    away = [t for t in tensors if isinstance(t, Away)]
    if away and name not in CROSSING and any(t.dim() for t in tensors if not isinstance(t, Away)):
        raise Met(f"{name} meets a tensor of the host")
    out = func(*_held(args), **_held(kwargs if device is None else {**kwargs, "device": "cpu"}))
    here = not _is_pretended(device) if device is not None else not away
    if name == "aten::copy_":
        here = not isinstance(args[0], Away)
    if here:
        return out
    known = {id(t.held): t for t in away}  # what is changed in place is returned as it is

    def placed(t: Any) -> Any:
        return known[id(t)] if id(t) in known else Away(t) if isinstance(t, Tensor) else t

    return tree_map(placed, out)


def _held(x: Any) -> Any:
    return tree_map(lambda t: t.held if isinstance(t, Away) else t, x)


class _Operations(TorchDispatchMode):
    def __init__(self, reads: list[str]) -> None:
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = _call(func, args, kwargs or {})
        away = any(isinstance(t, Away) for t in tree_leaves((args, kwargs)))
        if away and not any(isinstance(t, Away) for t in tree_leaves(out)):
            self.reads.append(func._schema.name)
        return out


class _Functions(TorchFunctionMode):
    """What names the device is answered before PyTorch looks for it."""

    def __init__(self, reads: list[str]) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_pretended(kwargs.get("device")):
            made = func(*args, **{**kwargs, "device": "cpu"})
            return made if isinstance(made, Away) else Away(made)
        if func is Tensor.to and len(args) > 1 and _is_pretended(args[1]):
            return args[0] if isinstance(args[0], Away) else Away(args[0].clone())
        if func is Tensor.tolist and isinstance(args[0], Away):
            self.reads.append("tolist")
            return args[0].held.tolist()
        return func(*args, **kwargs)


@contextmanager
def pretended() -> Iterator[list[str]]:
    """Tensors of device cuda are pretended; lists the operations that brought values to the host."""
    reads: list[str] = []
    with _Functions(reads), _Operations(reads):
        yield reads
