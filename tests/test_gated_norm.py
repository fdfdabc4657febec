"""The gated norm of a layer that vLLM serves: the gate may lie inside the projection that it is a part of."""

import pytest
import torch
from torch import Tensor

from ssmspec.kernels.gated_norm import gated_norm, rows_of_a_program

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS, HEADS, V, BEFORE, EPS = 5, 3, 8, 7, 1e-6


def case() -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, the projection with the gates behind ``BEFORE`` other columns, and weights."""
    x = torch.randn(TOKENS, HEADS, V, device=DEVICE)
    projected = torch.randn(TOKENS, BEFORE + HEADS * V, device=DEVICE)
    return x, projected, torch.rand(V, device=DEVICE)


def gates(projected: Tensor) -> Tensor:
    return projected[:, BEFORE:].unflatten(1, (HEADS, V))


@pytest.mark.interpreter
def test_it_is_rmsnorm_times_weight_times_silu_of_the_gate() -> None:
    x, projected, weight = case()
    out = torch.empty_like(x)
    gated_norm(x, gates(projected), weight, EPS, out)
    y, z = x.double(), gates(projected).double()
    wanted = y / (y.square().mean(-1, keepdim=True) + EPS).sqrt() * weight * z * z.sigmoid()
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.interpreter
def test_where_the_gate_lies_changes_no_bit() -> None:
    x, projected, weight = case()
    inside, apart = torch.empty_like(x), torch.empty_like(x)
    gated_norm(x, gates(projected), weight, EPS, inside)
    gated_norm(x, gates(projected).contiguous(), weight, EPS, apart)
    assert torch.equal(inside, apart)


@pytest.mark.interpreter
def test_the_result_may_take_the_place_of_the_outputs() -> None:
    x, projected, weight = case()
    out = torch.empty_like(x)
    gated_norm(x, gates(projected), weight, EPS, out)
    gated_norm(x, gates(projected), weight, EPS, x)
    assert torch.equal(x, out)


@pytest.mark.parametrize(("rows", "each"), [(1, 1), (264, 1), (265, 2), (528, 2), (529, 4), (100_000, 4)])
def test_rows_of_a_program_are_vllms_on_132_multiprocessors(rows: int, each: int) -> None:
    assert rows_of_a_program(rows, 132) == each
