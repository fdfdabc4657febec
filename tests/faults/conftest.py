"""The backends on which every fault is tried."""

import pytest


@pytest.fixture(params=["torch"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)
