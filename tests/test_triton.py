"""Backend ``triton``: native's bits under every policy, and the reference's values.

Shapes are tiny under TRITON_INTERPRET=1 and those of a served model on a GPU; the claims are the same.
"""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from triton_lives import (
    DEVICE,
    ON_GPU,
    RECORDING,
    ROWS,
    Seen,
    W,
    assert_same,
    ints,
    lived,
    policy,
    shape,
    staged,
    start,
    tokens,
)

from ssmspec import layout, policies
from ssmspec.geometry import DType, Geometry
from ssmspec.kernels.base import Tokens
from ssmspec.step import Step

pytestmark = [pytest.mark.interpreter, pytest.mark.gpu]


EVERY = ["gdn", "kda", "kda-bounded", "mamba2", "mamba2-raw-dt"]
CASES = (
    [(gate, store) for gate in EVERY for store in ("fp32", "bf16", "fp16")]
    if ON_GPU
    else [
        ("gdn", "fp16"),
        ("kda", "fp32"),
        ("kda-bounded", "bf16"),
        ("mamba2", "bf16"),
        ("mamba2-raw-dt", "fp32"),
    ]
)


@pytest.mark.parametrize(("gate", "store"), CASES)
def test_every_policy_has_native_bits_over_a_whole_life(gate: str, store: str) -> None:
    g = shape(gate, store)
    want = lived("native", g, poison=0x3E)
    for name in RECORDING:
        assert_same(want, lived(name, g, poison=0xFF), name)


def tolerance(g: Geometry, count: int) -> float:
    """Of the largest value, after ``count`` tokens that one backend sums in another order than the other.

    A token rounds K products and sums, and its gates by 2^-20 at most (``ex2.approx`` of an argument up to 16);
    a delta rule never amplifies an error. A stored 16-bit state, and a bf16 output, may land one unit apart.
    """
    unit = {DType.FP32: 0.0, DType.BF16: 2**-7, DType.FP16: 2**-10}[g.state_dtype]
    return count * ((g.head_k + 16) * 2**-24 + unit)


@pytest.mark.parametrize(("gate", "store"), CASES)
def test_values_are_those_of_the_reference(gate: str, store: str) -> None:
    g, steps = shape(gate, store), 4 if ON_GPU else 2
    pairs = zip(
        lived("native", g, steps=steps, backend="torch"), lived("native", g, steps=steps), strict=True
    )
    for (what, a), (_, b) in pairs:
        bound = tolerance(g, steps * W.max_len) + (2**-7 if what == "output" else 0.0)
        if a.numel():
            assert (
                a.float().cpu() - b.float().cpu()
            ).abs().max() <= bound * a.float().abs().max().cpu().clamp(min=1), what


ODD = [(64, 96), (96, 64), (128, 192), (192, 128), (256, 64), (64, 256)] if ON_GPU else [(24, 12)]


@pytest.mark.parametrize(("k", "v"), ODD)
def test_head_sizes_need_not_be_powers_of_two(k: int, v: int) -> None:
    g = shape("gdn", head_k=k, head_v=v)
    w = replace(W, ring_len=None)
    want = lived("native", g, w=w, steps=2)
    assert_same(want, lived("checkpointing", g, w=w, steps=2), (k, v))
    for (what, a), (_, b) in zip(lived("native", g, w=w, steps=2, backend="torch"), want, strict=True):
        bound = tolerance(g, 2 * w.max_len) + (2**-7 if what == "output" else 0.0)
        assert not a.numel() or (
            a.float().cpu() - b.float().cpu()
        ).abs().max() <= bound * a.float().abs().max().cpu().clamp(min=1)


FIELDS = [
    ("gdn", "k"),
    ("gdn", "rnorm"),
    ("gdn", "c"),
    ("gdn", "decay"),
    ("kda", "decay"),
    ("mamba2", "x"),
    ("mamba2", "dt"),
    ("mamba2", "decay"),
]


@pytest.mark.parametrize(("gate", "field"), FIELDS, ids=[f"{a}-{b}" for a, b in FIELDS])
def test_a_changed_record_changes_the_next_output(gate: str, field: str) -> None:
    g, t = shape(gate, num_layers=1), W.max_len
    outs = []
    for teeth in (False, True):
        p, gen = policy("checkpointing", g), torch.Generator().manual_seed(5)
        start(p, [1], seed=1)
        step = staged(W, [1], [t], accepted=[1])
        p.verify(0, step, tokens(g, 1, t, gen))
        p.accept(step.close())
        if teeth:
            record = p.pool[f"rec_{field}"][0, 1, :, 0]
            record += 1
        outs.append(p.verify(0, staged(W, [1], [1]), tokens(g, 1, t, gen)))
        p.settle(ints(1))
        outs.append(p.checkpoint(0)[1].clone())
    assert not torch.equal(outs[0], outs[2])
    assert not torch.equal(outs[1], outs[3])


