"""KDA's windows that fast mode leaves to exact mode take the Hopper kernels where there are any."""

from typing import Any

import pytest

pytest.importorskip("triton.experimental.gluon")

from hopper_draws import of_arch

from ssmspec.geometry import Arch, Mode, Window
from ssmspec.kernels import hopper, triton_backend


@pytest.mark.parametrize("hopper_here", [True, False])
@pytest.mark.parametrize("arch", list(Arch))
def test_fast_mode_is_handed_the_hopper_kernels_for_kda(
    arch: Arch, hopper_here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others need them for snapshots alone, and their order of sums would have to be found by a trial."""
    handed: list[Any] = []
    monkeypatch.setattr(hopper, "runs_here", lambda: hopper_here)
    monkeypatch.setattr(triton_backend, "make_verify", lambda g, w, exact, couple: handed.append(exact))
    triton_backend.make(of_arch(arch), Window(max_len=16, mode=Mode.FAST))
    assert isinstance(handed[0], triton_backend._Windows) == (hopper_here and arch is Arch.KDA)
