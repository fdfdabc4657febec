"""The backend ``triton``: both primitives as Triton kernels."""

from dataclasses import replace

import torch
import triton
from torch import Tensor

from ssmspec.geometry import Arch, DType, Geometry, Mode, Window
from ssmspec.kernels import fast_layer, hopper, prepare, selftest
from ssmspec.kernels.base import History, Kernels, Layer, Noise, Tokens, Verify
from ssmspec.kernels.fast import make_verify
from ssmspec.kernels.fast_shape import Cursors
from ssmspec.kernels.fold_layers import Fold
from ssmspec.kernels.launch import column, row_step, shape_of, strides, window_tile
from ssmspec.kernels.prepare import Room
from ssmspec.kernels.triton_cursors import advance
from ssmspec.kernels.triton_records import Records
from ssmspec.kernels.window import Inputs, Past, Prepared, window

_STATES = (DType.FP32, DType.BF16, DType.FP16)


def make(g: Geometry, w: Window) -> Kernels:
    """Raises ValueError where these kernels do not serve the geometry or the window."""
    if g.state_dtype not in _STATES:
        raise ValueError(f"backend=triton: state_dtype={g.state_dtype} is not one of {', '.join(_STATES)}")
    if g.stochastic:
        raise ValueError(
            "backend=triton: stochastic=True is not offered; backend=torch rounds stochastically"
        )
    if g.read_dtype is not None:
        raise ValueError(
            f"backend=triton: read_dtype={g.read_dtype} is not offered; backend=torch keeps read copies"
        )
    if not 16 <= g.head_k <= 256:
        raise ValueError(f"backend=triton: head_k={g.head_k} is outside 16..256")
    return Kernels(_verify(g, w), Fold(g), advance)


def _check_packed(x: Tokens) -> None:
    for name in ("q", "k", "v"):
        if getattr(x, name).stride(-1) != 1:
            raise ValueError(f"{name} has strides {getattr(x, name).stride()}: the last must be 1")
    if x.a.dim() == 4 and x.a.stride(-1) != 1:
        raise ValueError(f"a has strides {x.a.stride()}: the last must be 1")


def _inputs(x: Tokens) -> Inputs:
    _check_packed(x)
    return Inputs(x.q, x.k, x.v, x.a, x.b)


def _records(layer: Layer) -> tuple[Records, Records]:
    steps = {name: row_step(f"rec_{name}", t) for name, t in layer.records.items()}
    return Records(**layer.records), Records(**steps)


class _Exact:
    """Verify, one token after another."""

    def __init__(self, g: Geometry) -> None:
        self.g = g

    def __call__(
        self,
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
        assert layer.rows is None or snapshots is None
        g, (batch, t) = self.g, x.v.shape[:2]
        out = torch.empty(x.v.shape, dtype=x.v.dtype, device=x.v.device)
        if batch == 0:
            return out
        rows, lens = column("rows", rows), column("lens", lens)
        past = Past() if history is None else Past(history.base, history.count, history.ends)
        records = _records(layer) if snapshots is None else (Records(), Records())
        tile, made = window_tile(g, t, batch, history is not None), _scratch(g, x)
        limit = 0 if history is None else history.limit
        room = Room(made.decay, made.beta, made.k, made.q)
        at = Cursors(rows, None, lens, past.base, past.count, limit)
        prepare.launch(g, layer, _inputs(x), room, at, records)
        window[(triton.cdiv(g.head_v, tile.rows), g.num_v_heads, batch)](
            made,
            strides(Prepared, made),
            layer.params.D,
            layer.state,
            row_step("state", layer.state),
            layer.rows,
            rows,
            lens,
            out,
            t,
            None if snapshots is None else snapshots.contiguous(),
            past,
            limit,
            *records,
            shape_of(g, tile, layer.capacity),
            **tile.options,
        )
        return out


def _scratch(g: Geometry, x: Tokens) -> Prepared:
    """Room for what ``prepare`` makes of the tokens."""

    def room(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=x.v.device)

    batch, t, hv = *x.v.shape[:2], g.num_v_heads
    decay = room(batch, t, hv, g.head_k) if g.arch is Arch.KDA else room(batch, t, hv)
    q, k = room(2, *x.k.shape)
    return Prepared(q, k, x.v, decay, room(batch, t, hv))


def _verify(g: Geometry, w: Window) -> Verify:
    exact = _Exact(g)
    if w.mode is Mode.FAST:
        # KDA's alone: its order of sums needs no trial, and its long windows are exact
        handed = _verify(g, replace(w, mode=Mode.EXACT)) if g.arch is Arch.KDA else exact
        return make_verify(g, w, handed, fast_layer.couple)
    return _Windows(g, w, exact) if hopper.runs_here() and hopper.unsupported(g, w) is None else exact


class _Windows:
    """The Hopper kernels for windows; prompt chunks longer than theirs, any number of tokens, go another way."""

    def __init__(self, g: Geometry, w: Window, longer: Verify) -> None:
        self.window, self.longer = hopper.make_verify(g, w, selftest.order_of(g)), longer

    def __call__(
        self,
        layer: Layer,
        x: Tokens,
        rows: Tensor,
        lens: Tensor,
        *,
        history: History | None = None,
        snapshots: Tensor | None = None,
        noise: Noise | None = None,
    ) -> Tensor:
        _check_packed(x)
        verify = self.window if x.v.shape[1] <= hopper.MAX_LEN else self.longer
        return verify(layer, x, rows, lens, history=history, snapshots=snapshots, noise=noise)
