"""What a user types, what is printed and written, and the exit code."""

import csv
import io
import json
import shlex
import subprocess
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from ssmspec_cli import plot
from ssmspec_cli.main import app
from typer.main import get_command
from typer.testing import CliRunner

from ssmspec.geometry import Arch, DType, Mode
from ssmspec.measure import exact, speeds, sweep

SHAPE = {"--model", "--draft", "--window", "--policy", "--mode", "--ring"}
FORMATS = {"--state-dtype", "--record-dtype", "--read-copy", "--stochastic-rounding"}
GPU = {"--context", "--gpu-memory", "--gpu-utilization", "--weights-gib", "--max-num-seqs", "--kv-dtype"}
PRINTED = {"--json", "--csv", "--md", "-o", "--out", "--force", "--repro"}
COMMON = SHAPE | FORMATS | PRINTED
OPTIONS = {
    "": {"--version"},
    "bench": SHAPE | {"--state-dtype", "--acceptance", "--batch", "--seed", "--json"},
    "compare": COMMON
    | GPU
    | {"--acceptance", "--batch", "--seed", "--backend"}
    | {"--cache-mode", "--tp", "--checks", "--plot"},
    "compare exact": COMMON | {"--seed", "--backend", "--cache-mode"},
    "compare traffic": COMMON | {"--acceptance", "--batch", "--seed", "--tp", "--checks", "--plot"},
    "compare capacity": COMMON | GPU | {"--cache-mode", "--tp", "--checks"},
    "doctor": {"--json"},
    "play": {"SCRIPT.jsonl", "--policy", "--json"},
    "presets": {"--json"},
    "serve-check": {
        *("MODEL", "--policy", "--mode", "--draft", "--method"),
        *("--requests", "--prompt", "--tokens", "--engine", "--limit", "--json"),
    },
    "soak": {
        *("--minutes", "--events", "--seed", "--policy", "--backend", "--device", "--jobs"),
        *("-o", "--output"),
    },
    "tune": {
        *("--model", "--draft", "--mode", "--state-dtype", "--batch", "--acceptance", "--json"),
        *("-o", "--out"),
    },
}


def run(*args: str, **env: str) -> Any:
    return CliRunner().invoke(app, args, env={"COLUMNS": "200", **env})


def result(*args: str) -> dict[str, Any]:
    """The JSON of a command that ends well, by policy where it has rows."""
    found = run(*args, "--json")
    assert found.exit_code == 0, found.stderr
    data: dict[str, Any] = json.loads(found.stdout)
    return data


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lives of one request and eight steps: enough to differ, and quick."""
    monkeypatch.setattr(exact, "compare", partial(exact.compare, requests=1, steps=8))


def _declared(command: Any, path: str = "") -> dict[str, set[str]]:
    options = {
        name for p in command.params for name in (p.opts if p.param_type_name == "option" else [p.metavar])
    }
    found = {path: options - {"--help"}}
    for name, sub in getattr(command, "commands", {}).items():
        found |= _declared(sub, f"{path} {name}".strip())
    return found


def test_commands_and_options_are_these() -> None:
    assert _declared(get_command(app)) == OPTIONS


@pytest.mark.parametrize("command", [c for c in OPTIONS if c])
def test_help_has_an_example(command: str) -> None:
    found = run(*command.split(), "--help")
    assert found.exit_code == 0
    assert f"Example: ssmspec {command.split()[0]}" in found.stdout


@pytest.mark.parametrize("command", OPTIONS)
def test_help_is_short_and_long_fills_its_lines_and_gives_flags_no_type(command: str) -> None:
    long, short = (run(*command.split(), name, COLUMNS="80").stdout for name in ("--help", "-h"))
    assert long == short
    assert "<bool>" not in long
    assert "--help" in long
    for paragraph in long.split("╭")[0].split(" " * 80):
        lines = [line.rstrip() for line in paragraph.splitlines() if line.strip() and line.startswith(" ")]
        for line, below in pairwise(lines):
            if not below.startswith("  "):
                assert len(line) + 1 + len(below.split()[0]) > 79, line


def test_counting_commands_leave_torch_unimported() -> None:
    code = """
