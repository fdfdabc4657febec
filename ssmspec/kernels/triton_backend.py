"""The backend ``triton``: both primitives as Triton kernels."""

from collections.abc import Callable, Iterable, Sequence
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssmspec.geometry import Arch, DType, Geometry, Mode, Window
from ssmspec.kernels import hopper, selftest
from ssmspec.kernels.base import History, Kernels, Layer, Noise, Plan, Tokens, Verify
from ssmspec.kernels.fast import make_verify
from ssmspec.kernels.fold import VECTORS, Ports, fold
from ssmspec.kernels.launch import Tile, fold_span, fold_tile, head_tile, power, window_tile
from ssmspec.kernels.prepare import prepare
from ssmspec.kernels.triton_records import Records, Shape
from ssmspec.kernels.window import Inputs, Past, Prepared, window

_TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int64: tl.int64,
}
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
    return Kernels(_verify(g, w), _Fold(g))


def _shape(g: Geometry, tile: Tile, ring: int) -> Shape:
    return Shape(
        ARCH=str(g.arch),
        BOUND=g.gate_lower_bound,
        SOFTPLUS=g.dt_softplus,
        SCALE=g.head_k**-0.5,
        H=g.num_k_heads,
        HV=g.num_v_heads,
        PHV=power(g.num_v_heads),
        K=g.head_k,
        V=g.head_v,
        R=ring,
        PK=power(g.head_k),
        LK=tile.lanes_k,
        LV=tile.lanes_v,
        NV=tile.lane_rows,
        C=tile.chunk,
        COMPILED=not triton.knobs.runtime.interpret,
    )


def _rows_of(name: str, t: Tensor) -> int:
    """Elements from row to row; a row itself must be packed, the rows may lie apart."""
    if not t[0].is_contiguous():
        raise ValueError(f"{name} has strides {t.stride()}: only the first may skip elements")
    return t.stride(0)


def _inputs(x: Tokens) -> tuple[Inputs, Inputs]:
    for name in ("q", "k", "v"):
        if getattr(x, name).stride(-1) != 1:
            raise ValueError(f"{name} has strides {getattr(x, name).stride()}: the last must be 1")
    if x.a.dim() == 4 and x.a.stride(-1) != 1:
        raise ValueError(f"a has strides {x.a.stride()}: the last must be 1")
    tokens = Inputs(x.q, x.k, x.v, x.a, x.b)
    return tokens, _strides(Inputs, tokens)


def _strides(kind: Callable[..., Any], tensors: Iterable[Tensor | None]) -> Any:
    """Over (batch, token, head), in the same places."""
    return kind(*(None if t is None else t.stride()[:3] for t in tensors))


def _records(layer: Layer) -> tuple[Records, Records]:
    steps = {name: _rows_of(f"rec_{name}", t) for name, t in layer.records.items()}
    return Records(**layer.records), Records(**steps)


def _column(name: str, t: Tensor) -> Tensor:
    """One number per batch row; a strided column of a table is copied, since the kernels read neighbours."""
    assert t.dim() == 1, name
    return t.contiguous()


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
        rows, lens = _column("rows", rows), _column("lens", lens)
        past = Past() if history is None else Past(history.base, history.count, history.ends)
        records, record_steps = _records(layer) if snapshots is None else (Records(), Records())
        heads, tile = head_tile(g), window_tile(g, batch)
        p, made = layer.params, _scratch(g, x)
        blocks = triton.cdiv(g.num_k_heads, heads.lanes_v) + 1
        if g.arch is Arch.KDA:
            blocks += triton.cdiv(g.num_v_heads, heads.lanes_v)
        prepare[(t, blocks, batch)](
            *_inputs(x),
            p.A_log,
            p.dt_bias,
            made.k,
            made.q,
            made.decay,
            made.beta,
            rows,
            lens,
            t,
            past,
            records,
            record_steps,
            _shape(g, heads, layer.capacity),
            **heads.options,
        )
        window[(triton.cdiv(g.head_v, tile.rows), g.num_v_heads, batch)](
            made,
            _strides(Prepared, made),
            p.A_log,
            p.dt_bias,
            p.D,
            layer.state,
            _rows_of("state", layer.state),
            layer.rows,
            rows,
            lens,
            out,
            t,
            None if snapshots is None else snapshots.contiguous(),
            past,
            0 if history is None else history.limit,
            records,
            record_steps,
            _shape(g, tile, layer.capacity),
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
        return make_verify(g, w, exact)
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
        verify = self.window if x.v.shape[1] <= hopper.MAX_LEN else self.longer
        return verify(layer, x, rows, lens, history=history, snapshots=snapshots, noise=noise)


class _Fold:
    """Fold every layer in one launch; the table of addresses is built at the first call for a set of layers."""

    def __init__(self, g: Geometry) -> None:
        self.g, self.tile = g, fold_tile(g)
        self.layers: Sequence[Layer] | None = None
        self.table, self.align = torch.empty(0), 1

    def __call__(self, layers: Sequence[Layer], plan: Plan) -> None:
        assert plan.noise is None
        batch = plan.src.numel()
        if batch == 0 or not layers:
            return
        if self.layers is not layers:
            self.layers, (self.table, self.align) = layers, _table(layers)
        span = fold_span(self.g, len(layers), batch)
        types = Ports(**{name: _TYPES[t.dtype] for name, t in _ports(layers[0]).items()})
        fold[
            (
                triton.cdiv(self.g.head_v, self.tile.rows) * self.g.num_v_heads,
                batch,
                triton.cdiv(len(layers), span),
            )
        ](
            self.table,
            len(layers),
            span,
            *(
                _column(name, getattr(plan, name))
                for name in ("src", "base", "count", "dst", "mark", "mark_dst")
            ),
            plan.ends,
            types,
            self.align,
            _shape(self.g, self.tile, layers[0].capacity),
            **self.tile.options,
        )


def _ports(layer: Layer) -> dict[str, Tensor]:
    ports = {
        "state": layer.state,
        **layer.records,
        "A_log": layer.params.A_log,
        "dt_bias": layer.params.dt_bias,
    }
    return ports if layer.rows is None else {**ports, "rows": layer.rows}


def _table(layers: Sequence[Layer]) -> tuple[Tensor, int]:
    """[layers, ports, 2] int64: addresses, and elements per slot; and what divides all of those read in vectors."""
    table = torch.zeros(len(layers), len(Ports._fields), 2, dtype=torch.int64)
    align = 16
    for i, layer in enumerate(layers):
        for name, t in _ports(layer).items():
            entry = _signed(t.data_ptr()), _rows_of(name, t)
            table[i, Ports._fields.index(name)] = torch.tensor(entry)
            if name in VECTORS:
                align = gcd(align, *entry)
    return table.to(layers[0].state.device), align


def _signed(address: int) -> int:
    """The same 64 bits as an int64."""
    return address - 2**64 if address >= 2**63 else address
