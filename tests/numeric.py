"""A policy on made-up layer inputs, without a conv in front: the numbers that go in are the numbers of the test."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ssmspec import layout, policies
from ssmspec.geometry import Arch, Geometry, Window
from ssmspec.kernels.base import LayerParams, Tokens
from ssmspec.pool import StatePool, storage
from ssmspec.step import Step


def near(a: Tensor, exact: Tensor) -> bool:
    """Fast mode's bound with fp32 state and records: sums of at most K + L + T = 36 terms in another order.

    36 roundings of 2**-24 in a row, twice (c, then the sum that uses it), relative to the largest value.
    """
    return bool((a - exact).abs().max() <= 72 * 2.0**-24 * exact.abs().max())


@dataclass(frozen=True)
class Inputs:
    x: Tensor  # [B, T, D] packed
    a: Tensor  # [B, T, HV] or, for KDA, [B, T, HV, K]
    b: Tensor  # [B, T, HV]

    def part(self, start: int, stop: int) -> "Inputs":
        return Inputs(self.x[:, start:stop], self.a[:, start:stop], self.b[:, start:stop])

    def of(self, g: Geometry) -> Tokens:
        return Tokens.unpack(g, self.x, self.a, None if g.arch is Arch.MAMBA2 else self.b)


def params(g: Geometry, decay: float, a_log: float = 0.0) -> list[LayerParams]:
    """Constants with which a gate input of 0 decays by ``decay``: exp(-exp(A_log) softplus(dt_bias))."""
    rate = -math.log(decay) / math.exp(a_log)
    bias = rate if rate > 20 or not g.dt_softplus else math.log(math.expm1(rate))
    size = (g.num_v_heads, g.head_k) if g.arch is Arch.KDA else (g.num_v_heads,)
    skip = torch.ones(g.num_v_heads) if g.arch is Arch.MAMBA2 else None
    return [
        LayerParams(
            index=i, A_log=torch.full((g.num_v_heads,), a_log), dt_bias=torch.full(size, bias), D=skip
        )
        for i in range(g.num_layers)
    ]


def tokens(
    g: Geometry, *, seed: int, n: int = 4, batch: int = 1, gate: float = 0.0, beta: float = 0.0
) -> Inputs:
    """Normal inputs; gate inputs around ``gate``, beta = sigmoid(``beta``)."""
    gen = torch.Generator().manual_seed(seed)
    act = storage(g.act_dtype)
    channels = 2 * g.num_k_heads * g.head_k + g.num_v_heads * g.head_v
    size = (g.num_v_heads, g.head_k) if g.arch is Arch.KDA else (g.num_v_heads,)
    return Inputs(
        torch.randn(batch, n, channels, generator=gen).to(act),
        (gate + 0.1 * torch.randn(batch, n, *size, generator=gen)).to(act),
        torch.full((batch, n, g.num_v_heads), beta, dtype=act),
    )


class Numeric:
    """One request per row in slots 1.., one after another; ``row`` is the only one, behind as many null rows."""

    def __init__(
        self,
        policy: str,
        g: Geometry,
        w: Window,
        layer_params: Sequence[LayerParams],
        backend: str = "torch",
        *,
        rows: int = 1,
        row: int = 0,
        seed: int = 1,
    ) -> None:
        self.g, self.w, self.seed = g, w, seed
        self.slots = [0] * row + [*range(1, rows + 1)]
        self.pool = StatePool.allocate(layout.of(policy, g, w), g.num_layers, rows + 2)
        self.pool.poison(0xFF)
        self.policy = policies.make(policy, g, w, self.pool, layer_params, backend)
        self.start()

    def start(self) -> None:
        live = torch.tensor([s for s in self.slots if s])
        self.policy.start(live, torch.full_like(live, self.seed))

    def step(self, x: Inputs, *accepted: int) -> Tensor:
        """A whole step with these counts, one for all rows or one for each -> out [layers, live rows, T, HV, V]."""
        first = len(self.slots) - (n := len([s for s in self.slots if s]))
        counts = [0] * first + [*(accepted if len(accepted) == n else accepted * n)]
        step = Step.of(
            self.slots, [x.x.shape[1] if s else 0 for s in self.slots], self.w.max_len, accepted=counts
        )
        if first:
            x = Inputs(
                *(torch.cat([torch.full_like(t[:1], math.nan)] * first + [t]) for t in vars(x).values())
            )
        outs = [self.policy.verify(i, step, x.of(self.g)) for i in range(self.g.num_layers)]
        self.policy.accept(step.close())
        return torch.stack(outs)[:, first:]

    def state(self, slot: int = 1) -> Tensor:
        """[layers, HV, V, K], by settling a copy in the last slot."""
        at, spare = torch.tensor([slot]), torch.tensor([self.pool.num_slots - 1])
        self.pool.copy(at, spare)
        self.policy.settle(spare)
        return torch.stack([self.policy.checkpoint(i)[spare[0]].clone() for i in range(self.g.num_layers)])


def with_gate(x: Inputs, gate: float) -> Inputs:
    return replace(x, a=torch.full_like(x.a, gate))
