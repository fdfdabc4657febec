"""An engine of `ssmspec serve-check` is a process of its own: it fails with a reason, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ssmspec_cli import engine

LINGERS = """
import json, pathlib, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
print("engine", child.pid, flush=True)
time.sleep(0.5)
pathlib.Path(sys.argv[2]).write_text(json.dumps({"waves": json.load(open(sys.argv[1]))["waves"]}))
time.sleep(600)
"""


def test_an_engine_that_does_not_end_is_ended_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes hold its output open, and would hold the GPU's memory."""
    monkeypatch.setattr(engine.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(engine, "PLAYER", ("-c", LINGERS))
    monkeypatch.setattr(engine, "ENDS", 0.2)
    heard: list[str] = []
    found = engine.play({"waves": [1]}, heard.append, 60)
    assert (found["waves"], found["error"]) == ([1], None)
    name, child = found["log"].split()
    assert f"{name} {child}" in heard
    assert not runs(child)


def runs(process: str) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", process], capture_output=True, text=True).stdout
    return state.strip()[:1] not in ("", "Z")  # a zombie is dead, if not yet reaped


def test_an_engine_that_gives_no_answer_in_time_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.importlib.util, "find_spec", lambda name: object())
    script = "import time; print('tuning kernels', flush=True); time.sleep(600)"
    monkeypatch.setattr(engine, "PLAYER", ("-c", script))
    found = engine.play({"waves": []}, lambda line: None, 2)
    assert found["error"] == "no answer within 2 s; its last words: tuning kernels"


CALLER = """
import signal, sys
from ssmspec_cli import engine
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what runs in a shell's background
engine.importlib.util.find_spec = lambda name: object()
engine.PLAYER = ("-c", sys.argv[1])
engine.play({"waves": []}, lambda line: print(line, flush=True), 60)
"""
ENGINE = """
import subprocess, tempfile, time
from ssmspec.runtime.vllm.play import end_with_caller
end_with_caller()
tempfile.mkdtemp()
print("engine", subprocess.Popen(["sleep", "600"]).pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_check_that_is_ended(number: signal.Signals, tmp_path: Path) -> None:
    """Not the engine, not its own processes, and, but for SIGKILL, no file."""
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER, ENGINE],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert caller.stdout is not None
    said = next(line for line in caller.stdout if line.startswith("engine"))
    caller.send_signal(number)
    caller.wait(20)
    caller.stdout.close()
    child = said.split()[1]
    end = time.monotonic() + 10
    while runs(child) and time.monotonic() < end:
        time.sleep(0.05)
    assert not runs(child)
    if number != signal.SIGKILL:
        assert not list(tmp_path.iterdir())


def test_an_engine_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(engine, "PLAYER", ("-c", "print('starting'); raise ValueError('no such model')"))
    found = engine.play({"waves": []}, lambda line: None, 60)
    assert found["error"] == "ValueError: no such model"
    assert found["log"].startswith("starting")


def test_an_engine_that_fails_at_its_end_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.importlib.util, "find_spec", lambda name: object())
    script = (
        "import pathlib, sys; pathlib.Path(sys.argv[2]).write_text('{}'); raise RuntimeError('at its end')"
    )
    monkeypatch.setattr(engine, "PLAYER", ("-c", script))
    assert engine.play({"waves": []}, lambda line: None, 60)["error"] == "RuntimeError: at its end"


def test_engines_compute_alike_unless_the_environment_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.importlib.util, "find_spec", lambda name: object())
    names = list(engine.ALIKE)
    script = f"import os; print(*[os.environ.get(n) for n in {names}], sep='\\n', flush=True); 1 / 0"
    monkeypatch.setattr(engine, "PLAYER", ("-c", script))
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(engine.KERNEL, "cuda")
    alike = engine.play({"waves": []}, lambda line: None, 60)["log"].split("\n")[:3]
    assert alike == ["cuda", "1", "0"]
    plain = engine.play({"waves": []}, lambda line: None, 60, settings={})["log"].split("\n")[:3]
    assert plain == ["cuda", "None", "None"]


def test_a_policy_of_the_environment_does_not_reach_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(
        engine, "PLAYER", ("-c", "import os; print(os.environ.get('SSMSPEC_POLICY'), flush=True); 1 / 0")
    )
    monkeypatch.setenv("SSMSPEC_POLICY", "checkpointing")
    assert engine.play({"waves": []}, lambda line: None, 60)["log"].startswith("None\n")


def test_a_player_in_a_shells_group_leaves_the_shell_alive() -> None:
    wait = "from ssmspec.runtime.vllm import play; import time; play.end_with_caller(); time.sleep(0.5)"
    script = f'{sys.executable} -c "{wait}" < /dev/null; echo alive'
    said = subprocess.run(["sh", "-c", script], start_new_session=True, capture_output=True, text=True)
    assert said.stdout == "alive\n"
