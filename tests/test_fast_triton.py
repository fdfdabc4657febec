"""Backend ``triton`` in fast mode: fp32 grade against a float64 oracle, under every policy that keeps records.

Shapes are tiny under TRITON_INTERPRET=1 and those of a served model on a GPU; the claims are the same, bounds too.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from triton_lives import DEVICE, ON_GPU, RECORDING, ints, params, policy, shape, staged, start

from ssmspec.geometry import Arch, DType, Geometry, Mode, Window
from ssmspec.kernels import fast, recurrence
from ssmspec.kernels.base import LayerParams, Tokens
from ssmspec.pool import storage

pytestmark = [pytest.mark.interpreter, pytest.mark.gpu]

W = Window(max_len=4, mode=Mode.FAST) if ON_GPU else Window(max_len=3, ring_len=4, mode=Mode.FAST)
ACT = DType.BF16 if ON_GPU else DType.FP32  # the interpreter cuts bf16 off where it should round
GATES = ["gdn", "kda", "kda-bounded", "mamba2", "mamba2-raw-dt"]


def drawn(g: Geometry, batch: int, t: int, gen: torch.Generator, alike: float = 0.0) -> Tokens:
    """Random inputs; ``alike`` near 1 makes a window's keys nearly collinear, and betas and decays nearly 1."""
    act = storage(g.act_dtype)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=gen)

    packed = draw(batch, t, 2 * g.num_k_heads * g.head_k + g.num_v_heads * g.head_v)
    gate = (g.head_k,) if g.arch is Arch.KDA else ()
    b = None if g.arch is Arch.MAMBA2 else draw(batch, t, g.num_v_heads) + 4 * alike
    a = draw(batch, t, g.num_v_heads, *gate) - 8 * alike
    x = Tokens.unpack(g, packed, a, b)
    x.k.copy_(alike * draw(batch, 1, g.num_k_heads, g.head_k) + (1 - alike) * x.k)
    b = None if b is None else b.to(act).to(DEVICE)
    return Tokens.unpack(g, packed.to(act).to(DEVICE), a.to(act).to(DEVICE), b)


def oracle(g: Geometry, p: LayerParams, s: Tensor, x: Tokens, accepted: Tensor) -> tuple[Tensor, Tensor]:
    """Token by token from s [B, HV, V, K], in float64 -> outputs [B, T, HV, V], and the state that is accepted."""
    state, outs = s, []
    length = x.v.shape[1]
    windows = [recurrence.tokens(g, p, x, b, length, s.dtype) for b in range(len(s))]
    for t in range(length):
        rows = [window[t] for window in windows]
        s = torch.stack([recurrence.advance(s[b], row)[0] for b, row in enumerate(rows)])
        outs.append(torch.stack([recurrence.output(s[b], row) for b, row in enumerate(rows)]))
        state = torch.where((accepted == t + 1)[:, None, None, None], s, state)
    return torch.stack(outs, 1), state


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@dataclass(frozen=True)
class Errors:
    out: float
    native_out: float
    state: float
    native_state: float


