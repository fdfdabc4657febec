"""Fast mode's verify: one launch for what the tokens do to each other, one for the window."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssmspec.geometry import Arch, Geometry, Window
from ssmspec.kernels import choices, fast_channels, fast_channels_mma, fast_couplings, fast_dot, fast_mma
from ssmspec.kernels.base import History, Layer, Noise, Tokens, Verify
from ssmspec.kernels.choices import Kernel, Launch
from ssmspec.kernels.fast_call import Gated, call_of
from ssmspec.kernels.fast_shape import Cursors, Shape
from ssmspec.kernels.fast_tile import Call
from ssmspec.kernels.launch import at_once

Couple = Callable[[Geometry, Layer, Tokens, Call, Cursors, Shape], None]

WARPS = 4
FEW, MANY_WARPS = 256, 8  # heads of a batch that leaves processors idle; warps of a program then
MAX_REGISTERS = {2: 168, 4: None}  # by bytes per element of state: three programs on a multiprocessor, or two
SHARED_A_PROGRAM = 225 * 1024  # bytes, a little less than there are
COUPLE_REGISTERS = 136  # a program is one warp, and mostly waits: fifteen fit on a multiprocessor
LONG_REGISTERS = 168  # of KDA's, where a window is long; a short one's is left with 122
LEAST_PAST = 16  # records: the depth of a product
LONGEST_PAIRED = 8  # tokens of KDA: its couplings are written out pair by pair, and 16 compile for minutes


def couple(g: Geometry, layer: Layer, x: Tokens, call: Call, at: Cursors, c: Shape) -> None:
    """Launch what works out the couplings ``call.w``, and stores the window's records of keys and gates."""
    kernel, registers = _couplings(c)
    p = layer.params
    kernel[(call.out.shape[0] * c.HV // c.HEADS,)](
        call.w,
        call.x,
        call.x_step,
        p.A_log,
        p.dt_bias,
        p.D,
        at,
        call.rec,
        call.rec_step,
        _operand(g),
        c,
        num_warps=1,
        maxnreg=registers,
        enable_fp_fusion=True,
    )


def _couplings(c: Shape) -> tuple[Any, int | None]:
    """The kernel, and the most registers of its threads."""
    if not c.CHANNELS:
        return fast_couplings.couple, COUPLE_REGISTERS
    if c.TUNED:
        return fast_channels_mma.couple, LONG_REGISTERS if c.T > 4 else None
    return fast_channels.couple, None


def make_verify(g: Geometry, w: Window, exact: Verify, couple: Couple = couple) -> Verify:
    """Verify through matrix products, at fp32 grade; ``exact`` for snapshots, and KDA's windows of over 8 tokens.

    A row that overfills its ring answers from the old checkpoint and its records, and is folded afterwards. The
    outputs of Gated tokens are normed and gated.
    """
    programs: dict[Any, int] = {}

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
        if snapshots is not None or (g.arch is Arch.KDA and x.v.shape[1] > LONGEST_PAIRED):
            out = exact(layer, x, rows, lens, history=history, snapshots=snapshots, noise=noise)
            return x.apart(out) if isinstance(x, Gated) else out
        assert noise is None
        room = x.out if isinstance(x, Gated) else None
        out = torch.empty(x.v.shape, dtype=x.v.dtype, device=x.v.device) if room is None else room
        if out.shape[0]:
            tuned = _tuned(g, layer, x)
            how = _launch(g, layer, x, history) if tuned else Launch(warps=WARPS, registers=None)
            shape = _shape(g, w, layer, x, history, how.warps, tuned)
            while tuned and how.warps > 1 and not _has_room(layer, x, shape):
                how = replace(how, warps=how.warps // 2)
                shape = _shape(g, w, layer, x, history, how.warps, tuned)
            call = call_of(layer, x, shape, out)
            at = Cursors(
                rows.contiguous(),
                layer.rows,
                lens.contiguous(),
                None if history is None else history.base,
                None if history is None else history.count,
                0 if history is None else history.limit,
                len(rows),
            )
            couple(g, layer, x, call, at, shape)
            if tuned:
                _multiply(call, shape, programs, how.registers)
            else:
                _multiply_anywhere(call, shape, at, _operand(g))
            if shape.GATE is not None:
                return out
        return x.apart(out) if isinstance(x, Gated) else out

    return verify


def _operand(g: Geometry) -> tl.dtype:
    """What 16-bit activations are multiplied in. The interpreter multiplies no bf16."""
    return tl.float32 if triton.knobs.runtime.interpret else getattr(tl, g.act_dtype)


def _tuned(g: Geometry, layer: Layer, x: Tokens) -> bool:
    """Whether the Gluon kernel serves: it copies whole rows in pieces of 16 bytes and takes K in parts of 64."""
    rows = (layer.state, layer.records["k"], layer.records["x" if g.arch is Arch.MAMBA2 else "c"])
    steps = (*x.q.stride()[:3], *x.k.stride()[:3], *(t.stride(0) for t in rows))
    return (
        x.v.is_cuda
        and g.head_k % 16 == g.head_v % 16 == 0
        and g.head_k > 32
        and all(n % 16 == 0 for n in steps)
        and all(t.data_ptr() % 16 == 0 for t in (x.q, x.k, *rows))
    )


def _launch(g: Geometry, layer: Layer, x: Tokens, history: History | None) -> Launch:
    """The table's, or a default; no more warps than share V evenly."""
    batch, tokens = x.v.shape[:2]
    found = choices.here().launch(Kernel.FAST, g, tokens, batch, history is not None)
    warps = WARPS if batch * g.num_v_heads > FEW else MANY_WARPS
    how = found or Launch(warps=warps, registers=MAX_REGISTERS[layer.state.element_size()])
    while how.warps > 1 and g.head_v % (16 * how.warps):
        how = replace(how, warps=how.warps // 2)
    return how


def _shape(
    g: Geometry, w: Window, layer: Layer, x: Tokens, history: History | None, warps: int, tuned: bool
) -> Shape:
    probes, tokens = 1 if g.arch is Arch.MAMBA2 else 2, x.v.shape[1]
    longest = max(history.limit, w.max_len, LEAST_PAST) if history else 0
    return Shape(
        ARCH=str(g.arch),
        SOFTPLUS=g.dt_softplus,
        BOUND=g.gate_lower_bound,
        H=g.num_k_heads,
        HV=g.num_v_heads,
        K=g.head_k,
        V=g.head_v,
        T=tokens,
        R=layer.capacity,
        TP=max((8 if tuned else 16) // probes, triton.next_power_of_2(tokens)),
        HP=triton.next_power_of_2(longest) if history else 0,
        BV=16 * warps,
        HEADS=together(g),
        TUNED=tuned,
        GATE=str(x.norm.gate) if isinstance(x, Gated) and tuned and _norms(g, x, warps) else None,
        EPS=x.norm.eps if isinstance(x, Gated) else 0.0,
    )


def together(g: Geometry) -> int:
    """Value heads of a program of the couplings."""
    return 1 if g.arch is Arch.KDA else next(n for n in (4, 2, 1) if g.group % n == 0)


def _has_room(layer: Layer, x: Tokens, c: Shape) -> bool:
    """Whether a program of the Gluon kernel fits on a multiprocessor."""
    probe = 4 if c.CHANNELS else x.k.element_size()
    return c.shared(layer.state.element_size(), probe) <= SHARED_A_PROGRAM


def _norms(g: Geometry, x: Gated, warps: int) -> bool:
    """Whether the Gluon kernel norms: it keeps the outputs of all of a head while it works on the last tile."""
    return x.norm.group == g.head_v and not x.norm.gate_first and g.head_v <= 4 * 16 * warps


def _multiply(call: Call, c: Shape, programs: dict[Any, int], registers: int | None) -> None:
    """As many programs as run at once; they walk over all tiles."""
    warps = c.BV // 16
    options = {"num_warps": warps, "maxnreg": registers, "enable_fp_fusion": True}
    key = (c, call.state.dtype, registers)
    if key not in programs:
        kernel = fast_mma.window.warmup(call, c, grid=(1,), **options)
        programs[key] = at_once(kernel.metadata.shared, warps, registers, call.out.device)
    fast_mma.window[(min(call.tiles // c.BLOCKS, programs[key]),)](call, c, **options)


def _multiply_anywhere(call: Call, c: Shape, at: Cursors, operand: tl.dtype) -> None:
    fast_dot.window[(call.tiles,)](
        call.state,
        call.row,
        call.w,
        call.x,
        call.x_step,
        call.out,
        at,
        call.rec,
        call.rec_step,
        operand,
        c,
        num_warps=WARPS,
        enable_fp_fusion=True,
    )
