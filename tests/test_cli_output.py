"""What becomes of output that nobody can take: a full disk is a sentence, a reader that left is none, and neither is exit 1."""

import subprocess
import sys
from pathlib import Path

import pytest
from ssmspec_cli import main

FULL = Path("/dev/full")
COMMANDS = ["compare traffic", "compare traffic --json", "presets", "--help", "compare --help"]
START = {"cli": "ssmspec_cli", "package": "ssmspec"}


def command(text: str, module: str = "ssmspec_cli") -> list[str]:
    return [sys.executable, "-m", module, *text.split()]


@pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("text", COMMANDS)
def test_a_full_disk_is_a_sentence_and_exit_2(text: str) -> None:
    with FULL.open("w") as full:
        found = subprocess.run(command(text), stdout=full, stderr=subprocess.PIPE, text=True)
    assert (found.returncode, found.stderr) == (2, "Error: the output: No space left on device\n")


@pytest.mark.parametrize("text", COMMANDS)
def test_a_reader_that_left_is_told_nothing_and_exit_is_128_and_sigpipe(text: str) -> None:
    process = subprocess.Popen(command(text), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    said = process.stderr.read()
    assert (process.wait(), said) == (128 + 13, "")


BROKEN = {
    "a library": (
        OSError("libcudart.so.13: cannot open shared object file"),
        "libcudart.so.13: cannot open shared",
    ),
    "a file": (
        FileNotFoundError(2, "No such file or directory", "there"),
        "there: No such file or directory",
    ),
    "another call": (ConnectionRefusedError(111, "Connection refused"), "[Errno 111] Connection refused"),
    "a full disk": (OSError(28, "No space left on device"), "the output: No space left on device"),
}


@pytest.mark.parametrize(("error", "said"), BROKEN.values(), ids=BROKEN)
def test_only_what_hinders_writing_is_said_of_the_output(
    error: OSError, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(prog_name: str) -> None:
        raise error

    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(main, "app", fail)
    monkeypatch.setattr(main, "_end", end)
    with pytest.raises(SystemExit) as ended:
        main.run()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"Error: {said}")


@pytest.mark.parametrize("module", START.values(), ids=START)
def test_usage_has_one_name(module: str) -> None:
    found = subprocess.run(command("compare -h", module), capture_output=True, text=True)
    assert found.stdout.split()[:3] == ["Usage:", "ssmspec", "compare"]


@pytest.mark.parametrize("module", START.values(), ids=START)
def test_both_packages_are_the_command_line(module: str) -> None:
    found = subprocess.run(command("--version", module), capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.startswith("ssmspec ")
