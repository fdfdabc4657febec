"""How an fp32 state meets its storage dtype: to nearest, stochastically, or onto the NVFP4 grid."""

import torch
from torch import Tensor

from ssmspec.geometry import DType
from ssmspec.pool import storage

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the magnitudes of a 4-bit float
BLOCK = 16
_E4M3_MAX = 448.0


def round_to(s: Tensor, dtype: DType, noise: Tensor | None = None) -> Tensor:
    """s [HV, V, K] fp32 -> the nearest values of ``dtype`` in its storage; with ``noise`` in 0..1, stochastically."""
    if dtype is DType.NVFP4:
        return nvfp4(s)
    if dtype is DType.FP8:
        return s.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)  # the cast itself makes NaN of overflow
    return stochastic(s, storage(dtype), noise) if noise is not None else s.to(storage(dtype))


def stochastic(s: Tensor, dtype: torch.dtype, noise: Tensor) -> Tensor:
    """Round up with the probability of the distance from below: unbiased, one of the two neighbours.

    ReplaySSM (Dao-AILab/ReplaySSM) rounds fp16 checkpoints so.
    """
    near = s.to(dtype)
    toward = torch.where(near.float() > s, -torch.inf, torch.inf).to(dtype)
    other = torch.nextafter(near, toward)
    gap = (other.float() - near.float()).abs()
    chance = (s - near.float()).abs() / gap  # of taking the farther neighbour
    return torch.where((noise < chance) & other.isfinite(), other, near)


def uniform(
    shape: torch.Size, seed: int, position: int, layer: int, device: torch.device | str = "cpu"
) -> Tensor:
    """fp32 noise in [0, 1) that depends on (seed, position, layer, element) and on nothing else."""
    x = torch.arange(shape.numel(), dtype=torch.int64, device=device)
    for word in (seed, position, layer):
        x = _mix(x ^ (word * 0x9E3779B1 & 0xFFFFFFFF))
    return ((x >> 8).float() / (1 << 24)).view(shape)


def _mix(x: Tensor) -> Tensor:
    """The finalizer of MurmurHash3 (public domain), on 32-bit values held in int64."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return x ^ (x >> 16)


def nvfp4(s: Tensor) -> Tensor:
    """Emulate NVFP4: e2m1 values, an e4m3 scale per 16 values along K, one fp32 scale per head.

    The two-level scaling is NVIDIA's: the head scale brings the largest block scale to e4m3's maximum. K must be a
    multiple of 16.
    """
    if s.shape[-1] % BLOCK:
        raise ValueError(f"nvfp4 needs K to be a multiple of {BLOCK}, not {s.shape[-1]}")
    blocks = s.reshape(*s.shape[:-1], -1, BLOCK)
    head = s.abs().amax(dim=(-1, -2)) / (E2M1[-1] * _E4M3_MAX)  # [HV]
    head = torch.where(head > 0, head, 1.0)[:, None, None, None]
    scale = (blocks.abs().amax(-1, keepdim=True) / E2M1[-1] / head).clamp(max=_E4M3_MAX)
    scale = scale.to(torch.float8_e4m3fn).float() * head
    values = torch.where(scale > 0, blocks / scale, 0.0)
    grid = torch.tensor(E2M1, device=s.device)
    middle = (grid[1:] + grid[:-1]) / 2
    magnitude = grid[torch.bucketize(values.abs(), middle)]
    return (magnitude.copysign(values) * scale).reshape(s.shape)
