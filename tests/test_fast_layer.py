"""Fast mode's layer in two launches gives what its pieces give: the conv's outputs and ring, and the records, in bits."""

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor
from triton_lives import DEVICE, ON_GPU, ints, policy, shape, staged, start

from ssmspec.acceptance import from_rate
from ssmspec.geometry import Arch, Conv, Geometry, Mode, Window
from ssmspec.kernels import base, fast, fast_layer
from ssmspec.kernels.conv_triton import ConvRing
from ssmspec.kernels.layer_step import LayerStep, Projected, Weights
from ssmspec.kernels.norm_triton import TritonNorm
from ssmspec.measure.rig import Rig
from ssmspec.policies import Policy
from ssmspec.pool import StatePool

pytestmark = [pytest.mark.interpreter, pytest.mark.gpu]

SLOTS, ROWS = 7, [2, 0, 5, -1, 1, 4]  # of a step, null rows among them


@dataclass
class Side:
    """One layer of a policy, its conv, and the conv's outputs that verify was given last."""

    policy: Policy
    conv: ConvRing
    step: LayerStep
    packed: Tensor | None = None

    def run(self, step: object, p: Projected) -> Tensor:
        return self.step(0, step, p)


def packed(x: base.Tokens) -> Tensor:
    """q, k and v as one."""
    return torch.cat([t.flatten(2) for t in (x.q, x.k, x.v)], 2)


def side(g: Geometry, w: Window, weights: Weights, merged: bool, name: str = "checkpointing") -> Side:
    p = policy(name, g, w, slots=SLOTS)
    pool = StatePool.allocate(ConvRing.layout(g.conv, w.max_len, g.act_dtype), 1, SLOTS, DEVICE)
    pool.poison(0x3E)
    pool.tensors["conv"] = pool["conv"].mT.contiguous().mT
    conv = ConvRing(g.conv, pool)
    launch = fast_layer.couple if merged else fast.couple
    made: Side

    def couple(g: Geometry, layer: base.Layer, x: base.Tokens, *rest: object) -> None:
        assert isinstance(x, fast_layer.Unconvolved) == merged
        launch(g, layer, x, *rest)
        made.packed = packed(x)

    p.kernels = replace(p.kernels, verify=fast.make_verify(g, w, p.kernels.verify, couple))
    if not merged:
        conv.verify = partial(conv.verify, fast=True)  # type: ignore[method-assign]
    step = (fast_layer.FastStep if merged else LayerStep)(g, conv, p.verify, TritonNorm.of(g), [weights])
    made = Side(p, conv, step)
    start(p, [1, 2, 4, 5], seed=1)
    conv.reset(ints(1, 2, 4, 5))
    return made


def of(gate: str, heads: tuple[int, int], conv: Conv | None = None, **changes: object) -> Geometry:
    g = shape(gate, num_layers=1, num_k_heads=heads[0], num_v_heads=heads[1], **changes)
    channels = 2 * g.num_k_heads * g.head_k + g.num_v_heads * g.head_v
    return replace(g, conv=replace(conv or g.conv, channels=channels))


class Draw:
    def __init__(self, g: Geometry, seed: int) -> None:
        self.g, self.gen = g, torch.Generator().manual_seed(seed)

    def __call__(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=self.gen).bfloat16().to(DEVICE)

    def ints(self, most: int, n: int) -> list[int]:
        return torch.randint(most + 1, (n,), generator=self.gen).tolist()

    def weights(self, bias: bool) -> Weights:
        g = self.g
        norm = g.num_v_heads * g.head_v if g.arch is Arch.MAMBA2 else g.head_v
        channels = g.conv.channels
        return Weights(
            conv=self(g.conv.width, channels).mT,
            norm=self(norm),
            conv_bias=self(channels) if bias else None,
        )

    def projected(self, t: int, lens: list[int]) -> Projected:
        """x and z are views of one projection; NaN behind ``lens`` and on null rows."""
        g, batch = self.g, len(ROWS)
        values = g.num_v_heads * g.head_v
        whole = self(batch, t, g.conv.channels + values)
        a = self(batch, t, g.num_v_heads).abs()
        b = None if g.arch is Arch.MAMBA2 else self(batch, t, g.num_v_heads)
        for row, (slot, n) in enumerate(zip(ROWS, lens, strict=True)):
            for x in (whole, a) if b is None else (whole, a, b):
                x[row, n if slot > 0 else 0 :] = torch.nan
        z = whole[..., g.conv.channels :].view(batch, t, g.num_v_heads, g.head_v)
        return Projected(x=whole[..., : g.conv.channels], z=z, a=a, b=b)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


