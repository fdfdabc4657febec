"""Random layers and windows for the Hopper kernels, and a CPU to run them on."""

from collections.abc import Sequence

import gluon_on_cpu
import pytest
import torch
from torch import Tensor

from ssmspec.geometry import Arch, DType, Geometry
from ssmspec.kernels import (
    hopper,
    hopper_call,
    hopper_fetch,
    hopper_prepare,
    hopper_tile,
    hopper_verify,
)
from ssmspec.kernels.base import History, Layer, LayerParams, Tokens, Verify
from ssmspec.pool import storage


def gdn(store: DType = DType.FP32, h: int = 1, hv: int = 2) -> Geometry:
    return of_arch(Arch.GDN, store, h, hv)


def of_arch(arch: Arch, store: DType = DType.FP32, h: int = 1, hv: int = 2) -> Geometry:
    k, v = hopper.HEAD[arch]
    return Geometry(
        arch=arch, num_layers=1, num_k_heads=h, num_v_heads=hv, head_k=k, head_v=v, state_dtype=store
    )


class Draw:
    """Random tensors and numbers from one seed."""

    def __init__(self, seed: int, device: str = "cpu") -> None:
        self.noise, self.device = torch.Generator().manual_seed(seed), device

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=self.noise).to(dtype).to(self.device)

    def ints(self, top: int, *shape: int) -> Tensor:
        return torch.randint(0, top, shape, generator=self.noise).to(self.device)

    def params(self, g: Geometry) -> LayerParams:
        bias = (g.num_v_heads, g.head_k) if g.arch is Arch.KDA else (g.num_v_heads,)
        skip = self.normal(g.num_v_heads) if g.arch is Arch.MAMBA2 else None
        return LayerParams(index=0, A_log=self.normal(g.num_v_heads) / 2, dt_bias=self.normal(*bias), D=skip)

    def tokens(self, g: Geometry, batch: int, t: int) -> Tokens:
        h, hv, act = g.num_k_heads, g.num_v_heads, torch.bfloat16
        packed = self.normal(batch, t, 2 * h * g.head_k + hv * g.head_v, dtype=act)
        gate = (hv, g.head_k) if g.arch is Arch.KDA else (hv,)
        a = self.normal(batch, t, *gate, dtype=act)
        return Tokens.unpack(
            g, packed, a, None if g.arch is Arch.MAMBA2 else self.normal(batch, t, hv, dtype=act)
        )

    def layer(self, g: Geometry, slots: int, ring: int) -> Layer:
        hv = g.num_v_heads
        k = self.normal(slots, g.num_k_heads, ring, g.head_k, dtype=torch.bfloat16)
        decay = (slots, hv, ring, g.head_k) if g.arch is Arch.KDA else (slots, hv, ring)
        records = {"k": k, "decay": torch.rand(decay, generator=self.noise).to(self.device)}
        if g.arch is Arch.MAMBA2:
            records["dt"] = self.normal(slots, hv, ring)
            records["x"] = self.normal(slots, hv, ring, g.head_v, dtype=torch.bfloat16)
        else:
            records["rnorm"] = torch.rsqrt(k.float().square().sum(-1) + 1e-6)
            records["c"] = self.normal(slots, hv, ring, g.head_v)
        state = self.normal(slots, hv, g.head_v, g.head_k, dtype=storage(g.state_dtype))
        return Layer(params=self.params(g), state=state, read=None, records=records if ring else {})


def clone(layer: Layer) -> Layer:
    records = {name: field.clone() for name, field in layer.records.items()}
    return Layer(params=layer.params, state=layer.state.clone(), read=None, records=records)


def each(
    verifies: Sequence[Verify], start: Layer, x: Tokens, rows: Tensor, lens: Tensor, past: History | None
) -> list[tuple[Tensor, Layer]]:
    """What every verify makes of a layer of its own: outputs, and the layer behind them."""
    layers = [clone(start) for _ in verifies]
    return [(f(layer, x, rows, lens, history=past), layer) for f, layer in zip(verifies, layers, strict=True)]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = [hopper_tile, hopper_fetch, hopper_verify, hopper_prepare]
    for name in ("verify_window", "prepare_window"):
        monkeypatch.setattr(hopper_call, name, gluon_on_cpu.Kernel(getattr(hopper_call, name), modules))
    monkeypatch.setattr(hopper_call, "at_once", lambda *_: 3)  # programs: each meets several tiles


def near(got: Tensor, wanted: Tensor, of: torch.dtype | None = None) -> None:
    """Two roundings of the dtype, or of the dtype ``of`` that was rounded to on the way; sums of 128 fp32 terms in
    another order differ by 2^-20."""
    eps = 2 * max(torch.finfo(of or got.dtype).eps, 2**-20)
    torch.testing.assert_close(got.float(), wanted.float(), rtol=eps, atol=eps)
