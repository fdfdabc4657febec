"""The conv window against its full history. All policies share it, so no comparison of policies can see it."""

import random

import pytest
import torch

from ssmspec import layout
from ssmspec.geometry import Conv, DType
from ssmspec.kernels.conv import ConvWindow
from ssmspec.pool import StatePool
from ssmspec.step import Step

CONVS = {
    "w2": Conv(channels=3, width=2),
    "w3": Conv(channels=3, width=3),
    "w4": Conv(channels=3, width=4),
    "ple": Conv(
        channels=3, width=4, dilation=3
    ),  # Qwen4Exp: dilation = ngram_size, width = ple_conv_kernel_size
}
T = 4


def convolve(x: torch.Tensor, c: Conv, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The definition: x [N, D] all inputs since the start -> outputs [N, D]."""
    out = torch.zeros_like(x)
    for t in range(len(x)):
        y = bias.clone()
        for tap in range(c.width):
            at = t - (c.width - 1 - tap) * c.dilation
            if at >= 0:
                y += weight[:, tap] * x[at]
        out[t] = y * torch.sigmoid(y)
    return out


def make(c: Conv, slots: int = 12) -> ConvWindow:
    pool = StatePool.allocate((layout.conv(c, T, DType.FP32),), 1, slots)
    pool.poison(0xFF)
    return ConvWindow(c, pool)


@pytest.mark.parametrize("name", CONVS)
def test_the_window_equals_the_full_history(name: str) -> None:
    c, rng = CONVS[name], random.Random(0)
    conv, weight, bias = make(c), torch.randn(3, c.width), torch.randn(3)
    rows, past, snapshots = [1, 2, 3], {}, 0
    conv.reset(torch.tensor(rows))
    for s, n in zip(rows, (1, 7, 2), strict=True):  # prompts in two chunks, a one-token tail among them
        x = torch.randn(1, n, 3)
        y = [
            conv.prefill(0, torch.tensor([s]), torch.tensor([m]), x[:, at : at + m], weight, bias)[0]
            for at, m in ((0, n - 1), (n - 1, 1))
            if m
        ]
        past[s] = x[0]
        torch.testing.assert_close(torch.cat(y), convolve(past[s], c, weight, bias))
    for _ in range(60):
        rng.shuffle(rows)
        lens = [rng.randint(1, T) for _ in rows]
        accepted = [rng.randint(0, n) for n in lens]
        mark = [rng.randint(0, n) for n in lens]
        x = torch.randn(5, T, 3)
        step = Step.of([*rows, 0, -1], lens, T, accepted=accepted, mark=mark, mark_slots=[8, 9, 10])
        y = conv.verify(0, step, x, weight, bias)
        for i, s in enumerate(rows):
            full = convolve(torch.cat([past[s], x[i, : lens[i]]]), c, weight, bias)
            torch.testing.assert_close(y[i, : lens[i]], full[-lens[i] :])
        conv.accept(step.close())
        for i, s in enumerate(rows):
            if 0 < mark[i] <= accepted[i]:
                snapshots += 1
                at_mark = torch.cat([torch.zeros(c.history, 3), past[s], x[i, : mark[i]]])[-c.history :]
                assert torch.equal(conv.field[0, 8 + i, :, : c.history], at_mark.T)
            past[s] = torch.cat([past[s], x[i, : accepted[i]]])
            settled = torch.cat([torch.zeros(c.history, 3), past[s]])[-c.history :]
            assert torch.equal(conv.field[0, s, :, : c.history], settled.T)
    assert snapshots > 20


def test_verify_leaves_the_settled_inputs_alone() -> None:
    """A conv state rolled inside verify: sgl-project/sglang#39219."""
    conv = make(CONVS["w4"])
    conv.reset(torch.tensor([1, 2]))
    before = conv.field.clone()
    conv.verify(0, Step.of([1], [4], T), torch.randn(1, T, 3), torch.randn(3, 4))
    assert torch.equal(conv.field[:, :, :, :3].nan_to_num(), before[:, :, :, :3].nan_to_num())
    assert torch.equal(conv.field[:, 2:].nan_to_num(), before[:, 2:].nan_to_num())


def test_a_request_that_moves_takes_its_window_along() -> None:
    conv, x = make(CONVS["w4"]), torch.randn(1, T, 3)
    conv.reset(torch.tensor([1]))
    step = Step.of([1], [4], T, accepted=[3], next_slots=[5], mark=[2], mark_slots=[1])
    conv.verify(0, step, x, torch.randn(3, 4))
    conv.accept(step.close())
    assert torch.equal(conv.field[0, 5, :, :3], x[0, :3].T)
    assert torch.equal(conv.field[0, 1, :, :3], torch.cat([torch.zeros(1, 3), x[0, :2]]).T)
