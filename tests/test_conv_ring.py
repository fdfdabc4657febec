"""A ring of inputs gives what a conv window gives, and moves none of them while requests stay in their slots."""

import random

import pytest
import torch
from torch import Tensor
from triton_lives import DEVICE, ON_GPU, ints, staged

from ssmspec import layout
from ssmspec.geometry import Conv, DType, Window
from ssmspec.kernels.conv import ConvWindow
from ssmspec.pool import StatePool

pytestmark = [pytest.mark.interpreter, pytest.mark.gpu]

CHANNELS = 1100 if ON_GPU else 10  # no multiple of a program's
CONVS = {
    "w2": Conv(channels=CHANNELS, width=2),
    "w3": Conv(channels=CHANNELS, width=3),
    "w4": Conv(channels=CHANNELS, width=4),
    "ple": Conv(channels=CHANNELS, width=4, dilation=3),  # Qwen4Exp, as in test_conv.py
}
LAYERS, SLOTS = 2, 14


def pair(c: Conv, t: int, dtype: DType, neighbours: bool = True) -> tuple[ConvWindow, ConvWindow]:
    """A window and a ring over memory that is NaN; the ring's channels are neighbours in memory, or its inputs are."""
    from ssmspec.kernels.conv_triton import ConvRing

    pools = [
        StatePool.allocate(fields, LAYERS, SLOTS, DEVICE)
        for fields in ((layout.conv(c, t, dtype),), ConvRing.layout(c, t, dtype))
    ]
    for pool in pools:
        pool.poison(0xFF)
    if neighbours:
        pools[1].tensors["conv"] = pools[1]["conv"].mT.contiguous().mT
    return ConvWindow(c, pools[0]), ConvRing(c, pools[1])


def draw(gen: torch.Generator, *sizes: int, dtype: DType = DType.FP32) -> Tensor:
    return torch.randn(*sizes, generator=gen).to(getattr(torch, dtype)).to(DEVICE)


def assert_close(want: Tensor, got: Tensor) -> None:
    """On a GPU all bits; NumPy's exp and torch's on a CPU may differ in the last."""
    if ON_GPU:
        assert torch.equal(want, got)
    else:
        torch.testing.assert_close(
            want, got, rtol=2**-7 if want.dtype is torch.bfloat16 else 2**-21, atol=2**-40
        )