FEW, MANY = fast_layer.cut(1), fast_layer.cut(256)
CASES = [
    ("gdn", (1, 2), 3, Conv(channels=0, width=4), True, FEW),
    ("gdn", (2, 2), 1, Conv(channels=0, width=2), False, MANY),
    ("mamba2", (1, 8), 2, Conv(channels=0, width=3, dilation=2), True, MANY),
]
CASES = [
    *((gate, heads, t, Conv(channels=0, width=4), t % 2 == 0, cut)
      for gate, heads in (("gdn", (4, 8)), ("mamba2", (2, 16)))
      for t, cut in ((1, FEW), (1, MANY), (2, MANY), (3, FEW), (4, MANY), (8, FEW), (8, MANY), (11, FEW), (16, FEW))),
    ("gdn", (3, 3), 4, Conv(channels=0, width=4, dilation=3), False, MANY),
    ("gdn", (16, 32), 4, Conv(channels=0, width=2), False, MANY),
] if ON_GPU else CASES  # fmt: skip


@pytest.mark.parametrize(("gate", "heads", "t", "conv", "bias", "cut"), CASES)
def test_a_merged_layer_is_its_pieces(
    gate: str,
    heads: tuple[int, int],
    t: int,
    conv: Conv,
    bias: bool,
    cut: fast_layer.Cut,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ragged windows among null rows, random acceptance through flushes and around both rings."""
    g, w = of(gate, heads, conv), Window(max_len=t, ring_len=max(4, t), mode=Mode.FAST)
    draw = Draw(g, seed=t)
    weights = draw.weights(bias)
    plain, merged = (side(g, w, weights, fused) for fused in (False, True))
    monkeypatch.setattr(fast_layer, "cut", lambda *_: cut)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, **how: poisoned(empty(*sizes, **how)))
    for _ in range(12 if ON_GPU else 4):
        lens = [1 + n for n in draw.ints(t - 1, len(ROWS))]
        accepted = [draw.ints(n, 1)[0] if slot > 0 else 0 for slot, n in zip(ROWS, lens, strict=True)]
        p = draw.projected(t, lens)
        outs = []
        for kept in (plain, merged):
            step = staged(w, ROWS, lens, accepted=accepted)
            outs.append(kept.run(step, p))
            commit = step.close()
            kept.policy.accept(commit)
            kept.conv.accept(commit)
        for row, (slot, n) in enumerate(zip(ROWS, lens, strict=True)):
            live = n if slot > 0 else 0
            assert torch.equal(bits(plain.packed[row, :live]), bits(merged.packed[row, :live]))
            assert not outs[1][row, live:].any()
            scale = float(outs[0][row].float().abs().max())
            # couplings of the same products, summed in another order at most: one rounding to bf16 apart
            assert (outs[0][row].float() - outs[1][row].float()).abs().max() <= 2**-7 * scale
        assert torch.equal(bits(plain.conv.field), bits(merged.conv.field))
        for name in ("rec_k", "rec_decay", "rec_rnorm", "rec_dt"):
            if name in plain.policy.pool.tensors:
                assert_near(plain.policy.pool[name], merged.policy.pool[name])


def poisoned(x: Tensor) -> Tensor:
    return x.fill_(torch.nan) if x.is_floating_point() else x


def assert_near(want: Tensor, got: Tensor) -> None:
    """To the last bit or two of fp32; what was never written is NaN in both."""
    torch.testing.assert_close(want, got, rtol=2**-22, atol=0, equal_nan=True)


@pytest.mark.parametrize("gate", ["gdn", "kda"])
def test_what_no_kernel_merges_goes_piece_by_piece(gate: str) -> None:
    """Decays per channel; and inputs that do not start at 16 bytes."""
    g, w, t = of(gate, (1, 2)), Window(max_len=2, ring_len=4, mode=Mode.FAST), 2
    draw = Draw(g, seed=0)
    weights = draw.weights(bias=False)
    room = draw(len(ROWS), t, g.conv.channels + 3)
    a_shape = (g.num_v_heads, g.head_k) if gate == "kda" else (g.num_v_heads,)
    p = Projected(
        x=room[..., 3:] if gate == "gdn" else room[..., :-3].contiguous(),
        z=draw(len(ROWS), t, g.num_v_heads, g.head_v),
        a=draw(len(ROWS), t, *a_shape),
        b=draw(len(ROWS), t, g.num_v_heads),
    )
    outs = []
    for kind in (LayerStep, fast_layer.FastStep):
        made = side(g, w, weights, merged=False)
        made.step = kind(g, made.conv, made.policy.verify, TritonNorm.of(g), [weights])
        outs.append(made.run(staged(w, ROWS, [2, 1, 2, 2, 1, 2]), p))
    assert torch.equal(*outs)


@pytest.mark.parametrize(("policy", "kind"), [("native", LayerStep), ("checkpointing", fast_layer.FastStep)])
def test_a_rig_merges_no_layer_of_snapshots(policy: str, kind: type[LayerStep]) -> None:
    """Native's verify is exact, by kernels that take what was convolved."""
    g, w = of("gdn", (1, 2), Conv(channels=0, width=4)), Window(max_len=2, ring_len=4, mode=Mode.FAST)
    rig = Rig(
        policy, g, w, 2, from_rate(0.5, 1), steps=1, seed=0, device=DEVICE, backend="triton"
    )  # fmt: skip
    assert type(rig.layer) is kind
