"""What is timed is what was checked, and whole cycles of it."""

import pytest
import torch
from shapes import GATES, geometry

from ssmspec.acceptance import from_rate
from ssmspec.geometry import Mode, Window
from ssmspec.kernels.choices import RingChoice, ShapeClass, Table
from ssmspec.layout import POLICY_NAMES
from ssmspec.measure import bench, peers
from ssmspec.measure.bench import Spread, Timing
from ssmspec.measure.expected import Expected
from ssmspec.measure.rig import Rig

HERE = {"device": "cpu", "backend": "torch", "seed": 0}
W = Window(max_len=3, ring_len=6)


@pytest.mark.parametrize("gate", ["gdn", "kda", "mamba2"])
def test_a_cycle_leads_every_policy_to_the_same_states(gate: str) -> None:
    g = geometry(gate, num_layers=2)
    states = []
    for name in POLICY_NAMES:
        rig = Rig(name, g, W, 3, from_rate(0.6, 2), steps=7, **HERE)
        rig.cycle()
        states.append(rig.settled())
    assert states[0].abs().max() > 0
    assert all(torch.equal(s, states[0]) for s in states)


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("gate", GATES)
def test_a_shape_that_keeps_its_promises_is_timed(gate: str, mode: Mode) -> None:
    w = Window(max_len=3, ring_len=6, mode=mode)
    assert bench.disagreement("checkpointing", geometry(gate), w, from_rate(0.6, 2), **HERE) is None


def test_a_broken_promise_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = Window(max_len=3, ring_len=6, mode=Mode.FAST)
    g, rate = geometry("gdn", "fp16"), from_rate(0.6, 2)
    monkeypatch.setattr(bench, "expected", lambda *_: Expected(outputs=True, states=True))
    assert "differ from native" in str(bench.disagreement("checkpointing", g, fast, rate, **HERE))
    monkeypatch.setattr(bench, "expected", lambda *_: Expected(outputs=False, states=False))
    monkeypatch.setattr(bench, "FAST_BOUND", 1e-9)
    assert "away from native" in str(bench.disagreement("checkpointing", g, fast, rate, **HERE))


def test_a_layer_pays_its_part_of_the_accept() -> None:
    t = Timing(
        policy="recover", mode=Mode.EXACT, state_dtype="float32", draft=3, ring=16, batch=8, accepted=3.0, layers=4,
        step_us=Spread(median=100.0, iqr=1.0), accept_us=Spread(median=20.0, iqr=1.0), bytes=3e8, bandwidth=4e12,
    )  # fmt: skip
    assert t.layer_us == 120.0
    assert t.share == pytest.approx(75 / 120)
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) == Spread(median=4.0, iqr=4.0)


@pytest.mark.parametrize("peer", peers.PEERS)
def test_a_peer_that_is_not_there_is_absent_and_no_error(peer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    g = geometry("gdn", "bf16" if peer == peers.RING else "fp32", head_k=128, head_v=128)
    drafts = 0 if peer == peers.FLASH else 3
    t = peers.run(peer, g, Window(max_len=drafts + 1), 2, from_rate(0.6, drafts), bandwidth=4e12)
    needed = "flashinfer" if peer in (peers.FLASHINFER, peers.RING) else "vllm"
    assert (t.absent, t.refused, t.layer_us) == (f"{needed} is not installed", None, None)


def test_a_peer_is_absent_where_it_cannot_do_the_same() -> None:
    g = geometry("gdn", head_k=128, head_v=128)
    assert "not kda" in str(peers.absent(peers.FUSED, geometry("kda"), W))
    assert "at most 8 tokens" in str(peers.absent(peers.FUSED, g, Window(max_len=9)))
    assert "single tokens" in str(peers.absent(peers.FUSED, g, Window(max_len=1)))
    assert "no draft can be rejected" in str(peers.absent(peers.FLASH, g, W))
    assert "no kernel for mamba2" in str(peers.absent(peers.FLASH, geometry("mamba2"), W))
    assert "as many key heads" in str(peers.absent(peers.TRITON, geometry("kda"), W))
    assert "ring for kda" in str(peers.absent(peers.RING, geometry("kda"), W))
    assert "kernel for mamba2" in str(peers.absent(peers.FLASHINFER, geometry("mamba2"), W))
    assert "serves bf16 states" in str(peers.absent(peers.RING, g, W))
    assert "serves bf16 states" in str(
        peers.absent(peers.FLASHINFER, geometry("kda", head_k=128, head_v=128), W)
    )
    assert "128 x 128" in str(peers.absent(peers.FLASHINFER, geometry("gdn"), W))
    assert "4 and 8" in str(peers.absent(peers.RING, geometry("gdn", "bf16", head_k=128, head_v=128), W))


@pytest.mark.gpu
@pytest.mark.vllm
@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("peer", peers.PEERS)
def test_a_peer_computes_the_same_layer(peer: str, gate: str, drafts: int) -> None:
    heads = 4 if gate.startswith("kda") else 2
    g, w = geometry(gate, num_k_heads=heads, head_k=128, head_v=128), Window(max_len=drafts + 1)
    if (why := peers.absent(peer, g, w)) is not None:
        broken = any(word in why for word in ("installed", "imported", "has no fused"))
        assert peer not in (peers.FUSED, peers.TRITON) or not broken, why
        pytest.skip(why)
    assert peers.disagreement(peer, g, w, from_rate(0.6, drafts), seed=0) is None


def test_a_policy_that_does_not_care_for_ring_or_mode_is_timed_once() -> None:
    from ssmspec_cli import bench as command
    from ssmspec_cli import parse
    from ssmspec_cli.options import Options

    found = parse.study(Options(draft="3", ring="8,16", mode="exact,fast", state_dtype="fp32"), ())
    runs = [
        (name, w.mode.value, w.ring_len)
        for name, w, _ in command._runs(found, ("peer",), Table(device="none"))
    ]
    assert sorted(name for name, _, _ in runs) == sorted(
        ["peer", "native", *2 * ["recover"], *2 * ["every-step"], *4 * ["checkpointing"]]
    )
    assert {(mode, ring) for name, mode, ring in runs if name == "checkpointing"} == {
        ("exact", 8), ("exact", 16), ("fast", 8), ("fast", 16),
    }  # fmt: skip


def test_a_ring_that_was_not_asked_for_is_the_tables() -> None:
    from ssmspec_cli import bench as command
    from ssmspec_cli import parse
    from ssmspec_cli.options import Options

    found = parse.study(Options(draft="1,3", policy="checkpointing", mode="exact", state_dtype="bf16"), ())
    shape = ShapeClass.of(found.cases[0].model.geometry)
    table = Table(device="a GPU", rings=(RingChoice(mode=Mode.EXACT, shape=shape, window=2, ring=4),))
    assert [(w.max_len, w.ring_len) for _, w, _ in command._runs(found, (), table)] == [(2, 4), (4, 16)]


@pytest.mark.parametrize("name", ["no_such_module.f", "math.no_such_function"])
def test_a_kernel_of_another_version_is_missing_by_name(name: str) -> None:
    from ssmspec.measure import stock

    with pytest.raises(ImportError, match=name):
        stock.found(*name.split("."))
