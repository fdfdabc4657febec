"""Gluon kernels for heads of 128 keys: the bits of the plain Triton kernels, several times as fast.

Two launches per window: one for what all tiles share, and the persistent ``verify_window``.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ssmspec.geometry import Arch, DType, Geometry, Mode, Window
from ssmspec.kernels import choices
from ssmspec.kernels.base import History, Layer, Noise, Tokens, Verify
from ssmspec.kernels.choices import Kernel
from ssmspec.kernels.heads import power_of_2
from ssmspec.kernels.hopper_call import MAX_REGISTERS, Call
from ssmspec.kernels.hopper_shape import Order, Shape

HEAD = {Arch.GDN: (128, 128), Arch.KDA: (128, 128), Arch.MAMBA2: (128, 64)}  # K and V
MAX_LEN = 16
LONG, MANY = 8, 2048  # tokens and heads of a batch from which on a program takes a head's tiles in a row
STATES = {DType.FP32: torch.float32, DType.BF16: torch.bfloat16, DType.FP16: torch.float16}


def unsupported(g: Geometry, w: Window) -> str | None:
    """Why these kernels do not serve a geometry and window; None if they do."""
    if (g.head_k, g.head_v) != HEAD[g.arch]:
        return f"arch={g.arch}: head_k={g.head_k}, head_v={g.head_v} are not {HEAD[g.arch]}"
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
    batch, tokens = x.v.shape[:2]
    how = cut(g, tokens, batch, history is not None)
    shared = tokens >= LONG and batch * g.num_v_heads >= MANY
    return how, Shape(
        ARCH=str(g.arch),
        H=g.num_k_heads,
        HV=g.num_v_heads,
        K=g.head_k,
        V=g.head_v,
        T=tokens,
        R=layer.capacity if layer.records and snapshots is None else 0,
        HISTORY=0 if history is None else power_of_2(max(history.limit, w.max_len)),
        ENDS=history is not None and history.ends is not None,
        SNAPSHOTS=snapshots is not None,
        CHUNK=16 // layer.state.element_size(),
        ORDER=order,
        BV=how.BV,
        WARPS=how.WARPS,
        SHARED=g.head_v // how.BV if shared else 1,
    )


def make_verify(g: Geometry, w: Window, order: Order) -> Verify:
    """Verify, adding up in the order of plain Triton that ``selftest`` found. Windows have at most 16 tokens.

    Raises ValueError where ``unsupported`` gives a reason.
    """
    reason = unsupported(g, w)
    if reason is not None:
        raise ValueError(f"the hopper kernels do not serve this geometry: {reason}")
    programs: dict[tuple[Shape, int], int] = {}

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
        call = Call.of(layer, x, shape, history, snapshots)
        if len(rows):
            call.prepare(g, layer, rows.contiguous(), lens.contiguous(), shape)
            call.verify(layer, shape, how.registers, programs)
        return call.out

    return verify