import sys
from ssmspec_cli.main import app
for args in (["compare", "traffic", "--json", "--checks"], ["compare", "capacity", "--md"], ["presets"]):
    app(args, standalone_mode=False)
assert "torch" not in sys.modules and "matplotlib" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_traffic_of_the_default_model_is_the_hand_calculation() -> None:
    """Qwen3.5-4B, K=3, fp32: S = 32*128*128*4 B; native (1+T)S, recover 3S, every-step 2S, and what all move alike."""
    s, t = 32 * 128 * 128 * 4, 4
    packed, value, gates = 2 * 16 * 128 + 32 * 128, 32 * 128, 2 * 32
    alike = 2 * t * (packed + gates + value) + 2 * t * value + 2 * 8192 * (3 + 3 + t - 1)
    record = 4 * 32 * 128 + 16 * (2 * 128 + 4) + 4 * 32
    accepted = 1 + 0.8 + 0.8**2 + 0.8**3
    wanted = {
        "native": (1 + t) * s + alike,
        "recover": 3 * s + record * (t + accepted) + alike,
        "every-step": 2 * s + record * (t + accepted) + alike,
    }
    rows = {row["policy"]: row for row in result("compare", "traffic")["rows"]}
    for policy, nbytes in wanted.items():
        moved = rows[policy]["traffic"]
        assert moved["read"] + moved["write"] == pytest.approx(nbytes, rel=1e-3)
        assert moved["model_step_read"] + moved["model_step_write"] == pytest.approx(24 * nbytes, rel=1e-3)
    assert rows["recover"]["traffic"]["vs_native"] == pytest.approx(
        wanted["recover"] / wanted["native"], rel=1e-3
    )


def test_capacity_of_the_default_model_is_192_mib_of_native_state() -> None:
    """24 layers x 4 states x 2 MiB."""
    rows = {row["policy"]: row["capacity"] for row in result("compare", "capacity")["rows"]}
    assert rows["native"]["recurrent_state_bytes"] == 192 * 2**20
    assert rows["native"]["block_tokens"] == 544
    assert rows["recover"]["recurrent_state_bytes"] == 48 * 2**20
    assert rows["checkpointing"]["requests"] > rows["native"]["requests"]


@pytest.mark.usefixtures("short")
def test_compare_shows_all_policies_both_modes_and_both_formats() -> None:
    data = result("compare")
    rows = [(r["state_dtype"], r["mode"], r["policy"]) for r in data["rows"]]
    record = ["recover", "every-step", "checkpointing"]
    wanted = []
    for dtype in ("float32", "bfloat16"):
        wanted += [(dtype, None, "native")] + [(dtype, m, p) for m in ("exact", "fast") for p in record]
    assert rows == wanted
    assert all({"exact", "traffic", "capacity"} <= row.keys() for row in data["rows"])
    apart = {row["mode"] for row in data["rows"] if not row["exact"]["equal"]}
    assert apart == {"fast"}
    assert data["ok"]


@pytest.mark.usefixtures("short")
def test_the_table_has_the_promised_columns() -> None:
    found = run("compare", "--draft", "3")
    for title in (
        "match",
        "first difference",
        "max ulp",
        "read MB",
        "write MB",
        "bytes",
        "vs native",
        "speed",
        "vs vLLM",
        "timed at",
        "MiB/request",
        "that fit",
        "note",
    ):
        assert title in found.stdout
    first = next(line for line in found.stdout.splitlines() if line.startswith(("native", "recover")))
    assert first.startswith("native")


