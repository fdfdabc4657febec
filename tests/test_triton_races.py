"""Fifty repeats beside a busy neighbour give the same bits: no program depends on when another one runs."""

import pytest
import torch
from triton_lives import RECORDING, Life, assert_same, policy, shape

from ssmspec.geometry import Mode, Window

REPEATS = 50


@pytest.mark.gpu
@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("gate", ["gdn", "kda", "mamba2"])
@pytest.mark.parametrize("name", RECORDING)
def test_repeats_beside_a_busy_neighbour_give_the_same_bits(name: str, gate: str, mode: Mode) -> None:
    g, w = shape(gate, "bf16", num_layers=1), Window(max_len=4, ring_len=9, mode=mode)
    neighbour, m = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")  # type: ignore[no-untyped-call]
    want = Life(policy(name, g, w), seed=3).live(4)
    for _ in range(REPEATS):
        with torch.cuda.stream(neighbour):
            for _ in range(8):
                m = (m @ m).clamp(-1, 1)
        assert_same(want, Life(policy(name, g, w), seed=3).live(4), name)
