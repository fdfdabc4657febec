"""What a test needs that may be missing, and settings that make runs repeatable."""

import importlib.util
import os

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)  # tensors are tiny: threads only wait for each other
settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("ci")


def _missing(item: pytest.Item) -> str | None:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    gpu, interpreter = item.get_closest_marker("gpu"), item.get_closest_marker("interpreter")
    if (gpu or interpreter) and importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if gpu and interpreter and not (interpreted or torch.cuda.is_available()):
        return "needs a CUDA device, or TRITON_INTERPRET=1 set before Python starts"
    if gpu and not interpreter and not torch.cuda.is_available():
        return "needs a CUDA device"
    if interpreter and not gpu and not interpreted:
        return "needs TRITON_INTERPRET=1, set before Python starts"
    if item.get_closest_marker("vllm") and importlib.util.find_spec("vllm") is None:
        return "vllm is not installed"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        reason = _missing(item)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
