"""Backend ``triton`` reads and writes its own slots alone, wherever they lie; what it does not offer it refuses."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from triton_lives import (
    DEVICE,
    ON_GPU,
    Life,
    W,
    assert_same,
    ints,
    policy,
    shape,
    staged,
    start,
    tokens,
)

from ssmspec import layout, policies
from ssmspec.geometry import DType, Window
from ssmspec.kernels.base import Tokens

pytestmark = [pytest.mark.interpreter, pytest.mark.gpu]


def snapshot(p: policies.Policy) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in p.pool.tensors.items()}


def assert_untouched(p: policies.Policy, before: dict[str, Tensor], slots: list[int]) -> None:
    for f in p.pool.layout:
        now, then = (t if f.shared else t.movedim(1, 0) for t in (p.pool[f.name], before[f.name]))
        assert torch.equal(now[slots].view(torch.uint8), then[slots].view(torch.uint8)), f.name


@pytest.mark.parametrize("name", layout.POLICY_NAMES)
def test_null_rows_give_zeros_and_write_nothing(name: str) -> None:
    """Padding rows overwrote a live slot, or came back uninitialised: lightseekorg/tokenspeed#700, sgl-project/sglang#30974."""
    g, t = shape(), W.max_len
    p = policy(name, g)
    start(p, [3], seed=1)
    before = snapshot(p)
    step = staged(W, [0, -1, 3, -7], [t, t, 0, 0], accepted=[t, 1, 0, 0])
    for layer in range(g.num_layers):
        out = p.verify(layer, step, tokens(g, 4, t, torch.Generator().manual_seed(1)))
        assert not out.any()
    p.accept(step.close())
    assert_untouched(p, before, list(range(1, 16)))
    assert not p.verify(0, staged(W, [], []), tokens(g, 0, t, torch.Generator())).numel()


@pytest.mark.parametrize("name", ["recover", "checkpointing"])
def test_a_step_touches_its_own_slots_alone(name: str) -> None:
    g, rng = shape("kda"), torch.Generator().manual_seed(2)
    p = policy(name, g)
    start(p, [2, 5], seed=1)
    before = snapshot(p)
    for accepted in (W.max_len, W.max_len, 1):
        step = staged(W, [5], [W.max_len], accepted=[accepted])
        for layer in range(g.num_layers):
            p.verify(layer, step, tokens(g, 1, W.max_len, rng))
        p.accept(step.close())
    p.settle(ints(5))
    assert_untouched(p, before, [i for i in range(1, 16) if i != 5])


def run_once(p: policies.Policy, x: Tokens, rows: Tensor, lens: Tensor) -> Tensor:
    return p.kernels.verify(p.layers[0], x, rows, lens)


@pytest.mark.parametrize("gate", ["gdn", "kda", "mamba2"])
def test_strides_do_not_matter(gate: str) -> None:
    """A strided column read as its neighbours: vllm-project/vllm#51682."""
    g, t = shape(gate), W.max_len
    x = tokens(g, 2, t, torch.Generator().manual_seed(3))
    wide = {
        n: torch.full((*y.shape[:2], 2, *y.shape[2:]), torch.nan, dtype=y.dtype, device=DEVICE)
        for n in "qkvab"
        if (y := getattr(x, n)) is not None
    }
    for n, y in wide.items():
        y[:, :, 1] = getattr(x, n)
    strided = Tokens(**{n: y[:, :, 1] for n, y in wide.items()})
    table = ints(7, 2, -7, 7, 3, -7).view(2, 3)
    outs = []
    for tokens_in, rows in ((x, ints(2, 3)), (strided, table[:, 1])):
        p = policy("recover", g)
        start(p, [2, 3], seed=1)
        outs.append(run_once(p, tokens_in, rows, torch.stack([ints(t, t - 1)] * 2, 1)[:, 0]))
    assert torch.equal(*outs)


