"""The short-conv window as Triton kernels, over a ring of inputs per slot: to accept is to move a cursor."""

# mypy: disable-error-code="assignment,misc"

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssmspec import layout
from ssmspec.geometry import Conv, DType
from ssmspec.kernels.conv import ConvWindow
from ssmspec.kernels.conv_math import Shape, load_inputs, output, ring_at, store_inputs
from ssmspec.kernels.handed import hand_over
from ssmspec.kernels.heads import power_of_2
from ssmspec.pool import StatePool
from ssmspec.step import Commit, Step

BLOCK, WARPS = 512, 4  # channels and warps of a program
SHORT = 4  # tokens, up to which half the warps hold a window in their registers and load 16 bytes at a time
FEW, SMALL = 8, 256  # rows, up to which a program has that many channels: one row alone has to fill the GPU
OPTIONS = {"enable_fp_fusion": False}  # an fma would round once where torch rounds twice


class Steps(NamedTuple):
    """Elements from slot to slot, from channel to channel and from input to input."""

    slot: Any
    channel: Any
    input: Any


@triton.jit
def convolve(
    x, x_row, x_token, field, step, at, slots, lens, weight, w_channel, w_tap, bias, out, c: tl.constexpr
):
    """One row's window in BLOCK channels: its outputs, and its inputs into the ring, behind the settled ones."""
    T: tl.constexpr = c.T
    b = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * c.BLOCK + tl.arange(0, c.BLOCK)
    inside = d < c.D
    slot = tl.load(slots + b).to(tl.int64)
    n = tl.where(slot > 0, tl.load(lens + b), 0)
    p_out = out + b * (T * c.D) + d
    if n > 0:
        first = ring_at(tl.load(at + slot) + (c.R - c.HISTORY), c)
        p_ring = field + slot * step.slot + d.to(tl.int64) * step.channel
        p_x, p_weight = x + b * x_row + d, weight + d * w_channel
        p_bias = None if bias is None else bias + d
        inputs, taps = load_inputs(
            p_x, x_token, p_ring, step.input, p_weight, w_tap, p_bias, first, n, inside, c
        )
        store_inputs(inputs, p_ring, step.input, first, n, inside, c)
        for t in tl.static_range(T):
            y = tl.where(t < n, output(inputs, taps, t, c), 0.0)
            hand_over(p_out + t * c.D, y.to(out.dtype.element_ty), inside)
    else:
        for t in tl.static_range(T):
            tl.store(p_out + t * c.D, tl.zeros_like(d).to(out.dtype.element_ty), mask=inside)


@triton.jit
def keep(field, layer, step, at, slots, accepted, next_slots, mark, mark_slots, layers, c: tl.constexpr):
    """In every layer, the inputs that end at a crossed boundary, and at the last accepted token of a row that moves,
    to the front of the rings they go on in. Rows that stay where they are have nothing to do."""
    b = tl.program_id(1)
    slot, mark_to = tl.load(slots + b).to(tl.int64), tl.load(mark_slots + b).to(tl.int64)
    to = tl.load(next_slots + b).to(tl.int64)
    moves = (to > 0) & (to != slot)
    if (slot > 0) & (moves | (mark_to > 0)):
        d = tl.program_id(0) * c.BLOCK + tl.arange(0, c.BLOCK)[None, :]
        i = tl.arange(0, c.PT)[:, None]
        inside = (d < c.D) & (i < c.HISTORY)
        first = tl.load(at + slot) - c.HISTORY + c.R + i
        final = (first + tl.load(accepted + b).to(tl.int32)) % c.R
        marked = (first + tl.load(mark + b).to(tl.int32)) % c.R
        p = field + d.to(tl.int64) * step.channel
        for _ in range(layers):
            old = p + slot * step.slot
            x_final = tl.load(old + final * step.input, mask=inside & moves)
            x_marked = tl.load(old + marked * step.input, mask=inside & (mark_to > 0))
            tl.debug_barrier()  # a boundary may stay in the slot that is left: all of it is read before any is written
            tl.store(p + to * step.slot + i * step.input, x_final, mask=inside & moves)
            tl.store(p + mark_to * step.slot + i * step.input, x_marked, mask=inside & (mark_to > 0))
            p += layer


@triton.jit
def advance(at, slots, accepted, next_slots, mark_slots, rows, BLOCK: tl.constexpr, c: tl.constexpr):
    """Behind ``keep``, since its programs read the cursors that this moves."""
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + b, mask=b < rows, other=0)
    to = tl.load(next_slots + b, mask=b < rows, other=0)
    mark_to = tl.load(mark_slots + b, mask=b < rows, other=0)
    live = slot > 0
    now = tl.load(at + slot, mask=live, other=0) + tl.load(accepted + b, mask=live, other=0).to(tl.int32)
    tl.store(at + to, tl.where(to == slot, now % c.R, c.HISTORY), mask=live & (to > 0))
    tl.store(at + mark_to, tl.zeros_like(now) + c.HISTORY, mask=live & (mark_to > 0))


