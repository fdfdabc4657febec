"""How states meet their storage dtype: to the neighbours, without bias, and the same way for the same place."""

import pytest
import torch

from ssmspec.geometry import DType
from ssmspec.kernels.rounding import E2M1, round_to, stochastic, uniform

SHAPE = torch.Size((2, 8, 16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stochastic_rounding_takes_a_neighbour_and_is_unbiased(dtype: torch.dtype) -> None:
    """Mean of n draws within 5 sigma of the value; sigma <= gap / 2 / sqrt(n)."""
    s, n = torch.randn(64), 4000
    near = s.to(dtype)
    low = torch.where(near.float() <= s, near, torch.nextafter(near, torch.tensor(-torch.inf, dtype=dtype)))
    high = torch.nextafter(low, torch.tensor(torch.inf, dtype=dtype))
    draws = torch.stack([stochastic(s, dtype, torch.rand(64)).float() for _ in range(n)])
    assert ((draws == low.float()) | (draws == high.float())).all()
    gap = high.float() - low.float()
    assert ((draws.mean(0) - s).abs() <= 5 * gap / 2 / n**0.5).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stochastic_rounding_keeps_what_is_representable(dtype: torch.dtype) -> None:
    s = torch.tensor([0.0, -0.0, 1.0, -3.5, float("inf"), float("-inf"), torch.finfo(dtype).max])
    assert torch.equal(stochastic(s, dtype, torch.rand(7)).float(), s)
    assert stochastic(torch.tensor([float("nan")]), dtype, torch.rand(1)).isnan()


def test_noise_depends_on_seed_position_layer_and_element_only() -> None:
    base = uniform(SHAPE, 7, 11, 0)
    assert torch.equal(base, uniform(SHAPE, 7, 11, 0))
    for other in ((8, 11, 0), (7, 12, 0), (7, 11, 1), (11, 7, 0)):
        assert (base != uniform(SHAPE, *other)).float().mean() > 0.99
    draws = torch.cat([uniform(SHAPE, 1, p, 0).flatten() for p in range(200)])
    assert draws.min() >= 0
    assert draws.max() < 1
    assert abs(float(draws.mean()) - 0.5) < 5 * 0.2887 / draws.numel() ** 0.5


def test_nvfp4_values_are_on_its_grid() -> None:
    s = torch.randn(3, 8, 32) * torch.tensor([1e-3, 1.0, 50.0])[:, None, None]
    q = round_to(s, DType.NVFP4)
    head = s.abs().amax((-1, -2)) / (6 * 448)
    blocks = (q / head[:, None, None]).unflatten(-1, (-1, 16))
    scale = (s.unflatten(-1, (-1, 16)).abs().amax(-1, keepdim=True) / 6 / head[:, None, None, None]).to(
        torch.float8_e4m3fn
    )
    grid = torch.tensor(E2M1)
    distance = ((blocks / scale.float()).abs()[..., None] - grid).abs().amin(-1)
    assert distance.max() < 1e-5
    error = ((q - s).square().sum((-1, -2)) / s.square().sum((-1, -2))).sqrt()
    assert (error < 0.12).all()  # a 4-bit float with a 16-wide scale: published relative errors are near 0.1


def test_nvfp4_of_zeros_and_of_an_unfit_width() -> None:
    assert torch.equal(round_to(torch.zeros(1, 2, 16), DType.NVFP4), torch.zeros(1, 2, 16))
    with pytest.raises(ValueError, match="multiple of 16, not 24"):
        round_to(torch.zeros(1, 2, 24), DType.NVFP4)


def test_fp8_saturates() -> None:
    s = torch.tensor([[[1e6, -1e6, 0.3]]])
    assert round_to(s, DType.FP8).float().tolist() == [[[448.0, -448.0, 0.3125]]]
