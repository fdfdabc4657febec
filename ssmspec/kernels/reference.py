"""Both primitives in plain torch, one row and one token at a time. The oracle: nothing here may be clever."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ssmspec.geometry import DType, Geometry, Mode, Window
from ssmspec.kernels import cursors
from ssmspec.kernels.base import History, Kernels, Layer, Noise, Plan, Tokens
from ssmspec.kernels.recurrence import Token, advance, output, record, recorded, tokens
from ssmspec.kernels.rounding import round_to, uniform
from ssmspec.kernels.wy import window as wy_window
from ssmspec.pool import NULL_SLOT

Source = tuple[int, int, int] | None  # (seed, position, layer) of stochastic rounding


def _compute(g: Geometry) -> torch.dtype:
    """fp32 is carried between roundings; native with a float64 state is the oracle of both."""
    return torch.float64 if g.state_dtype is DType.FP64 else torch.float32


def _source(noise: Noise | None, b: int, layer: Layer) -> Source:
    return None if noise is None else (int(noise.seed[b]), int(noise.position[b]), layer.params.index)


def _rounded(g: Geometry, s: Tensor, source: Source, ahead: int) -> Tensor:
    """The state as it is stored ``ahead`` tokens behind the checkpoint."""
    draw = None
    if source is not None:
        draw = uniform(s.shape, source[0], source[1] + ahead, source[2], s.device)
    return round_to(s, g.state_dtype, draw)


def _row(layer: Layer, slot: int) -> int:
    """Where a slot's state lies."""
    return slot if layer.rows is None else int(layer.rows[slot])


def _store(g: Geometry, layer: Layer, row: int, s: Tensor, source: Source, ahead: int) -> None:
    """Both copies are cast from the same unrounded state."""
    layer.state[row] = _rounded(g, s, source, ahead)
    if layer.read is not None and g.read_dtype is not None:
        layer.read[row] = round_to(s, g.read_dtype)


@dataclass(frozen=True)
class Past:
    """Committed records in front of a window, oldest first."""

    tokens: list[Token]
    ends: list[bool]  # the token ended an accepted step: native rounded behind it

    @classmethod
    def of(cls, g: Geometry, layer: Layer, slot: int, base: int, count: int, mask: int) -> "Past":
        assert 0 <= count <= layer.capacity, f"slot {slot} has {count} records in a ring of {layer.capacity}"
        positions = [(base + j) % layer.capacity for j in range(count)]
        tokens = [recorded(g, layer, slot, p) for p in positions]
        return cls(tokens, [bool(mask >> p & 1) for p in positions])


def _replay(
    g: Geometry, s: Tensor, past: Past, source: Source, start: int = 0, stop: int | None = None
) -> Tensor:
    """Apply tokens ``start``..``stop``. The state behind the last one is left unrounded, for _store or the window."""
    for j in range(start, len(past.tokens) if stop is None else stop):
        if j and past.ends[j - 1]:
            s = _rounded(g, s, source, j).to(s.dtype)
        s, _ = advance(s, past.tokens[j])
    return s


def _exact_window(
    g: Geometry, s: Tensor, past: Past, tokens: Sequence[Token], source: Source
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Outputs, applied c and state of each token, one after another."""
    s = _replay(g, s, past, source)
    if past.ends and past.ends[-1]:
        s = _rounded(g, s, source, len(past.ends)).to(s.dtype)
    outs, cs, states = [], [], []
    for t in tokens:
        s, c = advance(s, t)
        outs.append(output(s, t))
        cs.append(c)
        states.append(s)
    return outs, cs, states


def _in_front(
    g: Geometry, layer: Layer, slot: int, n: int, history: History | None, source: Source
) -> tuple[int, Past]:
    """Ring position of the window's first record, and what to replay before it; a due flush is carried out."""
    if history is None:
        return 0, Past([], [])
    base, count = int(history.base[slot]), int(history.count[slot])
    mask = 0 if history.ends is None else int(history.ends[slot])
    past = Past.of(g, layer, slot, base, count, mask)
    if count and count + n > history.limit:
        s = _replay(g, layer.state[_row(layer, slot)].to(_compute(g)), past, source)
        _store(g, layer, _row(layer, slot), s, source, count)
        past = Past([], [])
    return base + count, past


def make(g: Geometry, w: Window) -> Kernels:
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
        assert layer.rows is None or snapshots is None
        dtype = torch.float64 if g.state_dtype is DType.FP64 else x.v.dtype
        out = torch.zeros(x.v.shape, dtype=dtype, device=x.v.device)
        for b, (slot, n) in enumerate(zip(rows.tolist(), lens.tolist(), strict=True)):
            if slot <= NULL_SLOT or n <= 0:
                continue
            source = _source(noise, b, layer)
            base, past = _in_front(g, layer, slot, n, history, source)
            reads = layer.read if layer.read is not None and snapshots is None else layer.state
            s = reads[_row(layer, slot)].to(_compute(g))
            row = tokens(g, layer.params, x, b, n, _compute(g))
            if w.mode is Mode.FAST and snapshots is None:
                outs, cs = wy_window(s, past.tokens, row)
                states: list[Tensor] = []
            else:
                outs, cs, states = _exact_window(g, s, past, row, source)
            out[b, :n] = torch.stack(outs)
            for t in range(n):
                if snapshots is not None and int(snapshots[b, t]) > NULL_SLOT:
                    _store(g, layer, int(snapshots[b, t]), states[t], source, t + 1)
                if layer.records and snapshots is None:
                    record(g, layer, row[t], cs[t], slot, (base + t) % layer.capacity)
        return out

    def fold(layers: Sequence[Layer], plan: Plan) -> None:
        for b, slot in enumerate(plan.src.tolist()):
            dst, mark_dst = int(plan.dst[b]), int(plan.mark_dst[b])
            if slot <= NULL_SLOT or (dst <= NULL_SLOT and mark_dst <= NULL_SLOT):
                continue
            base, count, mark = int(plan.base[b]), int(plan.count[b]), int(plan.mark[b])
            mask = 0 if plan.ends is None else int(plan.ends[b])
            for layer in layers:
                source, done = _source(plan.noise, b, layer), 0
                past = Past.of(g, layer, slot, base, max(count, mark), mask)
                s = layer.state[_row(layer, slot)].to(_compute(g))
                for n, to in sorted(((mark, mark_dst), (count, dst))):
                    if to > NULL_SLOT and n == 0:
                        layer.state[_row(layer, to)] = layer.state[_row(layer, slot)]
                    elif to > NULL_SLOT:
                        s = _replay(g, s, past, source, done, n)
                        _store(g, layer, _row(layer, to), s, source, n)
                        done = n

    return Kernels(verify, fold, cursors.advance)
