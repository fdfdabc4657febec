"""Random lives reach everything, repeat exactly, and what they find comes out as a short script."""

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from ssmspec_cli import main
from ssmspec_cli.soak import soak as command
from torch import Tensor
from typer.testing import CliRunner

from ssmspec import layout
from ssmspec.geometry import Arch, DType, Mode
from ssmspec.kernels.base import Kernels, Plan
from ssmspec.kernels.conv import ConvWindow
from ssmspec.measure import judge, soak
from ssmspec.measure.ledger import repaired
from ssmspec.measure.lives import Life, draw_setup
from ssmspec.measure.shrink import shrink
from ssmspec.policies.native import Native
from ssmspec.policies.ring import RingPolicy
from ssmspec.pool import StatePool
from ssmspec.runtime import events as ev
from ssmspec.runtime.engine import Engine
from ssmspec.runtime.setup import Setup, load
from ssmspec.step import Commit

app = typer.Typer()
app.command()(command)


def lives(n: int, lossy: bool = False) -> list[tuple[Setup, list[ev.Event]]]:
    found = []
    for seed in range(n):
        rng = random.Random(seed)
        setup = draw_setup(rng, "torch")
        found.append((setup, list(Life(setup, rng, lossy=lossy).events(120))))
    return found


def test_random_lives_are_natives_under_every_policy() -> None:
    report = soak.run(soak.Soak(seed=0), events=500)
    assert report.found is None
    assert report.events >= 500


@pytest.mark.slow
def test_many_random_lives_are_natives() -> None:
    report = soak.run(soak.Soak(seed=1), events=20_000)
    assert report.found is None


def test_lives_reach_everything_there_is() -> None:
    drawn = lives(300)
    setups = [s for s, _ in drawn]
    shapes = [s.geometry for s in setups]
    assert {g.arch for g in shapes} == {*Arch}
    assert {g.state_dtype for g in shapes} == {DType.FP32, DType.BF16, DType.FP16, DType.NVFP4}
    assert {s.window.mode for s in setups} == {*Mode}
    assert {s.poison for s in setups} == {None, 0xFF, 0x3E}
    assert {s.window.max_len for s in setups} == set(range(1, 7))
    for some in (
        [g.stochastic for g in shapes],
        [g.read_dtype is not None for g in shapes],
        [g.gate_lower_bound is not None for g in shapes],
        [g.group > 1 for g in shapes],
        [s.window.align > 0 for s in setups],
        [s.window.limit == s.window.max_len for s in setups],
    ):
        assert 10 < sum(some) < 290
    script = [e for _, events in drawn for e in events]
    kinds = Counter(e.kind for e in script)
    assert kinds.keys() == ev.EVENTS.keys()
    assert min(kinds.values()) > 300, kinds
    accepts = [e for e in script if isinstance(e, ev.Accept)]
    assert sum(0 in e.accepted.values() for e in accepts) > 300
    assert sum(bool(e.force_flush) for e in accepts) > 300
    assert {how for e in accepts for how in e.boundary.values()} == {"copy", "stay"}
    assert {e.settle for e in script if isinstance(e, ev.Offload)} == {True, False}


def test_windows_stay_open_over_other_events() -> None:
    """Accepts come late: up to three verifies are open, and other requests move, abort and restore meanwhile."""
    depth: Counter[int] = Counter()
    between: Counter[str] = Counter()
    for _, events in lives(40):
        opened = 0
        for e in events:
            opened += isinstance(e, ev.Verify) - isinstance(e, ev.Accept)
            depth[opened] += 1
            if opened and not isinstance(e, ev.Verify | ev.Accept):
                between[e.kind] += 1
        assert not opened
    assert {*depth} == {0, 1, 2, 3}
    assert between.keys() >= {
        "move",
        "abort",
        "admit",
        "prefill",
        "fork",
        "flush",
        "preempt",
        "offload",
        "free",
    }


def test_rings_fill_and_are_folded() -> None:
    """An overfull ring is the rarest of what a step meets: one verified row in ten at least."""
    rows = flushes = 0
    for setup, script in lives(12):
        e = Engine("checkpointing", setup)
        kernels = e.layers.policy.kernels

        def advance(pool: StatePool, commit: Commit, ring: layout.Ring, kernels: Kernels = kernels) -> Plan:
            nonlocal rows, flushes
            count = pool["count"][commit.slots]
            rows += int((commit.lens > 0).sum())
            flushes += int(((count > 0) & (commit.lens > 0) & (count + commit.lens > ring.limit)).sum())
            return kernels.advance(pool, commit, ring)

        e.layers.policy.kernels = replace(kernels, advance=advance)
        for event in script:
            e.play(event)
    assert rows > 400
    assert flushes > rows / 10


def test_a_seed_decides_a_life_whatever_the_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "cpus", lambda: 2)
    one, again, two = (soak.run(soak.Soak(seed=5), events=200, jobs=jobs) for jobs in (1, 1, 2))
    assert one == again == two
    assert soak.run(soak.Soak(seed=6), events=200) != one


