"""The tensors behind slots. Slot 0 is the null slot: it is never allocated, and never read for a live row."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ssmspec.geometry import DType
from ssmspec.layout import Layout

NULL_SLOT = 0  # a negative slot means the same


def storage(dtype: DType) -> torch.dtype:
    """The torch dtype that holds values of ``dtype``; NVFP4 is emulated by fp32 values on its grid."""
    found = torch.float32 if dtype is DType.NVFP4 else getattr(torch, dtype)
    assert isinstance(found, torch.dtype)
    return found


def indexable(t: Tensor) -> Tensor:
    """fp8 has no indexing kernels, its bytes have."""
    return t.view(torch.uint8) if t.dtype is torch.float8_e4m3fn else t


@dataclass(frozen=True)
class StatePool:
    """The fields of a layout for all layers and slots: states, records and cursors, by name.

    A slot is what one request holds; its number is an index into every tensor.
    """

    layout: Layout
    tensors: dict[str, Tensor]  # [layers, slots, *shape]; shared fields [slots, *shape]
    rows: Sequence[Tensor] | None = (
        None  # per layer [slots] int64: states lie in an engine's pages, at these rows
    )

    @classmethod
    def allocate(cls, layout: Layout, num_layers: int, num_slots: int, device: str = "cpu") -> "StatePool":
        """Zeros for ``num_slots`` slots, the null slot included: requests have 1..num_slots-1."""
        tensors = {}
        for f in layout:
            lead = (num_slots,) if f.shared else (num_layers, num_slots)
            tensors[f.name] = torch.zeros(*lead, *f.shape, dtype=storage(f.dtype), device=device)
        return cls(layout, tensors)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    @property
    def num_slots(self) -> int:
        return next(self.tensors[f.name].shape[0 if f.shared else 1] for f in self.layout)

    def copy(self, src: Tensor, dst: Tensor) -> None:
        """Copy everything durable, cursors included: a moved slot needs no settling. ``dst`` repeats only null."""
        for f in self.layout:
            if f.durable:
                t = indexable(self.tensors[f.name])
                if f.shared:
                    t[dst] = t[src]
                else:
                    t[:, dst] = t[:, src]

    def poison(self, byte: int, slots: Tensor | None = None) -> None:
        """Fill slots (all of them without ``slots``) with a byte: whatever reads them without cause shows."""
        for f in self.layout:
            raw = self.tensors[f.name].view(torch.uint8) if f.shape else self.tensors[f.name]
            value = byte if f.shape else int.from_bytes(bytes([byte]) * raw.element_size(), signed=True)
            if slots is None:
                raw.fill_(value)
            else:
                raw[slots if f.shared else (slice(None), slots)] = value
