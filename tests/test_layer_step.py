"""A layer between its projections: kernels give what torch gives, and every policy the same bits."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from triton_lives import DEVICE, ON_GPU, W, ints, policy, shape, staged, start

from ssmspec.geometry import Arch, Geometry
from ssmspec.kernels.layer_step import LayerStep, Projected, Weights, parts
from ssmspec.kernels.norm import Gate, GatedNorm
from ssmspec.layout import POLICY_NAMES
from ssmspec.pool import StatePool

pytestmark = [pytest.mark.interpreter, pytest.mark.gpu]

NORMS = {
    "qwen": {"group": 8},
    "kimi": {"group": 8, "gate": Gate.SIGMOID},
    "mamba2": {"group": 16, "gate_first": True},
    "odd": {"group": 12, "gate": Gate.SIGMOID, "gate_first": True},
}


def normed(y: Tensor, z: Tensor, weight: Tensor, n: GatedNorm) -> Tensor:
    """The definition in float64, one group after another."""
    y, z = y.double().flatten(), z.double().flatten()
    gate = torch.sigmoid(z) * (z if n.gate is Gate.SILU else 1)
    out = torch.empty_like(y)
    for i in range(0, len(y), n.group):
        x = y[i : i + n.group] * (gate[i : i + n.group] if n.gate_first else 1)
        scale = weight.double().repeat(len(y) // len(weight))[i : i + n.group]
        x = x / torch.sqrt((x * x).mean() + n.eps) * scale
        out[i : i + n.group] = x * (1 if n.gate_first else gate[i : i + n.group])
    return out


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_its_definition(name: str, backend: str) -> None:
    n, gen = parts(backend)[1](**NORMS[name], eps=1e-5), torch.Generator().manual_seed(0)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=gen).to(DEVICE)

    y, z, weight = draw(4, 3, 6, 8) * 1e-2, draw(4, 3, 14, 8)[:, :, 8:], draw(48 if n.gate_first else n.group)
    step = staged(replace(W, max_len=3, ring_len=None), [2, 0, 1, -1], [3, 3, 2, 1])
    want = [[normed(y[b, t], z[b, t], weight, n) for t in range(3)] for b in range(4)]
    z[1], z[2, 2], z[3] = torch.nan, torch.nan, torch.nan
    got = n(y, z, weight, step)
    for b, length in enumerate([3, 0, 2, 0]):
        for t in range(length):
            torch.testing.assert_close(got[b, t].double().flatten(), want[b][t], rtol=2**-19, atol=2**-22)
        assert not got[b, length:].any()


def whole(name: str, g: Geometry, backend: str, fused: bool = False) -> list[Tensor]:
    """The outputs of one layer over some ragged steps among null rows; then its state, and the conv's inputs."""
    p, gen = policy(name, g, backend=backend), torch.Generator().manual_seed(2)
    kind: type[LayerStep] = LayerStep
    if fused:
        from ssmspec.kernels.hopper_layer import FusedStep, FusedVerify

        p.kernels, kind = replace(p.kernels, verify=FusedVerify(g, W, p.kernels.verify)), FusedStep
    start(p, [1, 2], seed=1)
    window, norm = parts(backend)
    pool = StatePool.allocate(window.layout(g.conv, W.max_len, g.act_dtype), 1, 4, DEVICE)
    pool.tensors["conv"] = pool["conv"].mT.contiguous().mT
    conv = window(g.conv, pool)
    conv.reset(ints(1, 2))

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=gen).bfloat16().to(DEVICE)

    scales = (g.num_v_heads * g.head_v if g.arch is Arch.MAMBA2 else g.head_v,)
    weights = Weights(conv=draw(g.conv.width, g.conv.channels).mT, norm=draw(*scales))
    layer, outs = kind(g, conv, p.verify, norm.of(g), [weights]), []
    gate, lead = (g.head_k,) if g.arch is Arch.KDA else (), (4, W.max_len)
    for _ in range(8 if ON_GPU else 2):
        step = staged(W, [2, 0, 1, -1], [2, 1, 3, 1], accepted=[1, 0, 2, 0])
        inputs = Projected(
            x=draw(*lead, g.conv.channels),
            z=draw(*lead, g.num_v_heads, g.head_v),
            a=draw(*lead, g.num_v_heads, *gate).abs(),
            b=None if g.arch is Arch.MAMBA2 else draw(*lead, g.num_v_heads),
        )
        out = layer(0, step, inputs).clone()
        commit = step.close()
        p.accept(commit)
        conv.accept(commit)
        assert not any(x.any() for x in (out[0, 2:], out[1], out[2, 3:], out[3]))
        outs.append(out)
    for kept in (p, conv):
        kept.settle(ints(1, 2))
    return [*outs, p.checkpoint(0)[1:3].clone(), conv.field[0, 1:3, :, : g.conv.history].clone()]


@pytest.mark.parametrize("gate", ["gdn", "kda", "mamba2"])
def test_a_layer_gives_what_torch_gives_and_every_policy_the_same_bits(gate: str) -> None:
    g = shape(gate, num_layers=1)
    g = replace(g, conv=replace(g.conv, channels=2 * g.num_k_heads * g.head_k + g.num_v_heads * g.head_v))
    want = whole("native", g, "triton")
    for a, b in zip(whole("native", g, "torch"), want, strict=True):
        # bf16 between the pieces: an output that is rounded otherwise is one unit in 2^8 of its head's scale away
        assert (a.float() - b.float()).abs().max() <= 2**-5 * a.float().abs().max()
    for name in POLICY_NAMES[1:] if ON_GPU else ["checkpointing"]:
        assert all(map(torch.equal, want, whole(name, g, "triton"))), name


@pytest.mark.skipif(not ON_GPU, reason="the kernels are compiled for one GPU")
@pytest.mark.parametrize("store", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", POLICY_NAMES)
@pytest.mark.parametrize("heads", [(4, 8), (16, 32), (3, 3)])
def test_a_fused_step_has_the_bits_of_its_pieces(name: str, store: str, heads: tuple[int, int]) -> None:
    from ssmspec.kernels import hopper_layer

    g = shape("gdn", store, num_layers=1, num_k_heads=heads[0], num_v_heads=heads[1])
    g = replace(g, conv=replace(g.conv, channels=128 * (2 * heads[0] + heads[1])))
    if not hopper_layer.serves(g, W):
        pytest.skip("not a Hopper GPU")
    assert all(map(torch.equal, whole(name, g, "triton"), whole(name, g, "triton", fused=True)))