def test_tokens_that_are_not_packed_along_the_head_are_refused() -> None:
    g = shape()
    p, x = policy("recover", g), tokens(g, 1, 2, torch.Generator())
    with pytest.raises(ValueError, match=r"k has strides .*: the last must be 1"):
        run_once(p, replace(x, k=x.k.repeat_interleave(2, -1)[..., ::2]), ints(1), ints(2))


def in_pages(p: policies.Policy, gap: int) -> tuple[policies.Policy, Tensor]:
    """The policy over states that lie ``gap`` elements apart, and their memory."""
    field = "snapshots" if p.name == "native" else "state"
    t = p.pool[field]
    pages = torch.full((*t.shape[:-3], t.shape[-3:].numel() + gap), 7.0, dtype=t.dtype, device=DEVICE)
    p.pool.tensors[field] = pages[..., :-gap].view(t.shape)
    return policies.make(p.name, p.g, p.w, p.pool, [x.params for x in p.layers], "triton"), pages


@pytest.mark.parametrize(("head_k", "gap"), [(128, 16), (64, 3)] if ON_GPU else [(128, 3)])
@pytest.mark.parametrize("name", layout.POLICY_NAMES)
def test_a_page_may_be_larger_than_a_state(name: str, head_k: int, gap: int) -> None:
    """A pool that is not contiguous was copied and the update lost: flashinfer-ai/flashinfer#3490."""
    g = shape("gdn", "bf16", head_k=head_k)
    padded, pages = in_pages(policy(name, g), gap)
    assert_same(Life(policy(name, g), seed=4).live(2), Life(padded, seed=4).live(2), name)
    assert (pages[..., -gap:] == 7.0).all()


@pytest.mark.skipif(not ON_GPU, reason="the kernels that copy whole pieces need a GPU")
def test_a_page_that_starts_between_two_pieces_is_refused() -> None:
    g = shape("gdn", "bf16")
    padded, _ = in_pages(policy("recover", g), 3)
    start(padded, [1], seed=1)
    with pytest.raises(ValueError, match=r"state has rows \d+ elements apart, which is no multiple of 16"):
        run_once(padded, tokens(g, 1, 2, torch.Generator()), ints(1), ints(2))


@pytest.mark.skipif(not ON_GPU, reason="needs 5 GB of GPU memory")
def test_offsets_beyond_32_bits() -> None:
    """Slot times stride overflowed in several kernels: vllm-project/vllm#35275, flash-linear-attention#1082."""
    g = shape("gdn", "bf16", num_layers=1, num_k_heads=16, num_v_heads=32)
    far = 2**31 // (32 * 128 * 128) + 3
    seen = []
    for slots, slot in ((4, 3), (far + 1, far)):
        p, gen = policy("every-step", g, slots=slots), torch.Generator().manual_seed(8)
        start(p, [slot], seed=1)
        for _ in range(3):
            step = staged(W, [slot], [4], accepted=[3])
            seen.append(("output", p.verify(0, step, tokens(g, 1, 4, gen))))
            p.accept(step.close())
        p.settle(ints(slot))
        seen.append(("state", p.checkpoint(0)[slot].clone()))
    assert_same(seen[:4], seen[4:], far)


REFUSED = [
    ({"store": "nvfp4"}, W, "state_dtype=nvfp4"),
    ({"store": "bf16-stochastic"}, W, "stochastic=True"),
    ({"read_dtype": DType.BF16}, W, "read_dtype=bfloat16"),
    ({"head_k": 512}, W, "head_k=512"),
]


@pytest.mark.parametrize(("changes", "w", "words"), REFUSED, ids=[r[2] for r in REFUSED])
def test_what_is_not_offered_is_refused_by_name(changes: dict[str, object], w: Window, words: str) -> None:
    with pytest.raises(ValueError, match=f"backend=triton: {words}"):
        policy("recover", shape(**changes), w)