def test_a_speed_is_of_what_was_asked_for() -> None:
    """GDN, fp32, T=2 at B=8, where checkpointing was timed at L=8 alone, and recover was not; in bf16 bench takes L=4."""
    cell = (Arch.GDN, DType.FP32, 2, 8, Mode.EXACT)
    timed = {
        s.policy: (s.ring, s.times)
        for s in speeds.measured().speeds
        if (s.arch, s.state_dtype, s.window, s.batch, s.mode) == cell
    }
    args = ("compare", "traffic", "--draft", "1", "--state-dtype", "fp32", "--batch", "8")
    found = {row["policy"]: (row["ring"], row["speed"]["times"]) for row in result(*args)["rows"]}
    assert found == {"native": (None, None), "recover": (None, None), **timed}
    assert found["checkpointing"][0] == 8
    every_step = timed["every-step"][1]
    asked = {row["policy"]: row["speed"]["times"] for row in result(*args, "--ring", "16")["rows"]}
    assert asked == {"native": None, "recover": None, "every-step": every_step, "checkpointing": None}
    share = {row["speed"]["batch"] for row in result(*args, "--tp", "4")["rows"]}
    assert share == {None, 1}, "8 requests with 8 heads are nearer to 1 with 32 than to 8 with 32"
    half = result(*args[:4], "--batch", "8", "--state-dtype", "bf16")["rows"][-1]
    assert (half["policy"], half["ring"], half["speed"]["times"]) == ("checkpointing", 4, None)
    few = result(*args[:-1], "3")["rows"]
    assert all(row["speed"]["times"] is None for row in few)
    text = run(*args).stdout
    assert "B=8 HV=32 K=1 L=8" in text
    assert "draft 1, ring 8, " in text
    lines = run("compare", "traffic", "--mode", "exact,fast", "--md").stdout.splitlines()
    rings = {
        line.split("|")[2].strip(): line.split("|")[3].strip() for line in lines if "| checkpointing" in line
    }
    assert rings == {"exact": "8", "fast": "16"}
    assert next(line for line in lines if "| every-step" in line).split("|")[3].strip() == ""


@pytest.mark.usefixtures("short")
def test_notes_are_of_the_columns_that_are_shown() -> None:
    whole, alone = (run("compare", *part).stdout for part in ((), ("traffic",)))
    assert "KiB of one request" in alone
    assert "speed vs vLLM: " in alone
    for words in ("KiB of one request", "Export: ", "Error: "):
        assert words not in whole
    assert "speed vs vLLM: " in whole
    assert "speed vs vLLM: " not in run("compare", "traffic", "--state-dtype", "nvfp4").stdout


