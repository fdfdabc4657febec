"""Gluon kernels for GDN with K = V = 128: the bits of plain Triton's kernel, three to four times as fast.

Two launches per window: ``prepare_window`` for what all tiles share, and the persistent ``verify_window``.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ssmspec.geometry import Arch, DType, Geometry, Mode, Window
from ssmspec.kernels import choices
from ssmspec.kernels.base import History, Layer, Noise, Tokens, Verify
from ssmspec.kernels.choices import Kernel
from ssmspec.kernels.hopper_fetch import MAX_ROWS, MAX_SLOTS, Inputs, Prepared, Records
from ssmspec.kernels.hopper_prepare import PrepareShape, prepare_window
from ssmspec.kernels.hopper_tile import Order, Shape, power_of_2
from ssmspec.kernels.hopper_verify import verify_window

HEAD = 128  # K and V
MAX_LEN = 16
PIECE = 16  # bytes of an asynchronous copy; Triton believes in their alignment if strides divide by as much
MAX_REGISTERS = 128  # per thread, so that 16 warps fit on a multiprocessor
WARPS_A_PROCESSOR = 65536 // (MAX_REGISTERS * 32)
SHARED_A_PROCESSOR, SHARED_RESERVED = 228 * 1024, 1024  # bytes; the latter per program
STATES = {DType.FP32: torch.float32, DType.BF16: torch.bfloat16, DType.FP16: torch.float16}


def unsupported(g: Geometry, w: Window) -> str | None:
    """Why these kernels do not serve a geometry and window; None if they do."""
    if g.arch is not Arch.GDN:
        return f"arch={g.arch} is not gdn"
    if (g.head_k, g.head_v) != (HEAD, HEAD):
        return f"head_k={g.head_k}, head_v={g.head_v} are not {HEAD}"
    if g.state_dtype not in STATES or g.stochastic or g.read_dtype is not None:
        return f"state_dtype={g.state_dtype}, stochastic={g.stochastic}, read_dtype={g.read_dtype} need other rounding"
    if g.act_dtype is DType.FP32:
        return f"act_dtype={g.act_dtype} is not 16 bits wide"
    if w.max_len > MAX_LEN:
        return f"max_len={w.max_len} exceeds {MAX_LEN}"
    if w.mode is not Mode.EXACT:
        return f"mode={w.mode} is not exact"
    return None


def runs_here() -> bool:
    """Whether there is a device that the kernels are written for."""
    compiled = not triton.knobs.runtime.interpret
    return compiled and torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


class Ring(NamedTuple):
    """History as the kernel takes it."""

    base: Any
    count: Any
    limit: Any
    ends: Any


@dataclass(frozen=True)
class Cut:
    """How a window is cut up: V rows and warps of a program, registers of a thread."""

    BV: int
    WARPS: int = 4
    registers: int = MAX_REGISTERS


def cut(g: Geometry, tokens: int, batch: int, replays: bool) -> Cut:
    """The table's; without one fewer rows where there are not enough tiles for all multiprocessors, and without replay
    a slightly lower cap, under which the compiler meets fewer register bank conflicts."""
    found = choices.here().launch(Kernel.HOPPER, g, tokens, batch, replays)
    if found is not None:
        assert found.rows is not None
        return Cut(BV=found.rows, WARPS=found.warps, registers=found.registers or MAX_REGISTERS)
    return Cut(BV=64 if batch * g.num_v_heads > 32 else 32, registers=MAX_REGISTERS if replays else 122)


@dataclass(frozen=True)
class Call:
    """One window as both kernels take it."""

    state: Tensor
    x: Inputs  # tensors
    strides: Inputs  # of row, token and head
    records: Records | None  # tensors
    record_strides: Records | None  # of a slot
    prepared: Prepared
    history: Ring | None
    snapshots: Tensor | None
    out: Tensor

    @classmethod
    def of(
        cls, layer: Layer, x: Tokens, window: int, history: History | None, snapshots: Tensor | None
    ) -> "Call":
        """``window`` is T to a power of 2."""
        inputs = Inputs(_in_pieces(x.q), _in_pieces(x.k), _in_pieces(x.v), x.a, x.b)
        batch, heads = x.v.shape[0], x.v.shape[2]
        for name, tensor in inputs._asdict().items():
            assert tensor.numel() == 0 or tensor.stride(0) * batch < 2**31, f"{name} needs 64-bit offsets"
        assert layer.state[0].is_contiguous()
        if layer.state.stride(0) % PIECE:
            raise ValueError(
                f"state has rows {layer.state.stride(0)} elements apart, which is no multiple of {PIECE}"
            )
        assert len(layer.state) <= MAX_ROWS
        assert layer.rows is None or snapshots is None
        records = strides = None
        if layer.records and snapshots is None:
            assert all(field[0].is_contiguous() for field in layer.records.values())
            assert all(len(field) <= MAX_SLOTS for field in layer.records.values())
            records = Records(**layer.records)
            strides = Records(*(field.stride(0) for field in records))
        rows = torch.empty(batch, 2, dtype=torch.int64, device=x.v.device)
        factors = torch.empty(batch, heads, 4, window, dtype=torch.float32, device=x.v.device)
        return cls(
            state=layer.state,
            x=inputs,
            strides=Inputs(*(tensor.stride()[:3] for tensor in inputs)),
            records=records,
            record_strides=strides,
            prepared=Prepared(rows, factors),
            history=None
            if history is None
            else Ring(history.base, history.count, history.limit, history.ends),
            snapshots=snapshots,
            out=torch.empty_like(x.v, memory_format=torch.contiguous_format),
        )

    def prepare(self, layer: Layer, slots: Tensor, lens: Tensor, shape: PrepareShape) -> None:
        batch = self.out.shape[0]
        prepare_window[(batch * shape.T, -(-shape.H // shape.HEADS))](
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

    def verify(self, shape: Shape, registers: int, programs: dict[Shape, int]) -> None:
        tiles = self.out.shape[0] * shape.HV * shape.BLOCKS
        arguments = (
            self.state,
            self.state.stride(0),
            self.records,
            self.record_strides,
            self.x,
            self.strides,
            self.prepared,
            self.snapshots,
            self.out,
            tiles,
            shape,
        )
        options = {"num_warps": shape.WARPS, "maxnreg": registers, "enable_fp_fusion": False}
        if shape not in programs:
            kernel = verify_window.warmup(*arguments, grid=(1,), **options)
            programs[shape] = _resident(kernel.metadata.shared, shape.WARPS, self.out.device)
        verify_window[(min(tiles, programs[shape]),)](*arguments, **options)


def _in_pieces(x: Tensor) -> Tensor:
    """A copy where the kernel could not load whole pieces."""
    return x.contiguous() if any(n % PIECE for n in (x.data_ptr(), *x.stride()[:3])) else x


def _resident(shared: int, warps: int, device: torch.device) -> int:
    """Programs that run at once on the whole device."""
    each = min(WARPS_A_PROCESSOR // warps, SHARED_A_PROCESSOR // (shared + SHARED_RESERVED))
    return each * torch.cuda.get_device_properties(device).multi_processor_count


def shape_of(
    g: Geometry,
    w: Window,
    order: Order,
    layer: Layer,
    x: Tokens,
    history: History | None,
    snapshots: Tensor | None,
) -> tuple[Cut, Shape]:
    """How a window is cut up, and what its kernel is compiled for."""
    how = cut(g, x.v.shape[1], x.v.shape[0], history is not None)
    return how, Shape(
        H=g.num_k_heads,
        HV=g.num_v_heads,
        K=g.head_k,
        V=g.head_v,
        T=x.v.shape[1],
        R=layer.capacity if layer.records and snapshots is None else 0,
        HISTORY=0 if history is None else power_of_2(max(history.limit, w.max_len)),
        ENDS=history is not None and history.ends is not None,
        SNAPSHOTS=snapshots is not None,
        CHUNK=16 // layer.state.element_size(),
        ORDER=order,
        BV=how.BV,
        WARPS=how.WARPS,
    )


def make_verify(g: Geometry, w: Window, order: Order) -> Verify:
    """Verify, adding up in the order of plain Triton that ``selftest`` found. Windows have at most 16 tokens.

    Raises ValueError where ``unsupported`` gives a reason.
    """
    reason = unsupported(g, w)
    if reason is not None:
        raise ValueError(f"the hopper kernels do not serve this geometry: {reason}")
    programs: dict[Shape, int] = {}

    def verify(
        layer: Layer,
        x: Tokens,
        rows: Tensor,
        lens: Tensor,
        *,
        history: History | None = None,
        snapshots: Tensor | None = None,
        noise: Noise | None = None,
    ) -> Tensor:
        assert noise is None
        assert x.v.shape[1] <= MAX_LEN
        how, shape = shape_of(g, w, order, layer, x, history, snapshots)
        call = Call.of(layer, x, shape.WINDOW, history, snapshots)
        if len(rows):
            prepare = PrepareShape(
                H=shape.H,
                HV=shape.HV,
                K=shape.K,
                T=shape.T,
                R=shape.R,
                HISTORY=shape.HISTORY > 0,
                ENDS=shape.ENDS,
            )
            call.prepare(layer, rows.contiguous(), lens.contiguous(), prepare)
            call.verify(shape, how.registers, programs)
        return call.out

    return verify
