"""The table decides speed alone; it is read as it was written, and measured as it says."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shapes import geometry
from triton_lives import ON_GPU, assert_same, lived, shape
from typer.testing import CliRunner, Result

from ssmspec.acceptance import from_rate
from ssmspec.geometry import Arch, DType, Mode, Window
from ssmspec.kernels import choices
from ssmspec.kernels.choices import Kernel, Launch, RingChoice, ShapeClass, Table, Tuned

pytest.importorskip("triton")

from ssmspec.kernels import hopper
from ssmspec.kernels.launch import window_tile
from ssmspec.measure import speeds, tune
from ssmspec.measure.tune import Case

G = geometry("gdn", head_k=128, head_v=128, num_v_heads=4)


def row(window: int, heads: int, warps: int) -> Tuned:
    launch = Launch(warps=warps, registers=None, rows=32)
    return Tuned(
        kernel=Kernel.HOPPER, shape=ShapeClass.of(G), replays=True, window=window, heads=heads, launch=launch
    )


TABLE = Table(
    device="some GPU",
    launches=(row(2, 8, 1), row(2, 64, 2), row(4, 8, 4)),
    rings=(RingChoice(mode=Mode.FAST, shape=ShapeClass.of(G), window=2, ring=12),),
)


@pytest.mark.parametrize(
    ("tokens", "batch", "warps"),
    [(2, 1, 1), (2, 2, 1), (2, 3, 2), (1, 2, 1), (2, 1000, 2), (3, 1, 4), (4, 1000, 4), (5, 1, None)],
)
def test_the_next_row_above_is_taken(tokens: int, batch: int, warps: int | None) -> None:
    """Heads are the whole batch's: 4 of a row."""
    found = TABLE.launch(Kernel.HOPPER, G, tokens, batch, replays=True)
    assert (found and found.warps) == warps
    assert TABLE.launch(Kernel.HOPPER, G, tokens, batch, replays=False) is None
    assert TABLE.launch(Kernel.FAST, G, tokens, batch, replays=True) is None
    assert TABLE.launch(Kernel.HOPPER, replace(G, head_v=64), tokens, batch, replays=True) is None


def test_a_ring_is_of_its_window_and_mode() -> None:
    assert TABLE.ring(G, Window(max_len=2, mode=Mode.FAST)) == 12
    assert TABLE.ring(G, Window(max_len=3, mode=Mode.FAST)) is None
    assert TABLE.ring(G, Window(max_len=2)) is None


def test_a_table_is_read_as_it_was_written() -> None:
    again = Table.loaded(TABLE.dumped())
    assert (again.device, again.launches, again.rings) == (TABLE.device, TABLE.launches, TABLE.rings)
    assert isinstance(again.launches[0].shape.arch, Arch)
    assert isinstance(again.launches[0].shape.state_dtype, DType)
    text = TABLE.dumped().replace('"warps"', '"wraps"')
    with pytest.raises(ValueError, match=r"launches\[0\].launch.warps' is missing"):
        Table.loaded(text)


HOLES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers())
)


@given(st.data())
def test_a_table_with_anything_in_any_place_is_read_or_refused(data: st.DataObject) -> None:
    record = json.loads(TABLE.dumped())
    at = record
    while isinstance(at, dict | list) and at:
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        if not isinstance(at[key], dict | list) or data.draw(st.booleans()):
            at[key] = data.draw(HOLES | st.dictionaries(st.text(max_size=3), HOLES, max_size=2))
            break
        at = at[key]
    refused_or_read(json.dumps(record))


@given(
    st.text(max_size=80) | st.sampled_from(["[" * 100_000, "{}", "[]", "null", '{"device": 1}', "9" * 5000])
)
def test_any_text_is_a_table_or_a_value_error(text: str) -> None:
    refused_or_read(text)


