"""Stock vLLM's GDN layer, timed beside ours on the same inputs, where vLLM is installed.

Looked up by name at run time, since nothing here may depend on vLLM. Its calls are those of vLLM 0.33.0's
``qwen_gdn_linear_attn.py``: the fused op of its default path, and the kernels of its Triton path.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ssmspec.acceptance import Acceptance
from ssmspec.geometry import Arch, DType, Geometry, Window
from ssmspec.kernels.base import Tokens
from ssmspec.measure import bench, traffic
from ssmspec.measure.bench import REPEATS, STEPS, Spread, Timing
from ssmspec.measure.rig import Rig
from ssmspec.pool import storage

FUSED, TRITON = "vllm-fused-op", "vllm-triton"
PEERS = (FUSED, TRITON)
OPS = "vllm.third_party.flash_linear_attention.ops"
CORE = {
    FUSED: ("vllm._custom_ops", "fused_gdn_decode_post_conv_mtp"),
    TRITON: (f"{OPS}.fused_sigmoid_gating", "fused_sigmoid_gating_delta_rule_update"),
}
MOST = {FUSED: 8, TRITON: 16}  # tokens of a window


def absent(peer: str, g: Geometry, w: Window) -> str | None:
    """Why a peer cannot be timed here; None if it can."""
    if g.arch is not Arch.GDN:
        return f"it serves gdn, not {g.arch}"
    if w.max_len > MOST[peer]:
        return f"it serves windows of at most {MOST[peer]} tokens"
    if importlib.util.find_spec("vllm") is None:
        return "vllm is not installed"
    try:
        importlib.import_module("vllm._custom_ops")
    except Exception as error:  # an installation that does not fit this torch fails in any way
        return f"vllm cannot be imported: {error!r:.200}"
    if peer == FUSED and not hasattr(torch.ops._C, "fused_gdn_decode_post_conv_mtp"):
        return "this vllm has no fused_gdn_decode_post_conv_mtp"
    if peer == FUSED and (
        g.state_dtype not in (DType.FP32, DType.BF16) or (g.head_k, g.head_v) != (128, 128)
    ):
        return "it serves fp32 and bf16 states of 128 x 128"
    return None


class Stock:
    """vLLM's layers over a rig's inputs: a state per draft, and the one that the last step ended in is the next start."""

    def __init__(self, peer: str, rig: Rig) -> None:
        g, t = rig.g, rig.w.max_len
        self.rig, self.call = rig, {FUSED: self._fused, TRITON: self._kernels}[peer]
        batch = rig.step.slots.shape[0]
        device, ints = rig.device, torch.int32
        columns = (rig.step.slots[:, None] - 1) * t + 1 + torch.arange(t, device=device)
        self.columns, self.slots = columns.int(), rig.step.slots.int()
        self.accepted = torch.ones(batch, dtype=ints, device=device)
        self.starts = torch.arange(0, batch * t + 1, t, dtype=ints, device=device)
        states = (g.num_layers, batch * t + 1, g.num_v_heads, g.head_v, g.head_k)
        self.states = torch.zeros(states, dtype=storage(g.state_dtype), device=device)
        inputs = (g.num_layers, batch + 1, g.conv.history + t - 1, g.conv.channels)
        self.inputs = torch.zeros(inputs, dtype=storage(g.act_dtype), device=device).mT  # vLLM's default
        self.weights = [w.conv.contiguous() for w in rig.weights]
        self.conv = _found("vllm.model_executor.layers.mamba.ops.causal_conv1d", "causal_conv1d_update")
        self.op = _found(*CORE[peer])
        self.norm = _found(f"{OPS}.layernorm_guard", "rmsnorm_fn")

    def verify(self, i: int) -> list[Tensor]:
        """Step ``i``'s outputs [B, T, HV, V], per layer; starts where step i - 1 was accepted."""
        if i:
            self.accepted.copy_(self.rig.accepted[(i - 1) % self.rig.steps])
        return [self._layer(layer) for layer in range(self.rig.g.num_layers)]

    def cycle(self) -> None:
        """A step behind the last of a cycle starts as the first: all that differs is where it reads."""
        for i in range(self.rig.steps):
            self.verify(i)

    def _layer(self, layer: int) -> Tensor:
        p, t = self.rig.inputs[layer], self.rig.w.max_len
        x = p.x.flatten(0, 1)
        x = self.conv(
            x,
            self.inputs[layer],
            self.weights[layer],
            None,
            "silu",
            conv_state_indices=self.slots,
            num_accepted_tokens=self.accepted,
            query_start_loc=self.starts,
            max_query_len=t,
            out=torch.empty_like(x),
        )
        return self.call(layer, x).view(p.z.shape)

    def _shared(self, layer: int) -> dict[str, Any]:
        p, params = self.rig.inputs[layer], self.rig.params[layer]
        assert p.b is not None
        return {
            "A_log": params.A_log,
            "dt_bias": params.dt_bias,
            "a": p.a.flatten(0, 1),
            "b": p.b.flatten(0, 1),
            "cu_seqlens": self.starts,
            "num_accepted_tokens": self.accepted,
        }

    def _fused(self, layer: int, x: Tensor) -> Tensor:
        z = self.rig.inputs[layer].z.flatten(0, 1)
        out: Tensor = self.op(
            mixed_qkv=x,
            state_indices=self.columns,
            state=self.states[layer],
            output_gate=z,
            norm_weight=self.rig.weights[layer].norm,
            out=torch.empty_like(z),
            scale=self.rig.g.head_k**-0.5,
            norm_eps=self.rig.layer.norm.eps,
            output_gate_activation="silu",
            **self._shared(layer),
        )
        return out

    def _kernels(self, layer: int, x: Tensor) -> Tensor:
        """It wants q, k and v apart, one copy each."""
        p = self.rig.inputs[layer]
        tokens = Tokens.unpack(self.rig.g, x[None], p.a, p.b)
        y, _ = self.op(
            q=tokens.q.contiguous(),
            k=tokens.k.contiguous(),
            v=tokens.v.contiguous(),
            initial_state=self.states[layer],
            inplace_final_state=True,
            ssm_state_indices=self.columns,
            use_qk_l2norm_in_kernel=True,
            **self._shared(layer),
        )
        v = self.rig.g.head_v
        out: Tensor = self.norm(
            y.view(-1, v),
            self.rig.weights[layer].norm,
            None,
            z=p.z.reshape(-1, v),
            eps=self.rig.layer.norm.eps,
            norm_before_gate=True,
            activation="silu",
        )
        return out