def life(
    name: str, g: Geometry, w: Window = W, *, steps: int, looks: int = 1, alike: float = 0.0
) -> list[Errors]:
    """The largest errors of outputs so far, and the state's, at each look; a look settles.

    Native is the same backend's, in exact mode.
    """
    gen, slots = torch.Generator().manual_seed(0), [3, 1]
    both = policy(name, g, w), policy("native", g, replace(w, mode=Mode.EXACT))
    for p in both:
        start(p, slots, seed=0)
    state = both[0].checkpoint(0)[ints(*slots)].double()
    errors, worst = [], [0.0, 0.0]
    for i in range(steps):
        x = drawn(g, 3, w.max_len, gen, alike)
        lens = torch.randint(1, w.max_len + 1, (2,), generator=gen)
        accepted = torch.minimum(torch.randint(1, w.max_len + 1, (2,), generator=gen), lens)
        inside = (torch.arange(w.max_len) < lens[:, None]).to(DEVICE)[..., None, None]
        two = replace(x, **{k: v[:2] for k, v in vars(x).items() if v is not None})
        want, state = oracle(g, params(g, 0), state, two, accepted.to(DEVICE))
        for j, p in enumerate(both):
            step = staged(w, [*slots, 0], [*lens.tolist(), w.max_len], accepted=[*accepted.tolist(), 0])
            got = p.verify(0, step, x)
            p.accept(step.close())
            assert not got[2].any(), "a null row's output is not zero"
            assert not torch.where(inside, 0, got[:2]).any(), "an output behind the window's end is not zero"
            worst[j] = max(worst[j], distance(torch.where(inside, got[:2], 0), want * inside))
        if (i + 1) % (steps // looks) == 0:
            for p in both:
                p.settle(ints(*slots))
            ours, native = (distance(p.checkpoint(0)[ints(*slots)], state) for p in both)
            errors.append(Errors(worst[0], worst[1], ours, native))
    return errors


CUT = 4 * 2**-23  # four sums in a row that a tensor core cuts off, by a unit each


CASES = (
    [
        (gate, store, act)
        for gate in GATES
        for store in ("fp32", "bf16", "fp16")
        for act in ("bfloat16", "float32")
    ]
    if ON_GPU
    else [
        ("gdn", "fp32", "float16"),
        ("kda", "fp32", "float32"),
        ("mamba2", "fp16", "float16"),
        ("gdn", "fp16", "float32"),
    ]
)


@pytest.mark.parametrize(("gate", "store", "act"), CASES)
@pytest.mark.parametrize("name", RECORDING)
def test_errors_are_those_of_native(
    name: str, gate: str, store: str, act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast, "FEW", 0)  # a launch as of many rows
    g = shape(gate, store, num_layers=1, act_dtype=DType(act))
    for e in life(name, g, steps=20 if ON_GPU else 5):
        assert e.out <= 1.05 * e.native_out + CUT
        assert e.state <= 1.1 * e.native_state + CUT


@pytest.mark.parametrize(
    ("k", "v"), [(64, 96), (96, 64), (128, 192), (192, 128), (256, 64)] if ON_GPU else [(24, 12)]
)
def test_head_sizes_need_not_be_powers_of_two(k: int, v: int) -> None:
    for gate in ("gdn", "kda", "mamba2") if ON_GPU else ("gdn",):
        (*_, e) = life(
            "checkpointing",
            shape(gate, num_layers=1, head_k=k, head_v=v, act_dtype=ACT),
            steps=12 if ON_GPU else 3,
        )
        assert e.out <= 1.05 * e.native_out + CUT
        assert e.state <= 1.1 * e.native_state + CUT


@pytest.mark.parametrize("few", [0, fast.FEW] if ON_GPU else [0])
@pytest.mark.parametrize("t", [1, 2, 5, 8, 16] if ON_GPU else [5])
def test_windows_of_any_length(t: int, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "FEW", few)
    for gate in ("gdn", "kda", "mamba2") if ON_GPU else ("gdn",):
        w = Window(max_len=t, mode=Mode.FAST)
        (*_, e) = life(
            "checkpointing", shape(gate, num_layers=1, act_dtype=ACT), w, steps=12 if ON_GPU else 3
        )
        assert e.out <= 1.05 * e.native_out + CUT
        assert e.state <= 1.1 * e.native_state + CUT


def test_long_windows_of_decays_per_channel_are_exact() -> None:
    """Their couplings would be written out pair by pair: 7 minutes of compiling at 16 tokens."""
    t = fast.LONGEST_PAIRED + 1
    w = Window(max_len=t, ring_len=t, mode=Mode.FAST)  # most steps flush
    (*_, e) = life("checkpointing", shape("kda", num_layers=1), w, steps=12 if ON_GPU else 3)
    assert (e.out, e.state) == (e.native_out, e.native_state)


@pytest.mark.skipif(not ON_GPU, reason="thousands of tokens need a GPU")
@pytest.mark.parametrize(
    ("gate", "store", "alike"),
    [("gdn", "fp32", 0.97), ("gdn", "bf16", 0.97), ("kda", "fp32", 0.97)],
)
def test_errors_do_not_grow_over_5000_tokens(gate: str, store: str, alike: float) -> None:
    """Keys nearly collinear, betas nearly 1, decays nearly 1."""
    g = shape(gate, store, num_layers=1, num_k_heads=2, num_v_heads=2)
    errors = life(
        "checkpointing", g, steps=2700, looks=5, alike=alike
    )  # 1.9 tokens are accepted of a step, in each row
    for e in errors[1:]:
        assert e.state <= 2 * errors[0].state
        assert e.state <= 1.1 * e.native_state


@pytest.mark.parametrize("field", ["k", "rnorm", "c", "decay"])
def test_a_changed_record_changes_the_next_output(field: str) -> None:
    g, outs = shape(num_layers=1), []
    for teeth in (False, True):
        p, gen = policy("checkpointing", g, W), torch.Generator().manual_seed(5)
        start(p, [1], seed=1)
        step = staged(W, [1], [W.max_len], accepted=[1])
        p.verify(0, step, drawn(g, 1, W.max_len, gen))
        p.accept(step.close())
        if teeth:
            record = p.pool[f"rec_{field}"][0, 1, :, 0]
            record += 1
        outs.append(p.verify(0, staged(W, [1], [1]), drawn(g, 1, W.max_len, gen)))
    assert not torch.equal(*outs)


@pytest.mark.skipif(not ON_GPU, reason="the interpreter has one form")
@pytest.mark.parametrize("gate", ["gdn", "kda", "mamba2"])
@pytest.mark.parametrize("store", ["fp32", "bf16", "fp16"])
def test_the_plain_form_gives_the_same_values(gate: str, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    g = shape(gate, store, num_layers=1)
    gluon = life("checkpointing", g, steps=8)[-1]
    monkeypatch.setattr(fast, "_tuned", lambda *_: False)
    plain = life("checkpointing", g, steps=8)[-1]
    assert plain.out <= 1.05 * gluon.out + CUT
    assert plain.state <= 1.1 * gluon.state + CUT


@pytest.mark.skipif(not ON_GPU, reason="graphs need a GPU")
@pytest.mark.parametrize("gate", ["gdn", "kda", "mamba2"])
def test_a_captured_window_gives_the_bits_of_an_eager_one(gate: str) -> None:
    g, gen = shape(gate, num_layers=1), torch.Generator().manual_seed(3)
    p = policy("checkpointing", g, W)
    start(p, [1, 2, 3], seed=2)
    x, step = drawn(g, 3, W.max_len, gen), staged(W, [1, 2, 3], [4, 2, 3])
    p.verify(0, step, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = p.verify(0, step, x)
    for slots in ([1, 2, 3], [3, 0, 1], [2, 3, 1]):
        for _ in range(6):  # through a flush
            before = {name: t.clone() for name, t in p.pool.tensors.items()}
            step.stage(slots, [4, 2, 3], accepted=[2, 1, 3])
            graph.replay()
            captured = out.clone(), {name: t.clone() for name, t in p.pool.tensors.items()}
            for name, t in before.items():
                p.pool[name].copy_(t)
            assert torch.equal(captured[0], p.verify(0, step, x))
            assert all(
                torch.equal(captured[1][n].nan_to_num(), t.nan_to_num()) for n, t in p.pool.tensors.items()
            )
            p.accept(step.close())