def refused_or_read(text: str) -> None:
    try:
        table = Table.loaded(text)
    except ValueError as error:
        why = str(error)
    else:
        assert Table.loaded(table.dumped()).launches == table.launches
        return
    assert len(why) < 2000


def test_newer_rows_take_the_place_of_those_for_the_same() -> None:
    newer = replace(TABLE, launches=(row(2, 64, 8), row(8, 8, 8)), rings=())
    merged = TABLE.merged(newer)
    assert {(r.window, r.heads, r.launch.warps) for r in merged.launches} == {
        (2, 8, 1), (2, 64, 8), (4, 8, 4), (8, 8, 8),
    }  # fmt: skip
    assert merged.rings == TABLE.rings
    with pytest.raises(ValueError, match="another"):
        TABLE.merged(Table(device="another"))


def test_every_committed_table_is_its_devices_and_of_kernels_that_read_it() -> None:
    for path in choices.FOLDER.glob("*.json"):
        table = Table.loaded(path.read_text())
        assert path.name == choices.file_name(table.device)
        assert table.dumped() == path.read_text()
        for tuned in table.launches:
            g = geometry(str(tuned.shape.arch))
            s = tuned.shape
            g = replace(g, head_k=s.head_k, head_v=s.head_v, state_dtype=s.state_dtype)
            mode = Mode.FAST if tuned.kernel is Kernel.FAST else Mode.EXACT
            case = Case(
                geometry=g,
                window=Window(max_len=tuned.window, mode=mode),
                batch=1,
                acceptance=from_rate(0.5, 1),
            )
            assert tuned.launch in tune.launches(case, tuned.kernel)


class Asked(Table):
    """A table that answers with one launch, and says for which kernels it was asked."""

    def launch(self, kernel: Kernel, *key: object) -> Launch | None:  # type: ignore[override]
        asked.add(kernel)
        return self.launches[0].launch


asked: set[Kernel] = set()


@pytest.mark.interpreter
@pytest.mark.gpu
@pytest.mark.parametrize("gate", ["gdn", "kda", "mamba2"])
def test_bits_do_not_depend_on_the_table(gate: str) -> None:
    """Two warps instead of one have other rows each; the Hopper kernels (on a GPU) tiles of other heights."""
    g = shape(gate, "bf16")
    lives, lanes = [], window_tile(g, 1, 1, False).lanes_k
    on_hopper = ON_GPU and hopper.unsupported(g, Window(max_len=4)) is None
    for n in (1, 2):
        launch = Launch(warps=4 if on_hopper else n, registers=128, rows=32 * n, lanes=lanes)
        asked.clear()
        with choices.using(Asked(device="here", launches=(replace(row(4, 8, 1), launch=launch),))):
            lives.append(lived("checkpointing", g))
        assert asked == {Kernel.HOPPER if on_hopper else Kernel.WINDOW}
    assert_same(*lives, gate)


def case(t: int, batch: int) -> Case:
    return Case(geometry=G, window=Window(max_len=t), batch=batch, acceptance=from_rate(0.5, t - 1))


