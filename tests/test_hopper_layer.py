"""The conv in the launch in front of verify gives what the two give apart; on the CPU in values, on a GPU in bits
(test_layer_step.py)."""

from dataclasses import replace

import gluon_on_cpu
import pytest
import torch

from ssmspec import layout
from ssmspec.geometry import Conv, DType, Geometry, Window
from ssmspec.kernels.base import History, Layer, Tokens
from ssmspec.kernels.conv import ConvWindow
from ssmspec.kernels.norm import GatedNorm
from ssmspec.pool import StatePool
from ssmspec.step import Step

pytest.importorskip("triton.experimental.gluon")

import hopper_draws
from hopper_draws import Draw, clone, gdn, near

from ssmspec.kernels import hopper, hopper_convolve, hopper_fetch, hopper_layer, hopper_prepare, hopper_tile
from ssmspec.kernels.conv_triton import ConvRing
from ssmspec.kernels.hopper_shape import Order
from ssmspec.kernels.layer_step import LayerStep, Projected, Weights

on_cpu = hopper_draws.on_cpu


@pytest.fixture
def fused_on_cpu(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = [hopper_tile, hopper_fetch, hopper_prepare, hopper_convolve]
    kernel = gluon_on_cpu.Kernel(hopper_convolve.convolve_window, modules)
    for function in kernel.functions.values():
        function.__globals__["silu"] = lambda y, _: gluon_on_cpu.Value(y.data / (1 + (-y.data).exp()))
    monkeypatch.setattr(hopper_layer, "convolve_window", kernel)
    monkeypatch.setattr(hopper_layer.selftest, "order_of", lambda g: Order.CHAIN)


def windows(g: Geometry, t: int, draw: Draw) -> tuple[ConvWindow, ConvRing]:
    """The same settled inputs; the ring's wrap around."""
    pools = [StatePool.allocate(kind.layout(g.conv, t, g.act_dtype), 1, 6) for kind in (ConvWindow, ConvRing)]
    pools[1].tensors["conv"] = pools[1]["conv"].mT.contiguous().mT
    window, ring = ConvWindow(g.conv, pools[0]), ConvRing(g.conv, pools[1])
    history = g.conv.history
    settled = draw.normal(6, g.conv.channels, history, dtype=torch.bfloat16)
    window.field[0, :, :, :history] = settled
    ring.at.copy_(draw.ints(history + t, 6))
    for slot in range(6):
        for i in range(history):
            ring.field[0, slot, :, (int(ring.at[slot]) - history + i) % (history + t)] = settled[slot, :, i]
    return window, ring


@pytest.mark.parametrize(
    ("policy", "store", "t", "h", "hv", "conv"),
    [
        ("recover", DType.FP32, 3, 1, 2, Conv(width=4)),
        ("every-step", DType.BF16, 4, 2, 2, Conv(width=2)),
        ("checkpointing", DType.FP32, 5, 2, 4, Conv(width=4)),
        ("checkpointing", DType.FP16, 2, 1, 3, Conv(width=3, dilation=2)),
    ],
)
def test_a_fused_layer_has_the_values_of_its_pieces(
    fused_on_cpu: None, policy: str, store: DType, t: int, h: int, hv: int, conv: Conv
) -> None:
    channels = 128 * (2 * h + hv)
    g, draw = replace(gdn(store, h, hv), conv=replace(conv, channels=channels)), Draw(t)
    w = Window(max_len=t, ring_len=11)
    ring = layout.ring(policy, w)
    past = None
    if policy != "recover":
        count = draw.ints((ring.limit or t) + 1, 6).int()
        ends = draw.ints(1 << ring.capacity, 6) if layout.rounds_at_ends(policy, g, w) else None
        past = History(base=draw.ints(ring.capacity, 6).int(), count=count, limit=ring.limit, ends=ends)
    start, verify = draw.layer(g, 6, ring.capacity), hopper.make_verify(g, w, Order.CHAIN)
    inputs = Projected(
        x=draw.normal(4, t, channels + 8, dtype=torch.bfloat16)[..., :channels],
        z=draw.normal(4, t, hv, 128, dtype=torch.bfloat16),
        a=draw.normal(4, t, hv, dtype=torch.bfloat16),
        b=draw.normal(4, t, hv, dtype=torch.bfloat16),
    )
    weights = Weights(
        conv=draw.normal(g.conv.width, channels, dtype=torch.bfloat16).mT,
        norm=draw.normal(128),
        conv_bias=draw.normal(channels) if t % 2 else None,
    )
    step = Step.of([3, 1, 0, 5], [t, t - 1, t, 0], t)
    results = []
    for kind, window in zip((LayerStep, hopper_layer.FusedStep), windows(g, t, draw), strict=True):
        layer = clone(start)
        inner = hopper_layer.FusedVerify(g, w, verify) if kind is hopper_layer.FusedStep else verify

        def run(_: int, step: Step, x: Tokens, layer: Layer = layer, inner: object = inner) -> torch.Tensor:
            return inner(layer, x, step.slots, step.lens, history=past)

        got = kind(g, window, run, GatedNorm.of(g), [weights])(0, step, inputs)
        results.append((got, layer, window))
    (wanted, theirs, plain), (got, ours, rolled) = results
    near(got, wanted)
    near(ours.state, theirs.state)
    for name in start.records:
        near(ours.records[name], theirs.records[name], of=torch.bfloat16)
    for slot, n in ((3, t), (1, t - 1)):
        for i in range(n):
            place = (int(rolled.at[slot]) + i) % (g.conv.history + t)
            assert torch.equal(rolled.field[0, slot, :, place], plain.field[0, slot, :, g.conv.history + i])


def test_what_cannot_be_loaded_in_pieces_goes_piece_by_piece(fused_on_cpu: None) -> None:
    """A window that is no ring, and inputs that do not start at 16 bytes."""
    g, w, draw = replace(gdn(), conv=Conv(channels=512)), Window(max_len=2), Draw(0)
    start, verify = draw.layer(g, 6, 2), hopper.make_verify(g, w, Order.CHAIN)
    shifted = draw.normal(2, 2, 512 + 3, dtype=torch.bfloat16)[..., 3:]
    gates = [draw.normal(2, 2, 2, dtype=torch.bfloat16) for _ in range(2)]
    inputs = Projected(x=shifted, z=draw.normal(2, 2, 2, 128, dtype=torch.bfloat16), a=gates[0], b=gates[1])
    weights = Weights(conv=draw.normal(4, 512, dtype=torch.bfloat16).mT, norm=draw.normal(128))
    outs = []
    for kind in (LayerStep, hopper_layer.FusedStep):
        window, _ = windows(g, 2, Draw(1))
        layer, fused = clone(start), hopper_layer.FusedVerify(g, w, verify)

        def run(_: int, step: Step, x: Tokens, layer: Layer = layer, fused: object = fused) -> torch.Tensor:
            assert not isinstance(x, hopper_layer.Unconvolved)
            return fused(layer, x, step.slots, step.lens)

        outs.append(kind(g, window, run, GatedNorm.of(g), [weights])(0, Step.of([1, 4], [2, 2], 2), inputs))
    assert torch.equal(*outs)
    assert not hopper_layer.aligned(shifted)
    assert hopper_layer.aligned(shifted.contiguous(), inputs.z)