@pytest.mark.usefixtures("short")
def test_a_broken_promise_exits_1(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    honest = exact.compare

    def lying(*args: Any, **kwargs: Any) -> list[exact.Exactness]:
        return [replace(e, outputs=replace(e.outputs, different=1)) for e in honest(*args, **kwargs)]

    monkeypatch.setattr(exact, "compare", lying)
    found = run("compare", "exact", "--mode", "exact", "--state-dtype", "fp32")
    assert found.exit_code == 1
    assert "DIFFERS" in found.stdout
    assert "EXPECTED TO BE EQUAL" in found.stdout


@pytest.mark.usefixtures("short")
def test_align_mode_plays_lives_that_cross_boundaries(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = []
    monkeypatch.setattr(exact, "compare", lambda g, w, *args, **kwargs: windows.extend(w) or [])
    run(
        "compare",
        "exact",
        "--cache-mode",
        "align",
        "--mode",
        "exact",
        "--draft",
        "3,19",
        "--state-dtype",
        "fp32",
    )
    assert [w.align for w in windows] == [16, 20]


def test_a_life_is_played_once_for_all_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    played = []
    monkeypatch.setattr(exact, "compare", lambda g, w, *args, **kwargs: played.append(g) or [])
    found = run("compare", "--batch", "1,8,64", "--context", "1024,4096", "--state-dtype", "fp32,fp16")
    assert len(played) == 2
    assert isinstance(found.exception, KeyError)


@pytest.mark.usefixtures("short")
def test_a_model_that_does_not_fit_still_has_bits_and_bytes() -> None:
    """Qwen3.5-122B-A10B: 227.43 GiB of weights; 72 GiB of one GPU hold a quarter, and its 16 and 64 heads are shared by four."""
    args = ("--model", "qwen3.5-122b-a10b", "--mode", "exact", "--state-dtype", "fp32")
    data = result("compare", *args)
    assert all(row["exact"] and row["traffic"] for row in data["rows"])
    assert {row["capacity"]["requests"] for row in data["rows"]} == {0}
    text = run("compare", *args).stdout
    assert "Capacity: does not fit: " in text
    assert "it needs --tp=4 or more (the smallest legal)." in " ".join(text.split())
    alone = run("compare", "capacity", *args[:2])
    assert (alone.exit_code, alone.stdout) == (2, "")
    assert "needs --tp=4 or more" in alone.stderr
    assert run("compare", "capacity", *args[:2], "--tp", "4").exit_code == 0
    some = run("compare", "capacity", *args[:2], "--tp", "1,4")
    assert (some.exit_code, some.stderr) == (0, "")
    fits = [line.split() for line in some.stdout.splitlines() if line.startswith("recover")]
    assert [("none" in words, words[1]) for words in fits][:2] == [(True, "1"), (False, "4")]
    assert "it needs --tp=4 or more (the smallest legal)." in " ".join(some.stdout.split())
    rows = result("compare", "capacity", *args[:2], "--tp", "1,4")["rows"]
    assert [row["capacity"]["requests"] > 0 for row in rows] == [False] * 4 + [True] * 4


def test_a_sweep_has_rows_for_every_combination() -> None:
    rows = result("compare", "traffic", "--draft", "0,3", "--ring", "8,16", "--batch", "1,32")["rows"]
    assert len(rows) == 2 * 2 * 2 * 4
    assert {(r["draft"], r["ring"], r["batch"]) for r in rows} == {
        (k, ring, b) for k in (0, 3) for ring in (8, 16) for b in (1, 32)
    }


def test_window_is_draft_plus_one() -> None:
    by_window, by_draft = (
        result("compare", "traffic", "--window", "4"),
        result("compare", "traffic", "--draft", "3"),
    )
    assert by_window["rows"] == by_draft["rows"]


def test_json_names_its_schema_environment_and_checks() -> None:
    data = result("compare", "capacity")
    assert data["schema"] == "ssmspec.compare"
    assert data["schema_version"] == 1
    assert {"python", "platform", "torch", "triton", "commit", "driver", "device"} <= data[
        "environment"
    ].keys()
    assert all(check["ok"] and check["source"] for check in data["checks"])
    assert any("544" in str(check["expected"]) for check in data["checks"])


def test_csv_and_markdown_hold_the_rows() -> None:
    lines = list(csv.DictReader(io.StringIO(run("compare", "traffic", "--csv").stdout)))
    assert [line["policy"] for line in lines] == ["native", "recover", "every-step", "checkpointing"]
    assert float(lines[0]["traffic.vs_native"]) == 1
    page = run("compare", "traffic", "--md").stdout
    assert page.count("\n| ") == 5
    assert "| checkpointing |" in page


def test_checks_are_printed_with_their_sources() -> None:
    found = run("compare", "traffic", "--checks").stdout
    assert "-38.1" in found
    assert "sgl-project/sglang#28451" in found


def test_repro_measures_the_same() -> None:
    args = [
        "compare",
        "traffic",
        "--draft",
        "2",
        "--acceptance",
        "0.9,0.5",
        "--state-dtype",
        "bf16",
        "--stochastic-rounding",
    ]
    command = run(*args, "--repro").stdout.splitlines()[-1]
    program, *again = shlex.split(command)
    assert program in ("ssmspec", "root", "main")
    assert "--stochastic-rounding" in again
    assert result(*again)["rows"] == result(*args)["rows"]
    assert result(*again)["command"].split()[1:] == again


def test_files_are_written_and_a_full_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert run("compare", "traffic", "-o", str(folder)).exit_code == 0
    assert sorted(p.name for p in folder.iterdir()) == ["result.csv", "result.json", "result.md"]
    assert json.loads((folder / "result.json").read_text())["rows"]
    (folder / "result.json").write_text("old")
    (folder / "mine").write_text("kept")
    refused = run("compare", "traffic", "-o", str(folder))
    assert refused.exit_code == 2
    assert "--force" in refused.stderr
    assert (folder / "result.json").read_text() == "old"
    assert run("compare", "traffic", "-o", str(folder), "--force").exit_code == 0
    assert json.loads((folder / "result.json").read_text())["rows"]
    assert (folder / "mine").read_text() == "kept"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("moment", ["while measuring", "while writing"])
def test_an_interrupt_exits_130_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    where, name = (sweep, "run") if moment == "while measuring" else (Path, "replace")
    monkeypatch.setattr(where, name, interrupt)
    found = run("compare", "traffic", "-o", str(tmp_path / "out"), "--plot", str(tmp_path / "p.svg"))
    assert found.exit_code == 130
    assert found.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("form", ["png", "svg"])
def test_a_plot_is_a_picture(tmp_path: Path, form: str) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / f"bytes.{form}"
    assert run("compare", "traffic", "--plot", str(target)).exit_code == 0
    assert target.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")
    assert [p.name for p in tmp_path.iterdir()] == [target.name]


def test_a_plot_without_matplotlib_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    found = run("compare", "traffic", "--plot", "x.png")
    assert found.exit_code == 2
    assert "install ssmspec[plot]" in found.stderr


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("args", ["compare traffic --draft 1,3 --checks", "compare capacity", "presets"])
def test_a_narrow_terminal_loses_nothing(width: int, args: str) -> None:
    narrow, wide = run(*args.split(), COLUMNS=str(width)).stdout, run(*args.split(), COLUMNS="400").stdout
    assert all(len(line) <= width for line in narrow.splitlines())
    letters = "".join(narrow.split())
    assert all(word in letters for word in wide.split() if len(word) < 12 and "─" not in word)


def test_no_color_means_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    coloured = run("compare", "capacity", "--checks", FORCE_COLOR="1").stdout
    plain = run("compare", "capacity", "--checks", FORCE_COLOR="1", NO_COLOR="1").stdout
    assert "\x1b[32m" in coloured
    assert "\x1b[32m" not in plain


def test_presets_are_listed_and_can_be_used() -> None:
    names = [model["name"] for model in json.loads(run("presets", "--json").stdout)]
    assert "qwen3.5-4b" in names
    for name in names:
        found = run("compare", "traffic", "--model", name, "--draft", "1")
        assert found.exit_code == 0
        assert found.stdout.startswith(f"{name}: ")


def test_doctor_says_whether_the_torch_backend_works(monkeypatch: pytest.MonkeyPatch) -> None:
    found = json.loads(run("doctor", "--json").stdout)
    assert found["backend_torch"] == "works"
    assert found["torch"]
    monkeypatch.setattr(exact, "compare", lambda *args, **kwargs: 1 / 0)
    broken = run("doctor")
    assert broken.exit_code == 1
    assert "ZeroDivisionError" in broken.stdout


def test_options_in_front_of_a_subcommand_are_refused() -> None:
    found = run("compare", "--draft", "1", "traffic")
    assert found.exit_code == 2
    assert "ssmspec compare traffic --draft" in found.stderr


def test_bench_without_a_device_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = run("bench")
    assert found.exit_code == 2
    assert "bench needs a CUDA device" in found.stderr