def test_tune_keeps_what_is_faster_than_the_rule_and_the_shortest_of_equal_rings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rule takes 100 us; of the launches one takes 90 at batch 8, and all take 99 at batch 1."""
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    best = list(tune.candidates(case(2, 8)))[3]

    def measure(c: Case, table: Table) -> float | None:
        ring = {2: 60.0, 3: 50.0, 4: 49.8, 16: None}
        if c.window.ring_len != 16:
            assert table.launches or c.batch == 1
            return ring.get(c.window.limit, 70.0)
        if not table.launches:
            return 100.0
        return 90.0 if c.batch == 8 and table.launches[0].launch == best else 99.0

    said: list[str] = []
    table = tune.run([case(2, 1), case(2, 8)], said.append, measure)
    assert [(r.heads, r.launch) for r in table.launches] == [(4, None), (32, best)]
    assert Table.loaded(table.dumped()).launches == table.launches
    used = [table.launch(case(2, 1).kernel, G, 2, batch, replays=True) for batch in (1, 8)]
    assert used == [None, best], "where the rule won, the row above is not taken instead"
    assert [(r.window, r.ring) for r in table.rings] == [(2, 3)]
    assert table.device == "a GPU"
    assert any("90.0 us" in line for line in said)


def timed(ring: int, us: float, batch: int = 256, **rest: object) -> dict[str, object]:
    return {
        "model": "qwen3.5-4b", "policy": "checkpointing", "mode": "exact", "state_dtype": "float32", "draft": 1,
        "ring": ring, "batch": batch, "accepted": 2.0, "layer_us": us, **rest,
    }  # fmt: skip


def test_a_ring_of_timed_layers_is_the_shortest_of_the_fastest_at_the_largest_batch() -> None:
    """At B=256 L=8 takes 1 % more than L=16, which is noise; L=4 takes 10 % more. B=1 would say otherwise."""
    rows = [
        timed(4, 110.0),
        timed(8, 101.0),
        timed(16, 100.0),
        timed(4, 1.0, batch=1),
        timed(8, 9.0, batch=1),
    ]
    rows += [timed(16, 50.0, draft=3), timed(2, 1.0, fused=False), timed(2, 1.0, policy="every-step")]
    (found,) = tune.rings_of([{"timings": rows}])
    assert (found.mode, found.window, found.ring, found.shape.state_dtype) == (Mode.EXACT, 2, 8, DType.FP32)


def test_the_committed_rings_and_speeds_are_those_of_the_committed_times() -> None:
    root = Path(__file__).resolve().parents[1] / "benchmarks"
    names = ("decode", "earlier", "layers", "recurrences")
    records = [r for n in names for r in json.loads((root / f"{n}-h200-2026-11-30.json").read_text())]
    table = Table.loaded((choices.FOLDER / "nvidia-h200.json").read_text())
    assert set(table.rings) == set(tune.rings_of(records))
    measured = speeds.measured()
    assert set(measured.speeds) == set(speeds.speeds_of(records, measured.batch))


def ran(monkeypatch: pytest.MonkeyPatch, *args: str) -> Result:
    """`ssmspec tune` on a GPU that measures TABLE's rings and one launch, whatever it is asked for."""
    newer = replace(TABLE, launches=(row(2, 64, 8),))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: TABLE.device)
    monkeypatch.setattr(tune, "run", lambda cases, tell: newer)
    from ssmspec_cli.main import app

    return CliRunner().invoke(app, ["tune", "--draft", "1", "--batch", "8", *args])


def test_tune_adds_to_the_table_that_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(TABLE.dumped())
    result = ran(monkeypatch, "--json", "-o", str(path))
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)["launches"]) == 1
    found = {(r.window, r.heads): r.launch.warps for r in Table.loaded(path.read_text()).launches}
    assert found == {(2, 8): 1, (2, 64): 8, (4, 8): 4}
    assert "warps 8" in ran(monkeypatch).stdout


@pytest.mark.parametrize(
    ("text", "said"),
    [("[]", "is no table"), (TABLE.dumped().replace("some GPU", "an old GPU"), "an old GPU")],
)
def test_tune_leaves_a_file_alone_that_is_not_this_gpus(
    text: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(text)
    result = ran(monkeypatch, "-o", str(path))
    assert result.exit_code == 2
    assert said in result.output
    assert path.read_text() == text
    assert "not a folder" in ran(monkeypatch, "-o", str(tmp_path / "no" / "x.json")).output.replace("\n", " ")


@pytest.mark.skipif(ON_GPU, reason="there is a GPU")
def test_tune_without_a_gpu_is_a_sentence() -> None:
    from ssmspec_cli.main import app

    result = CliRunner().invoke(app, ["tune", "--json"])
    assert result.exit_code == 2
    assert "tune needs a CUDA device" in result.output
    assert "Traceback" not in result.output
