"""What becomes of output that nobody can take: a full disk is a sentence, a reader that left is none, and neither is exit 1."""

import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("module", START.values(), ids=START)
def test_both_packages_are_the_command_line(module: str) -> None:
    found = subprocess.run(command("--version", module), capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.startswith("ssmspec ")
