"""What must be bit-equal is, over whole lives; what is not, is as far away as it may be."""

import random
from dataclasses import replace

import pytest
import torch
from shapes import GATES, STORES, geometry

from ssmspec.geometry import READ_DTYPES, DType, Geometry, Mode, Window
from ssmspec.kernels.base import Tokens
from ssmspec.layout import POLICY_NAMES
from ssmspec.measure import exact
from ssmspec.measure.lives import Life
from ssmspec.measure.lockstep import Contender, Lockstep, Pair
from ssmspec.runtime.engine import Engine
from ssmspec.runtime.setup import Setup
from ssmspec.step import Step

W = Window(max_len=4, ring_len=6, align=7)
RECORDING = POLICY_NAMES[1:]


def play(
    contenders: list[Contender], native: Contender, seed: int, events: int = 80, **engine: int
) -> list[Pair]:
    pairs: list[Pair] = []
    setup = Setup(window=native.w, slots=24, **engine)
    lockstep = Lockstep(native, contenders, pairs.append, setup)
    for event in Life(setup, random.Random(seed), lossy=False).events(events):
        lockstep.play(event)
    assert not lockstep.unmatched()
    assert len(pairs) > 100
    return pairs


def contenders(g: Geometry, w: Window, names: tuple[str, ...] = RECORDING) -> list[Contender]:
    return [Contender(name=n, policy=n, g=g, w=w) for n in names]


def native(g: Geometry, w: Window = W) -> Contender:
    return Contender(name="native", policy="native", g=replace(g, read_dtype=None), w=w)


@pytest.mark.parametrize("poison", [0xFF, 0x3E], ids=["nan", "0x3e"])
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("gate", GATES)
def test_every_policy_has_native_bits_over_a_whole_life(gate: str, store: str, poison: int) -> None:
    g = geometry(gate, store)
    for pair in play(contenders(g, W), native(g), seed=poison, poison=poison):
        assert torch.equal(pair.native.value, pair.other.value), (
            pair.contender,
            pair.event,
            pair.native.what,
        )
        assert pair.native.value.isfinite().all()


@pytest.mark.parametrize("t", [1, 2, 3, 6, 16])
def test_every_window_length_has_native_bits(t: int) -> None:
    w = Window(max_len=t, align=17)
    g = geometry("gdn", "fp16")
    for pair in play(contenders(g, w), native(g, w), seed=t, poison=0xFF):
        assert torch.equal(pair.native.value, pair.other.value)


@pytest.mark.parametrize("read", READ_DTYPES)
@pytest.mark.parametrize("gate", ["gdn", "kda", "mamba2"])
@pytest.mark.parametrize("mode", list(Mode))
def test_a_read_copy_never_enters_the_anchor(gate: str, read: DType, mode: Mode) -> None:
    g = geometry(gate, read_dtype=read)
    outputs_differ = False
    for pair in play(contenders(g, replace(W, mode=mode)), native(g), seed=1, poison=0xFF):
        same = torch.equal(pair.native.value, pair.other.value)
        outputs_differ |= not same
        assert same or pair.native.what == "output"
    assert outputs_differ


@pytest.mark.parametrize("store", ["fp32", "fp16"])
@pytest.mark.parametrize("gate", GATES)
def test_fast_mode_is_near_native(gate: str, store: str) -> None:
    """fp32 sums of up to 20 terms in another order, then bf16 outputs: 2 bf16 ulp (2^-7) of the largest value."""
    g = geometry(gate, store)
    for pair in play(contenders(g, replace(W, mode=Mode.FAST)), native(g), seed=3, poison=0xFF):
        a, b = pair.native.value.float(), pair.other.value.float()
        assert (a - b).abs().max() <= 2**-7 * a.abs().max().clamp(min=1)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("gate", ["gdn", "mamba2"])
def test_fast_mode_keeps_the_bits_that_are_expected_of_it(gate: str, store: str) -> None:
    """Mamba2's records do not depend on the state, so its states stay native's where rounding does."""
    g, w = geometry(gate, store), replace(W, mode=Mode.FAST)
    want = {name: exact.expected(name, g, w) for name in RECORDING}
    assert any(e.states for e in want.values()) == (gate == "mamba2")
    assert not any(exact.expected(name, g, w, "triton").states for name in RECORDING), "it folds by products"
    for pair in play(contenders(g, w), native(g), seed=5, events=40):
        must = {"state": want[pair.contender].states, "output": want[pair.contender].outputs, "conv": True}
        assert not must[pair.native.what] or torch.equal(pair.native.value, pair.other.value)


@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16])
def test_low_precision_records_are_expected_to_differ_and_do(dtype: DType) -> None:
    g = geometry("gdn", record_dtype=dtype)
    assert not exact.expected("recover", g, W).states
    pairs = play(contenders(g, W, ("recover",)), native(g), seed=2)
    assert not all(torch.equal(p.native.value, p.other.value) for p in pairs if p.native.what == "state")


def test_rounding_at_a_flush_leaves_native_after_a_few_tokens_and_exact_mode_does_not() -> None:
    """vllm-project/vllm#49887: a reporter saw fp16 state leave native at token 8."""
    g = exact.reduced(geometry("gdn", "fp16", head_k=32))
    windows = [Window(max_len=4, mode=mode) for mode in Mode]
    found = {(r.policy, r.mode): r for r in exact.compare(g, windows, ("native", "checkpointing"), steps=64)}
    flushed, sequential = found["checkpointing", Mode.FAST], found["checkpointing", Mode.EXACT]
    assert flushed.first is not None
    assert flushed.first.step <= 8
    assert flushed.outputs.different > 100
    assert sequential.equal
    assert sequential.ok
    assert flushed.ok
    assert sequential.outputs.compared == flushed.outputs.compared > 300


def test_the_comparator_reports_a_policy_that_is_not_what_it_promised() -> None:
    result = exact.compare(geometry(), [Window(max_len=2)], ("recover",), requests=1, steps=2)[0]
    broken = replace(result, outputs=replace(result.outputs, different=1))
    assert result.ok
    assert not broken.ok


@pytest.mark.parametrize("policy", ["recover", "checkpointing"])
def test_both_copies_are_cast_from_the_same_unrounded_state(policy: str) -> None:
    """From the same zero state the first window leads to the same unrounded state, however the anchor is stored."""
    copies = []
    for store in ("fp32", "fp16", "nvfp4"):
        g = geometry("gdn", store, read_dtype=DType.BF16)
        e = Engine(policy, Setup(geometry=g, window=Window(max_len=4))).layers
        e.policy.start(torch.tensor([1]), torch.tensor([0]))
        e.conv.reset(torch.tensor([1]))
        step = Step.of([1], [4], 4, accepted=[3], force_flush=[1])
        x, a, b = next(e.content.inputs([[1, 2, 3, 4]], 4))
        packed = e.conv.verify(0, step, x, e.content.conv_weight[0])
        e.policy.verify(0, step, Tokens.unpack(e.g, packed, a, b))
        e.policy.accept(step.close())
        copies.append(e.pool["read"][0, 1])
    assert copies[0].abs().max() > 0
    assert torch.equal(copies[0], copies[1])
    assert torch.equal(copies[0], copies[2])
