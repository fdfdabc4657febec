"""The vocabulary is light: sizes can be asked for without importing torch."""

import subprocess
import sys

import pytest

LIGHT = (
    "ssmspec",
    "ssmspec.layout",
    "ssmspec.presets",
    "ssmspec.measure.traffic",
    "ssmspec.measure.capacity",
)


@pytest.mark.parametrize("module", LIGHT)
def test_sizes_do_not_import_torch(module: str) -> None:
    code = f"import {module}, sys; sys.exit(any(m in sys.modules for m in ('torch', 'triton', 'vllm')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_public_names_are_where_they_say() -> None:
    import ssmspec

    for name in ssmspec.__all__:
        assert getattr(ssmspec, name) is not None
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = ssmspec.nothing_like_it
