"""C: the short conv's window. Its oracle is the raw inputs of the accepted tokens."""

import pytest
import torch
from models import qwen
from rig import Rig, every_policy, every_recurrence, index, shape

from ssmspec import layout
from ssmspec.geometry import Arch, Conv, DType, Window
from ssmspec.measure import planner


def inputs(rig: Rig, tokens: list[int]) -> torch.Tensor:
    """conv*: the last W-1 inputs of these tokens, zeros in front, [layers, D, W-1]."""
    history = rig.g.conv.history
    layers = []
    for (x,), _, _ in rig.content.inputs([tokens], len(tokens)):
        layers.append(torch.cat([x.new_zeros(history, x.shape[1]), x])[-history:].mT)
    return torch.stack(layers)


@every_policy
@every_recurrence
@pytest.mark.parametrize("accepted", [1, 2, 3])
def test_the_conv_window_is_rolled_back(arch: Arch, policy: str, accepted: int, backend: str) -> None:
    """C1 (mlx-swift-lm#218)."""
    rig = Rig(policy, shape(arch), backend=backend).start(1)
    rig.prefill(1, 2)
    rig.step({1: 4}, {1: accepted})
    assert torch.equal(rig.settled(1)[1], inputs(rig, rig.tokens[1])), "conv windows are always settled"


@every_policy
def test_the_window_is_widened_by_the_drafts_and_compacted_to_the_front(policy: str, backend: str) -> None:
    """C2 (vllm-project/vllm#44296, #50272: LFM2's short conv): W=3, K=3, a=2."""
    g, w = shape(width=3), Window(max_len=4)
    assert layout.conv(g.conv, w.max_len, g.act_dtype).shape == (128, 3 - 1 + 4)
    assert planner.page_entries(g, w)[0].shape == (128, 3 - 1 + 3), "vLLM's, without the newest input"
    rig = Rig(policy, g, w, backend=backend).start(1)
    step, rows = rig.open({1: 4})
    rig.accept(step, [2])
    assert torch.equal(rig.conv.field[:, 1, :, :2], inputs(rig, rows[1][:2]))


def test_the_widening_is_one_formula() -> None:
    """C2: three settled inputs and K more, 2 bytes each, for K of 0 to 8."""
    for k in range(9):
        page = planner.plan("native", qwen(), Window(max_len=1 + k)).recurrent.page
        assert page[0] == layout.conv(Conv(channels=8192), k, DType.BF16)
        assert page[0].nbytes == 8192 * (3 + k) * 2


@every_policy
@every_recurrence
def test_boundary_and_final_windows_are_told_apart(arch: Arch, policy: str, backend: str) -> None:
    """C3 (vllm-project/vllm-xpu-kernels#544): blocks of 4, 3 tokens computed, 3 accepted."""
    rig = Rig(policy, shape(arch), Window(max_len=4, align=4), backend=backend).start(1)
    rig.step({1: 4}, {1: 3})
    step, rows = rig.open({1: 4})
    rig.accept(step, [3], mark=[1], mark_slots=[1], next_slots=[2])
    tokens = rig.tokens[1] + rows[1][:3]
    rig.tokens |= {1: tokens[:4], 2: tokens}
    rig.check(1, settled=True)
    rig.check(2)
    assert torch.equal(rig.settled(1)[1], inputs(rig, tokens[:4]))
    assert torch.equal(rig.settled(2)[1], inputs(rig, tokens))


def test_a_reset_window_is_zero(backend: str) -> None:
    """C1: whatever the slot held before."""
    rig = Rig("native", backend=backend)
    rig.conv.reset(index(1))
    assert not rig.settled(1)[1].any()
