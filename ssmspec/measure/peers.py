"""Stock vLLM's layers, and kernels of flash-linear-attention and FlashInfer, timed beside ours where installed."""

import importlib
import importlib.util
from dataclasses import replace

import torch

from ssmspec.acceptance import Acceptance
from ssmspec.geometry import Arch, DType, Geometry, Window
from ssmspec.measure import bench, peer_flashinfer, stock_layers, traffic
from ssmspec.measure.bench import REPEATS, STEPS, Timing
from ssmspec.measure.rig import Rig
from ssmspec.measure.stock import Peer

FUSED, TRITON, FLASH = "vllm-fused-op", "vllm-triton", "flash-linear-attention"
FLASHINFER, RING = "flashinfer", "flashinfer-ring"
PEERS = (FUSED, TRITON, FLASH, FLASHINFER, RING)
MOST = {FUSED: 8, TRITON: 16, FLASH: 16, FLASHINFER: 16, RING: 8}  # tokens of a window


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
    if peer == TRITON and g.arch is Arch.KDA and g.group > 1:
        return "its kda has as many key heads as value heads"
    if peer in (FLASHINFER, RING) and (why := _unserved(peer, g, w)) is not None:
        return why
    needs = {FLASH: ("vllm", "fla"), FLASHINFER: ("flashinfer",), RING: ("flashinfer",)}.get(peer, ("vllm",))
    for name in needs:
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed"
    if "vllm" not in needs:
        return None
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


def _unserved(peer: str, g: Geometry, w: Window) -> str | None:
    """What a shape has that FlashInfer's kernels do not take."""
    if g.arch not in (peer_flashinfer.RINGS if peer == RING else peer_flashinfer.PER_TOKEN):
        return f"its {'ring' if peer == RING else 'kernel'} for {g.arch} is not called yet"
    if g.state_dtype not in (DType.FP32, DType.BF16):
        return "it serves fp32 and bf16 states"
    if (g.head_k, g.head_v) != (128, 128):
        return "it serves states of 128 x 128"
    if g.state_dtype is DType.FP32 and (peer == RING or g.arch is Arch.KDA):
        return "it serves bf16 states"
    if peer == RING and w.max_len not in (4, 8):
        return "its ring serves windows of 4 and 8 tokens"
    return None


def layers(peer: str, rig: Rig) -> Peer:
    if peer == FUSED:
        return stock_layers.FusedOp(rig)
    kinds = {
        TRITON: stock_layers.TRITON,
        FLASH: stock_layers.FLASH,
        FLASHINFER: peer_flashinfer.PER_TOKEN,
        RING: peer_flashinfer.RINGS,
    }
    return kinds[peer][rig.g.arch](rig)


def _rig(g: Geometry, w: Window, batch: int, acceptance: Acceptance, number: int, seed: int) -> Rig:
    some = replace(g, num_layers=number)
    return Rig("recover", some, w, batch, acceptance, steps=STEPS, seed=seed, device="cuda", backend="triton")


def disagreement(peer: str, g: Geometry, w: Window, acceptance: Acceptance, *, seed: int) -> str | None:
    """Whether a peer computes the same layer, over eight steps of eight requests; its bits are its own."""
    ours = _rig(g, w, 8, acceptance, 1, seed)
    theirs = layers(peer, ours)
    for i in range(8):
        (b,), (a,) = ours.verify(i), theirs.verify(i)  # ours opens the step
        ours.accept()
        if (apart := bench.gap(a, b)) is not None:
            return f"outputs are {apart} away from ours at step {i + 1}"
    return None


def run(
    peer: str, g: Geometry, w: Window, batch: int, acceptance: Acceptance, *, bandwidth: float, seed: int = 0
) -> Timing:
    """As bench.run, for a peer. Its accept is what it tells all the model's layers of where a step starts."""
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
        bytes=0.0 if peer == RING else traffic.of("native", g, w, acceptance).total * batch,
        bandwidth=bandwidth,
    )
    if timing.absent is not None:
        return timing
    try:
        why = disagreement(peer, g, w, acceptance, seed=seed)
    except Exception as error:  # a package of another version, or for another GPU, fails in any way
        return replace(timing, absent=f"it cannot be called here: {error!r:.200}")
    if why is not None:
        return replace(timing, refused=why)
    theirs = layers(peer, _rig(g, w, batch, acceptance, number, seed))
    cycle = theirs.cycle if theirs.whole else theirs.cores
    cycle()
    host = bench.host(cycle, STEPS)
    whole = bench.timed(bench.graph(cycle), REPEATS) if theirs.whole else None
    core = None if theirs.normed else bench.timed(bench.graph(theirs.cores), REPEATS)
    accepts = bench.timed(bench.graph(theirs.stages), REPEATS)
    return replace(
        timing,
        step_us=None if whole is None else bench.less(whole, accepts, STEPS * number),
        core_us=None if core is None else bench.less(core, accepts, STEPS * number),
        accept_us=accepts.over(STEPS * g.num_layers),
        host_us=host,
    )
