"""Which order of additions plain Triton compiles to here, found by comparing bits before the Gluon kernels are used.

Triton leaves the order of a sum inside a thread, and which product an fma takes, to its compiler: both differ between
versions, and in Triton 3.6 between rows of one kernel. So the known orders are tried on this machine.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssmspec.geometry import Arch, Geometry, Window
from ssmspec.kernels import hopper
from ssmspec.kernels.base import History, Layer, LayerParams, Noise, Tokens, Verify
from ssmspec.kernels.hopper_shape import Order
from ssmspec.kernels.window import Inputs
from ssmspec.pool import storage

ROWS = 2  # of the trial batch
TOKENS = Window(max_len=2)  # of its windows: an order of additions does not depend on how many follow


class OrderError(RuntimeError):
    """No known order of additions gives the bits that it must."""


@dataclass(frozen=True)
class Peer:
    """A kernel whose bits must be met besides our own plain one, such as vLLM's; it is called with snapshots."""

    name: str
    verify: Verify


@dataclass(frozen=True)
class Finding:
    order: Order | None  # None: the Gluon kernels must not be used
    sentence: str


# T = 1 as a constant would unroll the loop, and give other bits than a loop has
@triton.jit(do_not_specialize=["T"])
def plain_window(
    x,
    strides,
    A_log,
    dt_bias,
    state,
    state_stride,
    rows,
    snapshots,
    out,
    T,
    SCALE: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
):
    """The recurrence as one writes it down; the compiler chooses how to add. Grid (V / BV, B * HV)."""
    b, hv = tl.program_id(1).to(tl.int64) // HV, tl.program_id(1) % HV
    v_at, k_at = tl.program_id(0) * BV + tl.arange(0, BV), tl.arange(0, K)
    tile = hv * V * K + v_at[:, None] * K + k_at[None, :]
    h = tl.load(state + tl.load(rows + b) * state_stride + tile).to(tl.float32)
    rate, bias = tl.exp(tl.load(A_log + hv)), tl.load(dt_bias + hv)
    h_k = hv // (HV // H)
    for t in range(T):
        q = tl.load(x.q + b * strides.q[0] + t * strides.q[1] + h_k * strides.q[2] + k_at).to(tl.float32)
        k = tl.load(x.k + b * strides.k[0] + t * strides.k[1] + h_k * strides.k[2] + k_at).to(tl.float32)
        v = tl.load(x.v + b * strides.v[0] + t * strides.v[1] + hv * strides.v[2] + v_at).to(tl.float32)
        a = tl.load(x.a + b * strides.a[0] + t * strides.a[1] + hv * strides.a[2]).to(tl.float32) + bias
        beta = tl.sigmoid(
            tl.load(x.b + b * strides.b[0] + t * strides.b[1] + hv * strides.b[2]).to(tl.float32)
        )
        q *= tl.rsqrt(tl.sum(q * q) + 1e-6)
        k *= tl.rsqrt(tl.sum(k * k) + 1e-6)
        q *= SCALE
        h *= tl.exp(-rate * tl.where(a <= 20.0, tl.log(1 + tl.exp(a)), a))
        v -= tl.sum(h * k[None, :], 1)
        v *= beta
        h += v[:, None] * k[None, :]
        o = tl.sum(h * q[None, :], 1)
        tl.store(out + ((b * T + t) * HV + hv) * V + v_at, o.to(out.dtype.element_ty))
        to = tl.load(snapshots + b * T + t)
        tl.store(state + to * state_stride + tile, h.to(state.dtype.element_ty))


