"""N: one way to choose, one launch to commit, nothing extra where nothing is asked for."""

import pytest
import torch
from rig import W, every_policy, shape
from ssmspec_cli.main import app
from typer.testing import CliRunner

from ssmspec import layout, policies
from ssmspec.acceptance import Acceptance
from ssmspec.kernels.base import Kernels
from ssmspec.kernels.cursors import advance
from ssmspec.measure import traffic
from ssmspec.policies import POLICIES
from ssmspec.pool import StatePool
from ssmspec.runtime.content import layer_params
from ssmspec.step import Step


def test_a_policy_is_chosen_by_its_name_and_nothing_else() -> None:
    """N6 (vllm-project/vllm#49847)."""
    assert tuple(POLICIES) == layout.POLICY_NAMES == ("native", "recover", "every-step", "checkpointing")
    names = ", ".join(POLICIES)
    pool = StatePool.allocate(layout.of("native", shape(), W), 2, 2)
    with pytest.raises(ValueError, match=f"policy='replayssm' is not one of {names}"):
        policies.make("replayssm", shape(), W, pool, layer_params(shape(), 0))
    with pytest.raises(ValueError, match=f"policy='replayssm' is not one of {names}"):
        layout.of("replayssm", shape(), W)


@pytest.mark.parametrize("policy", layout.POLICY_NAMES)
def test_small_batches_are_compared_like_large_ones(policy: str) -> None:
    """N8 (vllm-project/vllm#59735): 1 to 8 rows move 1 to 8 times a row's bytes; there is no other path for few."""
    t = traffic.of(policy, shape(num_layers=3), W, Acceptance(per_position=(0.8, 0.64, 0.512)), steps=100)
    read, write = t.model_step(1)
    for batch in range(1, 9):
        assert t.model_step(batch) == pytest.approx((batch * read, batch * write), rel=1e-12)


@every_policy
@pytest.mark.parametrize("layers", [1, 2, 7])
def test_one_fold_commits_all_layers(policy: str, layers: int) -> None:
    """N9 (vllm-project/vllm#61017, #56082), E14: launches do not grow with layers, and none fails between two of them."""
    g, folds = shape(num_layers=layers), []
    pool = StatePool.allocate(layout.of(policy, g, W), layers, 4)
    kernels = Kernels(lambda *a, **k: torch.empty(0), lambda layers, plan: folds.append(len(layers)), advance)
    p = POLICIES[policy](g, W, pool, kernels, layer_params(g, 0))
    p.accept(Step.of([1, 2], [4, 4], 4, accepted=[2, 4]).close())
    assert folds == ([layers, layers] if policy == "native" else [layers])  # native copies boundaries apart


def test_native_holds_snapshots_and_their_winner_alone() -> None:
    """N10: no records, no cursors of a ring."""
    assert [f.name for f in layout.of("native", shape(), W)] == ["snapshots", "winner"]


def test_mode_all_is_refused_and_the_legal_ones_are_named() -> None:
    """F11 (vllm-project/vllm#39809, #41233, #58997)."""
    result = CliRunner().invoke(app, ["compare", "capacity", "--cache-mode", "all"])
    assert result.exit_code == 2
    assert "none" in result.output
    assert "align" in result.output