def test_no_more_processes_than_cpus_or_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five events are one life, which needs no second process; 250 are three lives at most."""
    started = []

    def start(jobs: int, *args: object, **kwargs: object) -> None:
        started.append(jobs)
        raise InterruptedError

    monkeypatch.setattr(soak, "ProcessPoolExecutor", start)
    monkeypatch.setattr(soak, "cpus", lambda: 8)
    with pytest.raises(ValueError, match=r"jobs=100000 .* 8 CPUs.*; the nearest legal value is 8"):
        soak.run(soak.Soak(seed=5), events=5, jobs=100_000)
    assert soak.run(soak.Soak(seed=5), events=5, jobs=8).lives == 1
    assert started == []
    with pytest.raises(InterruptedError):
        soak.run(soak.Soak(seed=5), events=250, jobs=8)
    assert started == [3]


@pytest.mark.parametrize("policy", layout.POLICY_NAMES)
def test_a_script_with_gaps_is_made_legal(policy: str) -> None:
    """Any part of a life, repaired, is played without a refusal."""
    lossy = policy == "native"
    for seed, (setup, events) in enumerate(lives(6, lossy)):
        if setup.geometry.read_dtype is not None:
            continue
        rng = random.Random(seed)
        some = [e for e in events if rng.random() < 0.6]
        e = Engine(policy, replace(setup, poison=None))
        for event in repaired(some, setup.slots, lossy=lossy):
            e.play(event)
            e.check_integrity()


def test_shrinking_keeps_what_it_takes_to_fail() -> None:
    """Two of a hundred events are needed, in their order."""
    script: list[ev.Event] = [ev.Move(request=str(i)) for i in range(100)]

    def fails(events: list[ev.Event]) -> list[ev.Event] | None:
        names = [e.request for e in events if isinstance(e, ev.Move)]
        wrong = "17" in names and "83" in names
        return events[: names.index("83") + 1] if wrong else None

    assert shrink(script, fails) == [ev.Move(request="17"), ev.Move(request="83")]


def moved_without_folding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Commit, "settles", property(lambda c: c.force_flush))


def cursors_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    real = StatePool.copy

    def copy(self: StatePool, src: Tensor, dst: Tensor) -> None:
        kept = {f.name: self[f.name][dst].clone() for f in self.layout if f.name in ("count", "winner")}
        real(self, src, dst)
        for name, values in kept.items():
            self[name][dst] = values

    monkeypatch.setattr(StatePool, "copy", copy)


def rejected_inputs_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alike in every policy: only a recomputed state shows it."""
    real = ConvWindow.accept

    def accept(self: ConvWindow, c: Commit) -> None:
        kept = torch.where(c.accepted > 0, c.lens, 0)
        real(self, Commit(c.slots, c.lens, kept, c.next_slots, c.mark, c.mark_slots, c.force_flush))

    monkeypatch.setattr(ConvWindow, "accept", accept)


def nothing_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RingPolicy, "reset", lambda self, slots: None)
    monkeypatch.setattr(Native, "reset", lambda self, slots: None)


BUGS = [moved_without_folding, cursors_left_behind, rejected_inputs_kept, nothing_reset]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_found_and_shrunk(
    bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        bug(patch)
        found = soak.run(soak.Soak(seed=0), events=3000).found
        assert found is not None
        assert len(found.script) <= 14
        assert len(found.script) <= found.drawn
        assert judge.play(found.setup, found.policies, found.script)[1] == found.failure
    assert judge.play(found.setup, found.policies, found.script)[1] is None


@pytest.mark.parametrize("bug", [moved_without_folding, rejected_inputs_kept], ids=lambda bug: bug.__name__)
def test_the_command_writes_a_script_that_play_reproduces(
    bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(app: Any, *args: str) -> Any:
        return CliRunner().invoke(app, [*args], env={"COLUMNS": "200"})

    script = tmp_path / "found.jsonl"
    with monkeypatch.context() as patch:
        bug(patch)
        result = run(app, "--events", "2000", "--seed", "0", "-o", str(script))
        assert result.exit_code == 1
        assert "one went wrong" in result.stdout
        assert f"ssmspec play {script} --policy " in result.stdout
        policy = result.stdout.split("--policy ")[1].strip()
        assert run(main.app, "play", str(script), "--policy", policy).exit_code == 1
    assert run(main.app, "play", str(script), "--policy", policy).exit_code == 0
    lines = script.read_text().splitlines()
    assert load(json.loads(lines[0])).slots > 1
    assert 1 < len(lines) < 16


def test_the_command_says_how_far_it_came_and_leaves_no_file(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["--events", "100", "--seed", "3", "-o", str(tmp_path / "x")])
    assert result.exit_code == 0
    assert "1 lives" in result.stdout
    assert "events/s, seed 3: none wrong" in result.stdout
    assert not [*tmp_path.iterdir()]