def _found(module: str, name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _rig(g: Geometry, w: Window, batch: int, acceptance: Acceptance, layers: int, seed: int) -> Rig:
    some = replace(g, num_layers=layers)
    return Rig("recover", some, w, batch, acceptance, steps=STEPS, seed=seed, device="cuda", backend="triton")


def disagreement(peer: str, g: Geometry, w: Window, acceptance: Acceptance, *, seed: int) -> str | None:
    """Whether a peer computes the same layer, over eight steps of eight requests; its bits are its own."""
    ours = _rig(g, w, 8, acceptance, 1, seed)
    theirs = Stock(peer, ours)
    for i in range(8):
        (a,), (b,) = theirs.verify(i), ours.verify(i)
        ours.accept()
        if (apart := bench.gap(a, b)) is not None:
            return f"outputs are {apart} away from ours at step {i + 1}"
    return None


def run(
    peer: str, g: Geometry, w: Window, batch: int, acceptance: Acceptance, *, bandwidth: float, seed: int = 0
) -> Timing:
    """As bench.run, for a peer. To accept costs it nothing but the count that its next step reads."""
    layers = bench.layers_of(g, batch)
    timing = Timing(
        policy=peer,
        mode=w.mode,
        state_dtype=g.state_dtype,
        draft=w.max_len - 1,
        ring=w.limit,
        batch=batch,
        accepted=acceptance.mean,
        absent=absent(peer, g, w),
        layers=layers,
        bytes=traffic.of("native", g, w, acceptance).total * batch,
        bandwidth=bandwidth,
    )
    if timing.absent is not None:
        return timing
    if (why := disagreement(peer, g, w, acceptance, seed=seed)) is not None:
        return replace(timing, refused=why)
    stock = Stock(peer, _rig(g, w, batch, acceptance, layers, seed))
    stock.cycle()
    host = bench.host(stock.cycle, STEPS)
    whole = bench.timed(bench.graph(stock.cycle), REPEATS)
    each = STEPS * layers
    return replace(
        timing,
        step_us=Spread(median=whole.median / each, iqr=whole.iqr / each),
        accept_us=Spread(median=0.0, iqr=0.0),
        host_us=host,
    )
