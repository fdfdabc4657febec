"""`ssmspec play`: a script is played in lockstep with native, and a bad one is refused by its line."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ssmspec_cli.main import app
from typer.testing import CliRunner

from ssmspec.geometry import Arch, DType, Geometry, Mode, Window
from ssmspec.runtime.events import ScriptError
from ssmspec.runtime.setup import MAX_POOL_BYTES, Setup, load

SETUP = {"window": 4, "ring": 8, "align": 5, "state_dtype": "float16", "slots": 8}
LIFE = [
    {"event": "admit", "request": "a", "prompt": 6},
    {"event": "prefill", "chunks": {"a": 6}},
    {"event": "verify", "windows": {"a": 4}},
    {"event": "accept", "accepted": {"a": 3}},
    {"event": "verify", "windows": {"a": 4}},
    {"event": "accept", "accepted": {"a": 0}},
    {"event": "fork", "request": "a", "to": "b"},
    {"event": "verify", "windows": {"a": 2, "b": 4}},
    {"event": "accept", "accepted": {"a": 2, "b": 4}},
    {"event": "free", "request": "a"},
    {"event": "flush", "request": "b"},
]


def play(*lines: dict[str, Any] | str, args: Sequence[str] = ()) -> Any:
    text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    return CliRunner().invoke(app, ["play", "-", *args], input=text, env={"COLUMNS": "200"})


@pytest.mark.parametrize("mode", list(Mode))
def test_a_life_is_native_s_as_far_as_the_mode_promises(mode: Mode) -> None:
    found = play({"model": "qwen3.5-4b", "align": 5, "mode": mode}, *LIFE, args=["--json"])
    assert found.exit_code == 0, found.stderr
    data = json.loads(found.stdout)
    assert data["schema"] == "ssmspec.play"
    assert data["events"] == len(LIFE)
    assert [p["policy"] for p in data["policies"]] == ["native", "recover", "every-step", "checkpointing"]
    rows = data["policies"][1:]
    assert all(row["outputs"]["compared"] > 0 and row["states"]["compared"] > 0 for row in rows)
    assert all(row["equal"] for row in rows) == (mode is Mode.EXACT)


def test_the_setup_is_optional_and_comes_back() -> None:
    data = json.loads(play(*LIFE, args=["--json", "--policy", "recover"]).stdout)
    assert load(data["setup"]) == Setup()
    assert [p["policy"] for p in data["policies"]] == ["native", "recover"]


def test_the_help_shows_a_life_that_plays() -> None:
    """Of the setup, and an event a line: what --help prints, as it stands there."""
    text = CliRunner().invoke(app, ["play", "--help"], env={"COLUMNS": "80"}).stdout
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith('{"event"')]
    assert len(lines) == 6
    first = text[text.index('{"model"') : text.index('"slots": 32}') + len('"slots": 32}')]
    found = play(" ".join(first.split()), *lines, args=["--json", "--policy", "recover"])
    assert found.exit_code == 0, found.stderr
    assert json.loads(found.stdout)["events"] == 6


def test_a_line_that_is_neither_setup_nor_event_is_told_what_an_event_has() -> None:
    found = play({"evnt": "admit", "request": "a"})
    assert found.exit_code == 2
    assert "unknown key 'evnt'" in found.stderr
    assert found.stderr.endswith('; an event has the key "event"\n')
    assert "an event has" not in play({"window": 0}).stderr


def test_a_preset_is_played_in_a_reduced_shape() -> None:
    data = json.loads(
        play({"model": "kimi-linear-48b-a3b"}, *LIFE, args=["--json", "--policy", "recover"]).stdout
    )
    assert data["setup"]["arch"] == "kda"
    assert data["setup"]["head_k"] == 128
    assert data["setup"]["layers"] == 2


def test_a_file_is_played_and_a_missing_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "life.jsonl"
    path.write_text("\n".join(map(json.dumps, LIFE)))
    found = CliRunner().invoke(app, ["play", str(path)])
    assert found.exit_code == 0
    assert "equal" in found.stdout
    missing = CliRunner().invoke(app, ["play", str(tmp_path / "none.jsonl")])
    assert missing.exit_code == 2
    assert "none.jsonl: No such file" in missing.stderr


ORDERS: dict[str, tuple[list[dict[str, Any] | str], str]] = {
    "no event": ([], "-: there is no event in it"),
    "a setup alone": ([SETUP], "-: there is no event in it"),
    "not JSON": (['{"event": '], "line 1: not JSON"),
    "unknown event": ([{"event": "verfy"}], "line 1: event='verfy' is not one of"),
    "unknown key": (
        [LIFE[0], {"event": "prefill", "chunk": {}}],
        "line 2: prefill: unknown key 'chunk'; it takes chunks",
    ),
    "negative count": (
        [{**LIFE[0], "prompt": -1}],
        "line 1: admit: prompt=-1 must be a whole number in 0..1048576",
    ),
    "unknown setup key": ([{"windw": 4}], "setup: unknown key 'windw'; it takes model, arch,"),
    "setup guess": ([{"windw": 4}], "did you mean 'window'?"),
    "setup behind an event": ([LIFE[0], SETUP], "line 2: event=None is not one of"),
    "align below T": (
        [{"align": 3}],
        "setup: align=3 < window=4: a window may cross one boundary at most; the nearest legal value is 4",
    ),
    "T above the ring": ([{"window": 6, "ring": 5}], "setup: ring=5 cannot hold a window"),
    "HV % H": ([{"key_heads": 2, "value_heads": 3}], "setup: value_heads=3 is not a multiple of key_heads=2"),
    "float64 is internal": (
        [{"state_dtype": "float64"}],
        "setup: state_dtype='float64' is not one of float32, bfloat16, float16, nvfp4",
    ),
    "unknown backend": ([{"backend": "cuda"}, LIFE[0]], "backend='cuda' is not one of"),
    "an order": ([LIFE[0], LIFE[2]], "line 2: verify 'a': the request is prefilling"),
    "no window open": ([*LIFE[:2], LIFE[3]], "line 3: accept: no window is open"),
    "window above T": (
        [*LIFE[:2], {"event": "verify", "windows": {"a": 5}}],
        "line 3: verify 'a': window=5 is outside 1..4",
    ),
    "count above the window": (
        [*LIFE[:3], {"event": "accept", "accepted": {"a": 5}}],
        "line 4: accept 'a': accepted=5 is outside 0..4",
    ),
    "unknown request": ([LIFE[-1]], "line 1: request 'b' is not alive"),
    "no slot": (
        [{"slots": 2}, LIFE[0], {**LIFE[0], "request": "b"}],
        "line 3: all 1 slots are held by requests",
    ),
}


@pytest.mark.parametrize(("lines", "said"), ORDERS.values(), ids=ORDERS)
def test_a_bad_script_is_refused_by_its_line(lines: list[dict[str, Any] | str], said: str) -> None:
    found = play(*lines)
    assert found.exit_code == 2
    assert isinstance(found.exception, SystemExit)
    assert found.stdout == ""
    assert said in found.stderr
    assert found.stderr.count("\n") == 1


def test_a_line_is_counted_with_the_empty_ones() -> None:
    assert "line 4: request 'z'" in play(LIFE[0], "", "", {"event": "free", "request": "z"}).stderr


def test_an_endless_line_is_not_read_to_its_end() -> None:
    assert "line 1: longer than 1048576 characters" in play("[" * 2_000_000).stderr


def test_a_broken_promise_exits_1(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from ssmspec.measure import exact

    honest = exact.play

    def lying(*args: Any, **kwargs: Any) -> list[exact.Exactness]:
        return [replace(e, states=replace(e.states, different=1)) for e in honest(*args, **kwargs)]

    monkeypatch.setattr(exact, "play", lying)
    found = play(*LIFE, args=["--policy", "recover"])
    assert found.exit_code == 1
    assert "DIFFERS" in found.stdout


SETUPS = {
    "default": Setup(),
    "kda": Setup(
        geometry=Geometry(
            arch=Arch.KDA,
            num_layers=3,
            num_k_heads=2,
            num_v_heads=2,
            head_k=8,
            head_v=4,
            conv=Setup().geometry.conv.__class__(channels=2 * 2 * 8 + 2 * 4, width=3, dilation=2),
            act_dtype=DType.FP16,
            state_dtype=DType.BF16,
            stochastic=True,
            record_dtype=DType.FP16,
            read_dtype=DType.FP8,
            gate_lower_bound=-5.0,
        ),
        window=Window(max_len=3, ring_len=9, align=6, mode=Mode.FAST),
        slots=5,
        seed=7,
        poison=0x3E,
    ),
}


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_a_setup_survives_its_line(setup: Setup) -> None:
    assert load(json.loads(setup.dump())) == setup


@pytest.mark.parametrize(
    "data",
    [
        {"slots": 4096, "head_k": 4096, "head_v": 4096},
        {"layers": 65},
        {"slots": True},
        {"seed": "1"},
        {"model": "qwen3.5-4b", "head_k": 8},
        {"model": "gpt"},
        {"mode": ["exact"]},
        {"stochastic": 1},
        {"gate_lower_bound": 1.0, "arch": "kda"},
        {"window": 32},
    ],
    ids=str,
)
def test_a_hostile_setup_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(ScriptError, match=r"^setup: "):
        load(data)


def test_a_setup_may_not_ask_for_more_memory_than_the_limit() -> None:
    """Native, 2 layers x 4 states of 2 x 64 x 64 fp32 are 256 KiB a slot, and the conv window little more."""
    fit = MAX_POOL_BYTES // (2 * 4 * 2 * 64 * 64 * 4)
    with pytest.raises(ScriptError, match="MiB is the limit; the nearest legal value is"):
        load({"head_k": 64, "head_v": 64, "slots": fit + 1})
    assert load({"head_k": 64, "head_v": 64, "slots": fit // 2}).slots == fit // 2