@pytest.mark.parametrize("gate", ["gdn", "kda", "mamba2"] if ON_GPU else ["gdn"])
def test_a_dropped_window_leaves_no_trace(gate: str) -> None:
    g, t = shape(gate), W.max_len
    for name in RECORDING:
        seen = []
        for dropped in (0, 2):
            p, gen = policy(name, g), torch.Generator().manual_seed(6)
            start(p, [1], seed=1)
            for accepted in (t, 1):
                for _ in range(dropped if accepted == 1 else 0):
                    step = staged(W, [1], [t], accepted=[0])
                    for layer in range(g.num_layers):
                        p.verify(layer, step, tokens(g, 1, t, torch.Generator().manual_seed(7)))
                    p.accept(step.close())
                step = staged(W, [1], [t], accepted=[accepted])
                for layer in range(g.num_layers):
                    seen.append(("output", p.verify(layer, step, tokens(g, 1, t, gen))))
                p.accept(step.close())
            p.settle(ints(1))
            seen.append(("state", p.checkpoint(0)[1].clone()))
        assert_same(seen[: len(seen) // 2], seen[len(seen) // 2 :], name)


@pytest.mark.skipif(not ON_GPU, reason="the interpreter sums over lanes in NumPy's order")
@pytest.mark.parametrize("store", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("lanes_k", "lane_rows", "warps"),
    [(8, 4, 2), (4, 2, 1), (16, 4, 4), (8, 2, 8), (2, 1, 1)],
)
def test_the_tile_does_not_decide_the_bits(
    store: str, lanes_k: int, lane_rows: int, warps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ssmspec.kernels import triton_backend

    g = shape("gdn", store)
    want = lived("recover", g, steps=8)
    own = triton_backend.window_tile(g, 3, ROWS, False)
    tile = replace(own, lanes_k=lanes_k, lane_rows=lane_rows, warps=warps, registers=None)
    monkeypatch.setattr(triton_backend, "window_tile", lambda *_: tile)
    assert_same(want, lived("recover", g, steps=8), tile)


@pytest.mark.skipif(not ON_GPU, reason="needs CUDA graphs")
@pytest.mark.parametrize("name", layout.POLICY_NAMES)
def test_a_captured_step_equals_an_eager_one(name: str) -> None:
    """Captured once, replayed over moving slots and every cursor state: sgl-project/sglang#19415."""
    g, w = shape("kda"), W
    seen: dict[bool, Seen] = {False: [], True: []}
    for captured in (False, True):
        p, gen, rng = policy(name, g), torch.Generator().manual_seed(9), random.Random(9)
        step, x = (
            Step.empty(3, w.max_len, DEVICE),
            [tokens(g, 3, w.max_len, gen) for _ in range(g.num_layers)],
        )
        start(p, [1, 2, 3], seed=1)

        def run(p: policies.Policy = p, step: Step = step, x: list[Tokens] = x) -> list[Tensor]:
            outs = [p.verify(layer, step, x[layer]) for layer in range(g.num_layers)]
            p.accept(step.close())
            return outs

        if captured:
            run()  # on null rows: compiles, and builds what is built once
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outs = run()
        for _ in range(12):
            slots = rng.sample([1, 2, 3], 3)
            lens = [rng.randint(1, w.max_len) for _ in slots]
            step.stage(slots, lens, accepted=[rng.randint(1, n) for n in lens])
            for layer in x:
                fresh = tokens(g, 3, w.max_len, gen)
                for n in "qkvab":
                    getattr(layer, n).copy_(getattr(fresh, n))
            if captured:
                graph.replay()
            else:
                outs = run()
            seen[captured] += [("output", o[b, :n].clone()) for o in outs for b, n in enumerate(lens)]
        p.settle(ints(1, 2, 3))
        seen[captured] += [("state", p.checkpoint(i)[1:4].clone()) for i in range(g.num_layers)]
    assert_same(seen[False], seen[True], name)
