"""Nothing syncs with the host. Fake tensors raise on int(), .item(), bool masks and nonzero: no GPU is needed."""

import pytest
import torch
from shapes import GATES, STORES, geometry
from torch._subclasses.fake_tensor import FakeTensorMode

from ssmspec import layout
from ssmspec.geometry import Window
from ssmspec.kernels.base import Kernels, Tokens
from ssmspec.kernels.conv import ConvWindow
from ssmspec.kernels.cursors import advance
from ssmspec.policies import POLICIES
from ssmspec.pool import StatePool
from ssmspec.runtime.content import layer_params
from ssmspec.step import Step


def _verify(layer: object, x: Tokens, *args: object, **kwargs: object) -> torch.Tensor:
    return torch.zeros_like(x.v)


def _fold(*args: object) -> None: ...


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("policy", layout.POLICY_NAMES)
def test_a_whole_step_reads_nothing_on_the_host(policy: str, gate: str, store: str) -> None:
    g, w = geometry(gate, store), Window(max_len=4, align=7)
    params = layer_params(g, 0)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fields = (*layout.of(policy, g, w), layout.conv(g.conv, w.max_len, g.act_dtype))
        pool = StatePool.allocate(fields, g.num_layers, 8)
        p = POLICIES[policy](g, w, pool, Kernels(_verify, _fold, advance), params)
        conv = ConvWindow(g.conv, pool)
        step, slots = Step.empty(3, w.max_len), torch.zeros(3, dtype=torch.int64)
        x = torch.zeros(3, 4, g.conv.channels, dtype=torch.bfloat16)
        gates = torch.zeros(3, 4, g.num_v_heads)
        for _ in range(2):
            packed = conv.verify(0, step, x, torch.zeros(g.conv.channels, 4))
            p.verify(0, step, Tokens.unpack(g, packed, gates, None if gate.startswith("mamba2") else gates))
            commit = step.close()
            conv.accept(commit)
            p.accept(commit)
            p.settle(slots)
            p.reset(slots)


def test_the_proof_bites() -> None:
    with FakeTensorMode(), pytest.raises(Exception, match="_local_scalar_dense"):
        int(torch.zeros(1).sum())