def plain(
    layer: Layer,
    x: Tokens,
    rows: Tensor,
    lens: Tensor,
    *,
    history: History | None = None,
    snapshots: Tensor | None = None,
    noise: Noise | None = None,
) -> Tensor:
    """``Verify`` for full windows with snapshots, by ``plain_window``: tiles and warps are those of vLLM's kernel."""
    assert snapshots is not None
    out = torch.empty_like(x.v, memory_format=torch.contiguous_format)
    (batch, t, heads, values), keys = x.v.shape, x.k.shape[3]
    inputs = Inputs(x.q, x.k, x.v, x.a, x.b)
    plain_window[(values // 32, batch * heads)](
        inputs,
        Inputs(*(tensor.stride()[:3] for tensor in inputs)),
        layer.params.A_log,
        layer.params.dt_bias,
        layer.state,
        layer.state.stride(0),
        rows,
        snapshots,
        out,
        t,
        SCALE=keys**-0.5,
        H=x.k.shape[2],
        HV=heads,
        K=keys,
        V=values,
        BV=32,
        num_warps=4,
        num_stages=3,
        enable_fp_fusion=True,
    )
    return out


OURS = Peer("plain Triton", plain)


@dataclass(frozen=True)
class Trial:
    """A small batch of full windows from random states; every token's state is kept."""

    params: LayerParams
    state: Tensor  # [1 + ROWS + ROWS * T, HV, V, K]: null row, starts, snapshots
    x: Tokens

    @classmethod
    def of(cls, g: Geometry, t: int, device: str) -> "Trial":
        noise = torch.Generator(device).manual_seed(0)

        def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.randn(*shape, generator=noise, device=device).to(dtype)

        h, hv, act = g.num_k_heads, g.num_v_heads, storage(g.act_dtype)
        packed = normal(ROWS, t, 2 * h * g.head_k + hv * g.head_v, dtype=act)
        a, b = normal(ROWS, t, hv, dtype=act), normal(ROWS, t, hv, dtype=act)
        state = normal(1 + ROWS + ROWS * t, hv, g.head_v, g.head_k, dtype=storage(g.state_dtype))
        params = LayerParams(index=0, A_log=normal(hv), dt_bias=normal(hv))
        return cls(params, state, Tokens.unpack(g, packed, a, b))

    def run(self, verify: Verify) -> tuple[Tensor, Tensor]:
        """Outputs and all states."""
        t = self.x.v.shape[1]
        layer = Layer(params=self.params, state=self.state.clone(), read=None, records={})
        rows = 1 + torch.arange(ROWS, device=self.state.device)
        lens = torch.full_like(rows, t)
        snapshots = (1 + ROWS + torch.arange(ROWS * t, device=rows.device)).view(ROWS, t)
        return verify(layer, self.x, rows, lens, snapshots=snapshots), layer.state


@cache
def find_order(
    g: Geometry, w: Window = TOKENS, device: str = "cuda", peers: tuple[Peer, ...] = ()
) -> Finding:
    """The order in which the Gluon kernels have the bits of plain Triton, and of every peer, on a small batch."""
    trial = Trial.of(g, w.max_len, device)
    expected = {peer.name: trial.run(peer.verify) for peer in (OURS, *peers)}
    differs: dict[Order, list[str]] = {}
    for order in Order:
        got = trial.run(hopper.make_verify(g, w, order))
        differs[order] = [name for name, bits in expected.items() if not all(map(torch.equal, got, bits))]
    where = f"Triton {triton.__version__}, {g.state_dtype} state, {g.num_v_heads} heads of {g.head_v} x {g.head_k}"
    for order, names in differs.items():
        if not names:
            return Finding(order, f"{where}: order {order.name} has the bits of {' and of '.join(expected)}")
    tried = "; ".join(f"{order.name} differs from {', '.join(names)}" for order, names in differs.items())
    return Finding(None, f"{where}: no known order of additions has the bits that are promised: {tried}")


def order_of(g: Geometry, w: Window = TOKENS, device: str = "cuda", peers: tuple[Peer, ...] = ()) -> Order:
    """The order that ``find_order`` found; for KDA and Mamba2 that of kernels/window.py, whose source fixes it.

    Raises OrderError with the finding's sentence where there is none.
    """
    if g.arch is not Arch.GDN:
        return Order.CHAIN
    finding = find_order(g, w, device, peers)
    if finding.order is None:
        raise OrderError(finding.sentence)
    return finding.order
