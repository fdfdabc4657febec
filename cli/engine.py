"""A vLLM engine in a process of its own, which neither hangs at its end nor leaves anything behind."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .errors import UsageError

Json = dict[str, Any]
KERNEL = "VLLM_GDN_DECODE_KERNEL"
ALIKE = {KERNEL: "triton", "VLLM_TRITON_FORCE_FIRST_CONFIG": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""What makes engines compute the same: the decode kernel whose bits are exact mode's; one tile of autotuned kernels, where
each engine might pick another; and a core in the caller's process, which takes no step before all requests are there."""
CHOICE = "SSMSPEC_"  # of the environment: a policy and its settings, which a scenario has for itself
PLAYER = ("-m", "ssmspec.runtime.vllm.play")
LINES = 40  # of a failed engine's log, as records keep them
ENDS = 20.0  # seconds that an engine has to end in, once what it generated is there


def play(
    scenario: Json, tell: Callable[[str], None], limit: float, settings: Mapping[str, str] = ALIKE
) -> Json:
    """What came out of one engine; {"error"} where it failed or took more than ``limit`` seconds, "log" in any case.
    ``tell`` hears the log's last line. ``settings`` are of vLLM's environment, where this process's says nothing else;
    the scenario alone chooses a policy."""
    if importlib.util.find_spec("vllm") is None:
        raise UsageError("no vLLM is installed: install ssmspec[vllm]")
    with _unwound_by_sigterm(), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        source, target, log = (Path(folder) / name for name in ("in.json", "out.json", "log"))
        source.write_text(json.dumps(scenario))
        end = time.monotonic() + limit
        with _running([sys.executable, *PLAYER, str(source), str(target)], log, settings) as process:
            while process.poll() is None and not target.exists() and time.monotonic() < end:
                time.sleep(0.2)
                tell(_last(log))
            if target.exists():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(ENDS)
            code = process.poll()  # None: it has to be ended
        said = log.read_text(errors="replace")
        if code is None and not target.exists():
            return {"error": f"no answer within {limit:g} s; its last words: {_last(log)}", "log": said}
        if code or not target.exists():
            lines = [line for line in said.splitlines() if "Error" in line] or ["no output"]
            return {"error": lines[-1].strip(), "log": said}
        return {**json.loads(target.read_text()), "error": None, "log": said}


@contextmanager
def _running(command: list[str], log: Path, settings: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process, and behind it the end of all that it started. They write to a file: a pipe stays open as long as one of
    an engine's processes lives. Its input is a pipe that closes with this process, however that ends. What it leaves in its
    folder of temporary files is the log's folder's."""
    with log.open("wb") as stream:
        here = {name: value for name, value in os.environ.items() if not name.startswith(CHOICE)}
        process = subprocess.Popen(
            command,
            env={**settings, **here, "TMPDIR": str(log.parent)},
            stdin=subprocess.PIPE,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


@contextmanager
def _unwound_by_sigterm() -> Iterator[None]:
    """SIGTERM ends this process as Ctrl-C does, behind what has to be cleared away."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def ending(log: str) -> list[str]:
    """What a record keeps of a failed engine's log."""
    return log.splitlines()[-LINES:]


def fits(log: str) -> tuple[float | None, int | None]:
    """How many requests fit by the engine's own word, and of how many tokens each; None where it said nothing."""
    said = re.findall(r"Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x", log)
    return (float(said[-1][1]), int(said[-1][0].replace(",", ""))) if said else (None, None)


def _last(log: Path) -> str:
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - 2000))
        lines = stream.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
