"""L: numerics."""

from itertools import pairwise

import pytest
import torch
from numeric import Numeric, near, params, tokens
from rig import every_recurrence, shape

from ssmspec.acceptance import Acceptance
from ssmspec.geometry import Arch, DType, Mode, Window
from ssmspec.measure import bench
from ssmspec.measure.expected import expected


@pytest.mark.parametrize("count", [1024, pytest.param(4096, marks=pytest.mark.slow)])
def test_low_precision_records_do_not_let_the_error_grow(count: int, backend: str) -> None:
    """L1 (sgl-project/sglang#28695, #35544): bf16 records, decay 0.999, a flush every three windows.

    Each window's c is computed from the state that the records before it gave, so their rounding is corrected; what
    remains is of the size of one rounding, 2**-9, over the tokens that a state remembers.
    """
    g = shape(num_layers=1, num_k_heads=1, num_v_heads=1, head_v=8, record_dtype=DType.BF16)
    p = params(g, decay=0.999)
    ours = Numeric("checkpointing", g, Window(max_len=4, ring_len=16), p, backend)
    oracle = Numeric("native", shape(**_plain(g), state_dtype=DType.FP64), Window(max_len=4), p, backend)
    errors = []
    for i in range(count // 4):
        x = tokens(g, seed=i)
        for rig in (ours, oracle):
            rig.step(x, 4)
        if (i + 1) % (count // 16) == 0:
            a, b = ours.state().double(), oracle.state().double()
            errors.append(float((a - b).norm() / b.norm()))
    assert all(e < 2**-6 for e in errors)
    assert max(errors[2:]) < 2 * max(errors[:2]), errors


def _plain(g: object) -> dict[str, int]:
    return {n: getattr(g, n) for n in ("num_layers", "num_k_heads", "num_v_heads", "head_v")}


GATES = {"typical": 0.9, "near 0": 1 - 2**-20, "very negative": 2**-100}
BETAS = {"near 0": -15.0, "middle": 0.0, "near 1": 15.0}


@every_recurrence
@pytest.mark.parametrize("decay", GATES.values(), ids=GATES)
@pytest.mark.parametrize("beta", BETAS.values(), ids=BETAS)
def test_recover_replays_what_native_did(arch: Arch, decay: float, beta: float, backend: str) -> None:
    """L2 (vllm-project/vllm#58863: 28 of 62 cases were not bit-equal): counts 1 to 4, three seeds each."""
    g = shape(arch, num_layers=1)
    p = params(g, decay)
    rigs = {
        "native": Numeric("native", g, Window(max_len=4), p, backend),
        "exact": Numeric("recover", g, Window(max_len=4), p, backend),
        "fast": Numeric("recover", g, Window(max_len=4, mode=Mode.FAST), p, backend),
    }
    for seed in range(3):
        for rig in rigs.values():
            rig.start()
        for count in (1, 2, 3, 4):
            x = tokens(g, seed=10 * seed + count, beta=beta)
            outs = {name: rig.step(x, count) for name, rig in rigs.items()}
            assert torch.equal(outs["exact"], outs["native"])
            assert torch.equal(rigs["exact"].state(), rigs["native"].state())
            assert near(rigs["fast"].state(), rigs["native"].state())


@pytest.mark.parametrize("policy", ["native", "recover", "every-step", "checkpointing"])
@pytest.mark.parametrize("state", [DType.BF16, DType.FP16])
def test_stochastic_rounding_is_a_function_of_request_and_position(
    policy: str, state: DType, backend: str
) -> None:
    """L9 (vllm-project/vllm#35753, sgl-project/sglang#26929): a window committed as 4, as 2 + 2, and in another row.

    Where native rounds, at a step's end, the draw depends on (seed, position): so a replay repeats it, and 4 and
    2 + 2 differ by the rounding in the middle alone.
    """
    g = shape(num_layers=1, state_dtype=state, stochastic=True)
    p, w, x = params(g, 0.9), Window(max_len=4), tokens(g, seed=1)
    states = {}
    for name, row, cuts in (
        ("4", 0, [(0, 4)]),
        ("again", 0, [(0, 4)]),
        ("row", 1, [(0, 4)]),
        ("2+2", 0, [(0, 2), (2, 4)]),
        ("2+2 row", 1, [(0, 2), (2, 4)]),
    ):
        rig = Numeric(policy, g, w, p, backend, row=row)
        for cut in cuts:
            rig.step(x.part(*cut), cut[1] - cut[0])
        states[name] = rig.state().float()
    for same in (("4", "again"), ("4", "row"), ("2+2", "2+2 row")):
        assert torch.equal(*(states[s] for s in same))
    for name, cuts in (("4", [(0, 4)]), ("2+2", [(0, 2), (2, 4)])):
        native = Numeric("native", g, w, p, backend)
        for cut in cuts:
            native.step(x.part(*cut), cut[1] - cut[0])
        assert torch.equal(states[name], native.state().float())
    gap = (states["4"] - states["2+2"]).abs().max() / states["4"].abs().max()
    assert 0 < gap < 4 * torch.finfo(getattr(torch, state)).eps
    other = Numeric(policy, g, w, p, backend, seed=9)
    other.step(x, 4)
    assert not torch.equal(other.state().float(), states["4"]), "another request draws otherwise"


@pytest.mark.parametrize("policy", ["recover", "every-step", "checkpointing"])
def test_a_flush_moves_the_position_of_the_draws(policy: str, backend: str) -> None:
    """L9: rings of four windows are folded and begun again, and native's bits are drawn on and on."""
    g = shape(num_layers=1, state_dtype=DType.FP16, stochastic=True)
    p, w = params(g, 0.9), Window(max_len=4, ring_len=16)
    ours, native = (Numeric(name, g, w, p, backend) for name in (policy, "native"))
    for i in range(12):
        x = tokens(g, seed=i)
        assert torch.equal(ours.step(x, 1 + i % 4), native.step(x, 1 + i % 4))
        assert torch.equal(ours.state(), native.state())


def test_acceptance_is_flat_over_time() -> None:
    """L11 (vllm-project/vllm#47087, #55357, sgl-project/sglang#30763): 2,000 steps, each position in quarters.

    A count of a position in 500 steps has a standard error of at most 0.5 / sqrt(500) = 0.022.
    """
    counts = list(Acceptance(per_position=(0.8, 0.64, 0.512)).sample(2000, seed=0))
    for position in (1, 2, 3):
        rates = [sum(n > position for n in counts[i : i + 500]) / 500 for i in range(0, 2000, 500)]
        assert all(abs(a - b) < 4 * 2**0.5 * 0.0224 for a, b in pairwise(rates))
        assert abs(sum(rates) / 4 - 0.8**position) < 4 * 0.0112


def test_a_benchmarks_row_names_its_mode() -> None:
    """L8 (sgl-project/sglang#38184): products or one token after another; each mode has a promise of its own."""
    known = {"policy": "recover", "state_dtype": "float32", "draft": 3, "ring": 16, "batch": 1}
    with pytest.raises(TypeError, match="'mode'"):
        bench.Timing(**known, accepted=2.0)
    promises = {mode: expected("recover", shape(), Window(max_len=4, mode=mode)) for mode in Mode}
    assert promises[Mode.EXACT].equal
    assert not promises[Mode.FAST].equal
    one = torch.ones(1)
    assert bench.gap(one + bench.FAST_BOUND, one) is None
    assert bench.gap(one + 2 * bench.FAST_BOUND, one)
    assert bench.gap(one / 0, one), "no number is no small difference"