class ConvRing(ConvWindow):
    """A ConvWindow whose slots hold rings of history + T inputs; position ``at`` takes the next one.

    Accepting moves no inputs but those of rows that move, and of crossed boundaries. A slot is settled where its
    inputs lie at the front, as those of a ConvWindow always do: behind ``reset``, ``settle`` and ``prefill`` (which asks
    for settled slots), in ``mark_slots``, and where a row has moved to. Loads are coalesced where the field's channels are neighbours.
    """

    def __init__(self, conv: Conv, pool: StatePool, name: str = "conv") -> None:
        super().__init__(conv, pool, name)
        self.at = pool[f"{name}_at"]  # [slots] int32

    @staticmethod
    def layout(conv: Conv, max_len: int, act_dtype: DType, name: str = "conv") -> layout.Layout:
        """What a slot holds: the inputs of a ConvWindow, and their cursor."""
        return layout.conv(conv, max_len, act_dtype, name), layout.cursor(f"{name}_at")

    def verify(
        self,
        layer: int,
        step: Step,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        fast: bool = False,
    ) -> Tensor:
        """x [B, T, D] with neighbouring channels -> silu(conv(x)) [B, T, D]; zero on null rows and behind ``lens``.

        ``fast``: with conv_math.fast_silu.
        """
        batch, t, d = x.shape
        assert x.stride(2) == 1
        assert x.dtype == self.field.dtype
        assert t <= self.field.shape[-1] - self.conv.history
        out = torch.empty(batch, t, d, dtype=x.dtype, device=x.device)
        if batch:
            few = batch <= FEW
            c = self.shape(t, SMALL if few else BLOCK, fast)
            convolve[(triton.cdiv(d, c.BLOCK), batch)](
                x,
                x.stride(0),
                x.stride(1),
                self.field[layer],
                Steps(*self.field.stride()[1:]),
                self.at,
                step.slots,
                step.lens,
                weight,
                *weight.stride(),
                bias,
                out,
                c,
                num_warps=WARPS // 2 if t <= SHORT and not few else WARPS,
                **OPTIONS,
            )
        return out

    def accept(self, commit: Commit) -> None:
        """Move the cursors, and the inputs of crossed boundaries and of rows that move."""
        self._keep(commit.slots, commit.accepted, commit.next_slots, commit.mark, commit.mark_slots)

    def settle(self, slots: Tensor) -> None:
        """Bring the settled inputs to ``field[:, slots, :, :history]``. Idempotent."""
        nothing = torch.zeros_like(slots)
        self._keep(slots, nothing, nothing, nothing, slots)

    def reset(self, slots: Tensor) -> None:
        """Before the first token the inputs are zeros."""
        super().reset(slots)
        self.at[slots] = self.conv.history

    def _keep(self, slots: Tensor, accepted: Tensor, to: Tensor, mark: Tensor, mark_to: Tensor) -> None:
        batch = slots.shape[0]
        if batch == 0:
            return
        c = self.shape(max(1, self.conv.history), BLOCK)
        keep[(triton.cdiv(c.D, c.BLOCK), batch)](
            self.field,
            self.field.stride(0),
            Steps(*self.field.stride()[1:]),
            self.at,
            slots,
            accepted,
            to,
            mark,
            mark_to,
            self.field.shape[0],
            c,
            num_warps=WARPS,
        )
        advance[(triton.cdiv(batch, 128),)](
            self.at, slots, accepted, to, mark_to, batch, 128, c, num_warps=WARPS
        )

    def shape(self, rows: int, block: int, fast: bool = False) -> Shape:
        return shape_of(self.conv, self.field, rows, block, fast)


def shape_of(conv: Conv, field: Tensor, rows: int, block: int, fast: bool, packed: bool = False) -> Shape:
    """Of a window of ``rows`` tokens over settled inputs in ``field`` [.., D, inputs]."""
    channels, inputs = field.shape[-2:]
    compiled = not triton.knobs.runtime.interpret
    return Shape(
        D=channels,
        W=conv.width,
        DILATION=conv.dilation,
        HISTORY=conv.history,
        R=inputs,
        T=rows,
        PT=power_of_2(rows),
        BLOCK=min(block, power_of_2(channels)),
        COMPILED=compiled,
        FAST=fast and compiled,
        PACKED=packed,
    )
