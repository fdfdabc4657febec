"""Stock vLLM's layers and flash-linear-attention's kernels, timed beside ours on the same inputs, where installed."""

import importlib
import importlib.util
from dataclasses import replace

import torch

from ssmspec.acceptance import Acceptance
from ssmspec.geometry import Arch, DType, Geometry, Window
from ssmspec.measure import bench, stock_layers, traffic
from ssmspec.measure.bench import REPEATS, STEPS, Spread, Timing
from ssmspec.measure.rig import Rig
from ssmspec.measure.stock import Stock

FUSED, TRITON, FLASH = "vllm-fused-op", "vllm-triton", "flash-linear-attention"
PEERS = (FUSED, TRITON, FLASH)
MOST = {FUSED: 8, TRITON: 16, FLASH: 16}  # tokens of a window


def absent(peer: str, g: Geometry, w: Window) -> str | None:
    """Why a peer cannot be timed here; None if it can."""
    if peer == FUSED and g.arch is not Arch.GDN:
        return f"it serves gdn, not {g.arch}"
    if peer == FUSED and w.max_len == 1:
        return "vllm decodes single tokens by its Triton kernel"
    if w.max_len > MOST[peer]:
        return f"it serves windows of at most {MOST[peer]} tokens"
    if peer == FLASH and g.arch not in stock_layers.FLASH:
        return f"it has no kernel for {g.arch}"
    if peer == FLASH and g.arch is Arch.GDN and (w.max_len > 1 or g.state_dtype is not DType.FP32):
        return "its gdn keeps one fp32 state of a window, so that no draft can be rejected"
    for name in ("vllm", "fla") if peer == FLASH else ("vllm",):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed"
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


def layers(peer: str, rig: Rig) -> Stock:
    if peer == FUSED:
        return stock_layers.FusedOp(rig)
    return (stock_layers.TRITON if peer == TRITON else stock_layers.FLASH)[rig.g.arch](rig)


def _rig(g: Geometry, w: Window, batch: int, acceptance: Acceptance, number: int, seed: int) -> Rig:
    some = replace(g, num_layers=number)
    return Rig("recover", some, w, batch, acceptance, steps=STEPS, seed=seed, device="cuda", backend="triton")


def disagreement(peer: str, g: Geometry, w: Window, acceptance: Acceptance, *, seed: int) -> str | None:
    """Whether a peer computes the same layer, over eight steps of eight requests; its bits are its own."""
    ours = _rig(g, w, 8, acceptance, 1, seed)
    theirs = layers(peer, ours)
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
    number = bench.layers_of(g, batch)
    timing = Timing(
        policy=peer,
        mode=w.mode,
        state_dtype=g.state_dtype,
        draft=w.max_len - 1,
        ring=w.limit,
        batch=batch,
        accepted=acceptance.mean,
        absent=absent(peer, g, w),
        layers=number,
        bytes=traffic.of("native", g, w, acceptance).total * batch,
        bandwidth=bandwidth,
    )
    if timing.absent is not None:
        return timing
    try:
        why = disagreement(peer, g, w, acceptance, seed=seed)
    except ImportError as error:  # of another version
        return replace(timing, absent=str(error))
    if why is not None:
        return replace(timing, refused=why)
    theirs = layers(peer, _rig(g, w, batch, acceptance, number, seed))
    theirs.cycle()
    host = bench.host(theirs.cycle, STEPS)
    whole = bench.timed(bench.graph(theirs.cycle), REPEATS)
    core = None if theirs.normed else bench.timed(bench.graph(theirs.cores), REPEATS)
    return replace(
        timing,
        step_us=whole.over(STEPS * number) if theirs.whole else None,
        core_us=None if core is None else core.over(STEPS * number),
        accept_us=Spread(median=0.0, iqr=0.0),
        host_us=host,
    )