@pytest.mark.parametrize(("name", "t", "dtype"), [
    ("w4", 4, DType.BF16), ("w4", 3, DType.FP32), ("w2", 1, DType.FP32), ("w3", 16, DType.BF16), ("ple", 5, DType.BF16),
])  # fmt: skip
def test_outputs_and_settled_inputs_are_those_of_a_window(name: str, t: int, dtype: DType) -> None:
    c, gen, rng = CONVS[name], torch.Generator().manual_seed(0), random.Random(0)
    window, ring = pair(c, t, dtype, neighbours=name != "w3")
    weight, bias = draw(gen, c.channels, c.width), draw(gen, c.channels) if t % 2 else None
    rows, free = [1, 2, 3], list(range(4, SLOTS))
    for conv in (window, ring):
        conv.reset(ints(*rows))
    for _ in range(40 if ON_GPU else 2 + 12 // t):
        rng.shuffle(rows)
        slots, lens = [*rows, 0, -1], [rng.randint(1, t) for _ in rows] + [0, t]
        accepted = [rng.randint(0, n) for n in lens]
        mark, marks, to = [0] * 5, [0] * 5, [*slots]
        for i, slot in enumerate(rows):
            if accepted[i] and rng.random() < 0.4:
                spare, mark[i] = free.pop(0), rng.randint(1, accepted[i])
                to[i], marks[i] = rng.choice([(spare, slot), (slot, spare), (spare, spare)])
                mark[i] = accepted[i] if to[i] == marks[i] else mark[i]
        step = staged(
            Window(max_len=t), slots, lens, accepted=accepted, mark=mark, mark_slots=marks, next_slots=to
        )
        x = draw(gen, LAYERS, 5, t, c.channels + 6, dtype=dtype)[..., 3 : 3 + c.channels]
        for layer in range(LAYERS):
            for b, n in enumerate(lens):
                x[layer, b, n if slots[b] > 0 else 0 :] = torch.nan
            a, b = (conv.verify(layer, step, x[layer], weight, bias) for conv in (window, ring))
            for i, n in enumerate(lens):
                assert_close(a[i, : n if slots[i] > 0 else 0], b[i, : n if slots[i] > 0 else 0])
                assert not b[i, n if slots[i] > 0 else 0 :].any()
        commit = step.close()
        for conv in (window, ring):
            conv.accept(commit)
        crossed = [s for s in marks if s]
        settle = rng.sample(to[:3], rng.randint(0, 3))
        ring.settle(ints(*settle))
        for slot in [*crossed, *settle]:
            settled = (conv.field[:, slot, :, : c.history] for conv in (window, ring))
            assert torch.equal(*settled)
        free += sorted({*rows, *crossed} - {*to})
        rows = to[:3]


def test_accepting_moves_no_input_of_a_request_that_stays() -> None:
    _, ring = pair(CONVS["w4"], 4, DType.BF16)
    ring.reset(ints(1, 2))
    gen = torch.Generator().manual_seed(1)
    for accepted in ([3, 1], [0, 4], [2, 2]):
        step = staged(Window(max_len=4), [1, 2], [4, 4], accepted=accepted)
        for layer in range(LAYERS):
            ring.verify(layer, step, draw(gen, 2, 4, CHANNELS, dtype=DType.BF16), draw(gen, CHANNELS, 4))
        before = ring.field.clone()
        ring.accept(step.close())
        assert torch.equal(before.view(torch.int16), ring.field.view(torch.int16))
    assert ring.at[1:3].tolist() == [(3 + 3 + 0 + 2) % 7, (3 + 1 + 4 + 2) % 7]


def test_a_prompt_starts_in_a_settled_ring() -> None:
    gen, c = torch.Generator().manual_seed(2), CONVS["w4"]
    window, ring = pair(c, 4, DType.FP32)
    weight, first, chunk = draw(gen, CHANNELS, 4), draw(gen, 1, 4, CHANNELS), draw(gen, 1, 9, CHANNELS)
    outs = []
    for conv in (window, ring):
        conv.reset(ints(1))
        step = staged(Window(max_len=4), [1], [4], accepted=[3])
        for layer in range(LAYERS):
            conv.verify(layer, step, first, weight)
        conv.accept(step.close())
        if conv is ring:
            ring.settle(ints(1))
        outs += [conv.prefill(0, ints(1), ints(9), chunk, weight)]
        step = staged(Window(max_len=4), [1], [2], accepted=[2])
        outs += [conv.verify(0, step, first[:, :2], weight)]
    assert torch.equal(outs[0], outs[2])
    assert_close(outs[1], outs[3])


@pytest.mark.skipif(not ON_GPU, reason="needs CUDA graphs")
def test_a_captured_step_moves_its_cursors() -> None:
    gen, c = torch.Generator().manual_seed(3), CONVS["w4"]
    window, ring = pair(c, 4, DType.BF16)
    weight, x = draw(gen, CHANNELS, 4), draw(gen, 2, 4, CHANNELS, dtype=DType.BF16)
    for conv in (window, ring):
        conv.reset(ints(1, 2))
    step = staged(Window(max_len=4), [0, 0], [0, 0])

    def run(conv: ConvWindow) -> Tensor:
        out = conv.verify(0, step, x, weight)
        conv.accept(step.close())
        return out

    run(ring)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(ring)
    for accepted in ([1, 4], [0, 3], [2, 1]):
        x.copy_(draw(gen, 2, 4, CHANNELS, dtype=DType.BF16))
        step.stage([2, 1], [4, 4], accepted=accepted)
        graph.replay()
        step.stage([2, 1], [4, 4], accepted=accepted)
        assert torch.equal(out, run(window))


@pytest.mark.skipif(not ON_GPU, reason="4 billion numbers need a GPU")
def test_silu_of_every_finite_number_has_torchs_bits() -> None:
    """In fp32; but those below 2^-120, a quarter of which need not be a normal number."""
    from silu_everywhere import silu_of

    step = 2**26
    for first in range(0, 2**32, step):
        y = torch.arange(first, first + step, device=DEVICE).to(torch.int32).view(torch.float32)
        want, got = torch.nn.functional.silu(y), silu_of(y)
        same = (want.view(torch.int32) == got.view(torch.int32)) | (want.isnan() & got.isnan())
        assert (same | (y.abs() < 2.0**-120) | y.isinf()).all(), y[~same][:3]


@pytest.mark.skipif(not ON_GPU, reason="approximations of a GPU")
def test_fast_modes_silu_is_right_to_21_bits_of_its_argument() -> None:
    """Every bf16 number, and as many between them."""
    from silu_everywhere import silu_of

    y = torch.arange(0, 2**32, 2**11, device=DEVICE).to(torch.int32).view(torch.float32)
    y = torch.where(y.isfinite(), y, 0.0)
    want, got = torch.nn.functional.silu(y.double()), silu_of(y, fast=True)
    assert ((got - want).abs() <= 2.0**-21 * y.double().abs()).all()
