"""`ssmspec doctor`: what this machine can run."""

import importlib.util
import json as json_format
import os
import platform
import subprocess
import sys
from dataclasses import replace
from typing import Annotated, Any

import typer

from ssmspec.geometry import Window
from ssmspec.measure.environment import installed, record
from ssmspec.runtime.setup import Setup

from . import table
from .console import out, progress
from .errors import sentence
from .study import single_thread

PACKAGES = ("torch", "triton", "matplotlib", "vllm")
BACKENDS = ("torch", "triton")
WORKS = "works"


def doctor(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Say what this machine can run. Exits 0 where the torch backend works, 1 where it does not.

    A backend works where it gives two policies the same bits in a window of four tokens.
    """
    with progress("trying the backends"):
        found = _found()
    if json:
        typer.echo(json_format.dumps({"schema": "ssmspec.doctor", "schema_version": 1, **found}, indent=2))
    else:
        lines = [{"what": name.replace("_", " "), "found": _words(value)} for name, value in found.items()]
        table.show(out(), lines, ["what"])
    if found["backend_torch"] != WORKS:
        raise typer.Exit(1)


def _found() -> dict[str, Any]:
    environment = record()
    found: dict[str, Any] = {
        "ssmspec": environment.ssmspec,
        "python": f"{environment.python} on {platform.system()} {platform.machine()}",
        **{package: installed(package) for package in PACKAGES},
        "cuda_devices": _cuda_devices(),
        "driver": environment.driver,
        "triton_interpreter": os.environ.get("TRITON_INTERPRET") == "1",
    }
    found |= {f"backend_{name}": _try(name) for name in BACKENDS}
    return found | {"gdn_on_hopper": _order(), "vllm_policies": _served()}


def _served() -> str:
    """What the plugin says of the installed vLLM, whose import is left to another process."""
    if importlib.util.find_spec("vllm") is None:
        return "vllm is not installed"
    command = [sys.executable, "-m", "ssmspec.runtime.vllm.compat"]
    said = subprocess.run(command, capture_output=True, text=True)
    lines = (said.stdout or said.stderr).strip().splitlines()
    return lines[-1] if lines else f"vllm could not be imported (exit code {said.returncode})"


def _cuda_devices() -> list[str]:
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def _try(backend: str) -> str:
    """That it works, or why it does not; any exception is a finding here."""
    for package in dict.fromkeys(("torch", backend)):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    try:
        from ssmspec.measure import exact

        single_thread()
        g = replace(Setup().geometry, num_layers=1)
        results = exact.compare(g, [Window(max_len=4)], requests=1, steps=2, backend=backend)
    except ValueError as error:
        return sentence(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    apart = [r.policy for r in results if not r.ok]
    return WORKS if not apart else f"{', '.join(apart)} left native's bits"


def _order() -> str:
    """Which order of additions the Gluon kernels have to take here, or why they are not used."""
    if any(importlib.util.find_spec(package) is None for package in ("torch", "triton")):
        return "not used: torch or triton is not installed"
    from ssmspec.kernels import hopper, selftest

    if not hopper.runs_here():
        return "not used: there is no Hopper GPU"
    return selftest.find_order(replace(Setup().geometry, head_k=128, head_v=128)).sentence


def _words(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return {None: "none", True: "on", False: "off"}.get(value, str(value))
