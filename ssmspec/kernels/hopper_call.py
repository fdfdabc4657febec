"""One window as the Hopper kernels take it: checked, with room for what lies between the two launches."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssmspec.geometry import Arch, Geometry
from ssmspec.kernels import prepare
from ssmspec.kernels.base import History, Layer, Tokens
from ssmspec.kernels.fast_shape import Cursors
from ssmspec.kernels.hopper_fetch import MAX_ROWS, MAX_SLOTS, Prepared
from ssmspec.kernels.hopper_prepare import PrepareShape, prepare_window
from ssmspec.kernels.hopper_shape import Shape
from ssmspec.kernels.hopper_verify import verify_window
from ssmspec.kernels.launch import at_once, strides
from ssmspec.kernels.prepare import Room
from ssmspec.kernels.triton_records import Records
from ssmspec.kernels.window import Inputs

PIECE = 16  # bytes of an asynchronous copy; Triton believes in their alignment if strides divide by as much
MAX_REGISTERS = 128  # per thread, so that 16 warps fit on a multiprocessor


class Ring(NamedTuple):
    """History as the kernel takes it."""

    base: Any
    count: Any
    limit: Any
    ends: Any


@dataclass(frozen=True)
class Call:
    """One window as both kernels take it."""

    state: Tensor
    x: Inputs  # tensors
    strides: Inputs  # of row, token and head
    records: Records  # tensors
    record_strides: Records  # of a slot
    prepared: Prepared
    history: Ring | None
    snapshots: Tensor | None
    out: Tensor

    @classmethod
    def of(
        cls, layer: Layer, x: Tokens, shape: Shape, history: History | None, snapshots: Tensor | None
    ) -> "Call":
        inputs = Inputs(_in_pieces(x.q), _in_pieces(x.k), _in_pieces(x.v), x.a, x.b)
        batch, heads = x.v.shape[0], x.v.shape[2]
        for name, tensor in inputs._asdict().items():
            if tensor is not None and tensor.numel():
                assert tensor.stride(0) * batch < 2**31, f"{name} needs 64-bit offsets"
        assert layer.state[0].is_contiguous()
        if layer.state.stride(0) % PIECE:
            raise ValueError(
                f"state has rows {layer.state.stride(0)} elements apart, which is no multiple of {PIECE}"
            )
        assert len(layer.state) <= MAX_ROWS
        assert layer.rows is None or snapshots is None
        records = Records()
        if layer.records and snapshots is None:
            assert all(field[0].is_contiguous() for field in layer.records.values())
            assert all(len(field) <= MAX_SLOTS for field in layer.records.values())
            records = Records(**layer.records)

        def new(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(*sizes, dtype=dtype, device=x.v.device)

        rows, factors = new(batch, 2, dtype=torch.int64), new(batch, heads, 4, shape.WINDOW)
        return cls(
            state=layer.state,
            x=inputs,
            strides=strides(Inputs, inputs),
            records=records,
            record_strides=Records(*(None if field is None else field.stride(0) for field in records)),
            prepared=Prepared(rows, factors, new(*x.v.shape[:3], shape.K) if shape.CHANNELS else None),
            history=None
            if history is None
            else Ring(history.base, history.count, history.limit, history.ends),
            snapshots=snapshots,
            out=torch.empty_like(x.v, memory_format=torch.contiguous_format),
        )

    def prepare(self, g: Geometry, layer: Layer, slots: Tensor, lens: Tensor, c: Shape) -> None:
        """Fill ``prepared``, and all of the window's records but what verify adds."""
        if g.arch is not Arch.GDN:
            self._prepare_as_plain(g, layer, slots, lens)
            return
        shape = PrepareShape(
            H=c.H, HV=c.HV, K=c.K, T=c.T, R=c.R, HISTORY=c.HISTORY > 0, ENDS=c.ENDS
        )  # fmt: skip
        prepare_window[(len(slots) * c.T, -(-c.H // shape.HEADS))](
            self.x,
            self.strides,
            layer.params.A_log,
            layer.params.dt_bias,
            slots,
            layer.rows,
            lens,
            self.history,
            self.records,
            self.record_strides,
            self.prepared,
            shape,
            num_warps=shape.WARPS,
            enable_fp_fusion=False,
        )

    def _prepare_as_plain(self, g: Geometry, layer: Layer, slots: Tensor, lens: Tensor) -> None:
        """By the plain kernels' own ``prepare``, in their bits."""
        t, past = self.x.v.shape[1], self.history or Ring(None, None, 0, None)
        k_norm, q_norm, decay, beta = (f[..., :t].mT for f in self.prepared.factors.unbind(2))
        if self.prepared.decays is not None:
            decay = self.prepared.decays
        norms = () if g.arch is Arch.MAMBA2 else (k_norm, q_norm)
        prepare.launch(
            g,
            layer,
            self.x,
            Room(decay, beta, *norms),
            Cursors(slots, layer.rows, lens, past.base, past.count, past.limit),
            (self.records, self.record_strides),
            self.prepared.rows,
            past.ends,
            norms=True,
        )

    def verify(
        self, layer: Layer, shape: Shape, registers: int, programs: dict[tuple[Shape, int], int]
    ) -> None:
        tiles = self.out.shape[0] * shape.HV * shape.BLOCKS
        arguments = (
            self.state,
            self.state.stride(0),
            self.records,
            self.record_strides,
            self.x,
            self.strides,
            self.prepared,
            layer.params.D,
            self.snapshots,
            self.out,
            tiles,
            shape,
        )
        options = {"num_warps": shape.WARPS, "maxnreg": registers, "enable_fp_fusion": False}
        key = shape, registers
        if key not in programs:
            kernel = verify_window.warmup(*arguments, grid=(1,), **options)
            programs[key] = at_once(kernel.metadata.shared, shape.WARPS, registers, self.out.device)
        verify_window[(min(tiles, programs[key]),)](*arguments, **options)


def _in_pieces(x: Tensor) -> Tensor:
    """A copy where the kernel could not load whole pieces."""
    return x.contiguous() if any(n % PIECE for n in (x.data_ptr(), *x.stride()[:3])) else x
