"""Where a result was made, without importing what is not needed for it."""

import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path

import ssmspec

_NVIDIA = Path("/proc/driver/nvidia")


@dataclass(frozen=True, kw_only=True)
class Environment:
    """None: not there, or not known."""

    ssmspec: str
    commit: str | None  # of the checkout that the package lies in; "-dirty" behind it: with changes
    python: str
    platform: str
    device: str  # what the exactness was played on
    gpus: tuple[str, ...]
    driver: str | None
    torch: str | None
    triton: str | None


def installed(package: str) -> str | None:
    """The version of an installed package, which is not imported; it may have been distributed by another name."""
    try:
        return version(package)
    except PackageNotFoundError:
        return next(map(version, packages_distributions().get(package, ())), None)


def _commit() -> str | None:
    root = Path(ssmspec.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    describe = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(describe, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _value(text: str, name: str) -> str | None:
    """What stands behind ``name`` and a colon in a file of the NVIDIA driver."""
    found = (line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith(name))
    return next(found, None)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def record() -> Environment:
    """The record that goes into every result file."""
    models = (_value(_read(path), "Model:") for path in sorted(_NVIDIA.glob("gpus/*/information")))
    driver = _value(_read(_NVIDIA / "version"), "NVRM version")
    return Environment(
        ssmspec=ssmspec.__version__,
        commit=_commit(),
        python=platform.python_version(),
        platform=platform.platform(),
        device=f"cpu {platform.processor() or platform.machine()}",
        gpus=tuple(model for model in models if model),
        driver=driver,
        torch=installed("torch"),
        triton=installed("triton"),
    )
