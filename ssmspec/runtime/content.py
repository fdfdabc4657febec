"""Made-up layers: constants, and inputs that depend on a token's identity alone, so that a shared prefix is shared."""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ssmspec.geometry import Arch, Geometry
from ssmspec.kernels.base import LayerParams
from ssmspec.pool import storage

Inputs = tuple[Tensor, Tensor, Tensor | None]


def _generator(*words: int) -> torch.Generator:
    seed = 0
    for w in words:
        seed = (seed * 6364136223846793005 + w + 1442695040888963407) % 2**63
    return torch.Generator().manual_seed(seed)


def layer_params(g: Geometry, seed: int, device: str = "cpu") -> list[LayerParams]:
    """Gates as trained models start: dt log-uniform in 1e-3..1e-1, A uniform in 1..16 (Mamba2, Dao and Gu 2024)."""
    hv, found = g.num_v_heads, []
    for index in range(g.num_layers):
        gen = _generator(seed, index)
        shape = (hv, g.head_k) if g.arch is Arch.KDA else (hv,)
        dt = torch.exp(torch.empty(shape).uniform_(math.log(1e-3), math.log(1e-1), generator=gen))
        rate = torch.empty(hv).uniform_(1, 16, generator=gen)
        bias = dt + torch.log(-torch.expm1(-dt)) if g.dt_softplus else dt  # softplus(dt_bias) = dt
        skip = torch.randn(hv, generator=gen).to(device) if g.arch is Arch.MAMBA2 else None
        found.append(LayerParams(index=index, A_log=rate.log().to(device), dt_bias=bias.to(device), D=skip))
    return found


class Content:
    """Layer inputs by token id: drawn on the host, the same for every device."""

    def __init__(self, g: Geometry, seed: int, device: str = "cpu") -> None:
        self.g, self.seed, self.device = g, seed, device
        hv = g.num_v_heads
        weight = torch.randn(g.num_layers, g.conv.channels, g.conv.width, generator=_generator(seed, -1))
        self.conv_weight = weight.to(device)
        self._gates = hv * g.head_k if g.arch is Arch.KDA else hv
        values = max(1, g.num_layers * (g.conv.channels + self._gates + hv))
        self._of = lru_cache(maxsize=max(1, min(4096, 2**24 // values)))(self._make)

    def _make(self, token: int) -> Tensor:
        width = self.g.conv.channels + self._gates + self.g.num_v_heads
        x = torch.randn(self.g.num_layers, width, generator=_generator(self.seed, token))
        if not self.g.dt_softplus:  # a time step that nothing makes positive has to be
            x[:, self.g.conv.channels :] = x[:, self.g.conv.channels :].abs() / 10
        return x.to(storage(self.g.act_dtype))

    def inputs(self, rows: Sequence[Sequence[int]], width: int) -> Iterator[Inputs]:
        """Token ids per row -> per layer the conv input [B, width, D], a and b; NaN behind a row's tokens."""
        g, d, gates = self.g, self.g.conv.channels, self._gates
        shape = (g.num_layers, len(rows), width, d + gates + g.num_v_heads)
        drawn = torch.full(shape, math.nan, dtype=storage(g.act_dtype))
        for b, row in enumerate(rows):
            if row:
                drawn[:, b, : len(row)] = torch.stack([self._of(token) for token in row], 1)
        for x in drawn.to(self.device, non_blocking=True):
            a = x[..., d : d + gates]
            if g.arch is Arch.KDA:
                a = a.reshape(len(rows), width, g.num_v_heads, g.head_k)
            yield x[..., :d], a, None if g.arch is Arch.MAMBA2 else x[..., d + gates :]


def token_id(*words: int) -> int:
    """A token identity from whatever makes it that token."""
    return int(torch.randint(2**62, (1,), generator=_generator(*words)))
