"""I: checkpoints on the host."""

import random

import pytest
import torch
from rig import Rig, every_policy, shape

from ssmspec.acceptance import Acceptance
from ssmspec.geometry import Window
from ssmspec.measure import traffic
from ssmspec.runtime import exported


@every_policy
@pytest.mark.parametrize("windows", [30, pytest.param(200, marks=pytest.mark.slow)])
def test_a_session_of_restores_has_the_same_tokens_for_every_number_of_drafts(
    policy: str, windows: int, backend: str
) -> None:
    """I1, I2, I4, I5 (llama.cpp#20075, #22673, #23577, #28118; mlx-lm#846, #1446): restored after every third window.

    One text, cut into windows by K in 1, 2, 3, 5; what comes out must not depend on the cut. Rolling back is
    accepting fewer tokens, so nothing is trimmed, and no host checkpoint is needed for it.
    """
    g = shape(num_layers=1, num_k_heads=1, num_v_heads=1, head_v=4)
    for k in (1, 2, 3, 5):
        w, rng = Window(max_len=1 + k), random.Random(k)
        rig, slot, text, wrong = Rig(policy, g, w, backend=backend), 1, 0, 10_000
        rig.start(1)
        for i in range(windows):
            n = rng.randint(1, k + 1)
            drafts = [*range(text, text + n), *range(wrong, wrong + k + 1 - n)]
            step, out = rig.verify([(slot, drafts)])
            rig.accept(step, [n])
            for t in range(n):
                wanted = rig.oracle.after(range(text + t + 1)).output
                assert torch.equal(out[:, 0, t], wanted), f"K={k}, window {i}"
            text, wrong = text + n, wrong + k + 1 - n
            if i % 3 == 2:
                header = exported.Header.of(policy, g, w, text, False)
                file = exported.dumps(exported.take(rig.pool, slot, header))
                rig.pool.poison(0xFF)
                slot = 1 + slot % 3
                exported.put(rig.pool, slot, exported.loads(file), header)
        rig.tokens[slot] = [*range(text)]
        rig.check(slot)


@every_policy
@pytest.mark.parametrize("layers", [1, 3])
def test_what_an_export_costs_is_part_of_the_traffic(policy: str, layers: int) -> None:
    """I5 (llama.cpp#28118, #28120): as many bytes as the tensors of an exported state have."""
    rig = Rig(policy, shape(num_layers=layers)).start(1)
    header = exported.Header.of(policy, rig.g, rig.w, 0, True)
    tensors = exported.take(rig.pool, 1, header).tensors.values()
    cost = traffic.of(policy, rig.g, rig.w, Acceptance(per_position=(0.5, 0.5, 0.5)), steps=1).export_bytes
    assert cost == sum(t.numel() * t.element_size() for t in tensors)
