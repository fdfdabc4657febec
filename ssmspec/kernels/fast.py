"""Fast mode's verify: one launch for the couplings of the tokens, one for the window."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssmspec.geometry import Arch, Geometry, Window
from ssmspec.kernels import fast_channels, fast_couplings, fast_dot, fast_mma
from ssmspec.kernels.base import History, Layer, Noise, Tokens, Verify
from ssmspec.kernels.fast_shape import Couplings, Cursors, Shape
from ssmspec.kernels.triton_records import Records
from ssmspec.kernels.window import Inputs

OPTS={}
def make_verify(g: Geometry, w: Window, twin=None, opts=None, do=3) -> Verify:
    """Verify as base.Verify says, through matrix products; keeps no snapshots."""
    opts = opts or {}
    interpreted = triton.knobs.runtime.interpret
    operand = tl.float32 if interpreted else getattr(tl, g.act_dtype)
    twin = interpreted if twin is None else twin
    mamba = g.arch is Arch.MAMBA2
    programs: dict[Any, int] = {}

    def verify(layer: Layer, x: Tokens, rows: Tensor, lens: Tensor, *, history: History | None = None, snapshots: Tensor | None = None, noise: Noise | None = None) -> Tensor:
        assert snapshots is None
        batch, length = x.v.shape[:2]
        out = torch.empty(x.v.shape, dtype=x.v.dtype, device=x.v.device)
        if not batch:
            return out
        least = (8 if twin else 4) * (2 if mamba else 1)
        warps = 4
        while warps > 1 and g.head_v % (16 * warps):
            warps //= 2
        c = Shape(ARCH=str(g.arch), SOFTPLUS=g.dt_softplus, BOUND=g.gate_lower_bound, H=g.num_k_heads, HV=g.num_v_heads, K=g.head_k, V=g.head_v,
            T=length, R=layer.capacity, TP=max(least, triton.next_power_of_2(length)), HP=triton.next_power_of_2(max(history.limit, length, 16)) if history else 0, BV=16 * warps, HEADS=min(g.group, 4) if g.arch is not Arch.KDA else 1)
        at = Cursors(rows, lens, history.base if history else None, history.count if history else None, history.limit if history else 0)
        t = (x.q, x.k, x.v, x.a, x.b)
        inputs, strides = Inputs(*t), Inputs(*(None if y is None else y.stride()[:3] for y in t))
        rec, steps = Records(**layer.records), Records(**{n: f.stride(0) for n, f in layer.records.items()})
        f32 = lambda *s: torch.empty(*s, dtype=torch.float32, device=out.device)
        to = Couplings(f32(batch, c.HV, c.COEFFICIENTS), f32(batch, c.HV, c.VECTORS, c.K) if c.CHANNELS else None, torch.empty(batch, dtype=torch.int64, device=out.device))
        p = layer.params
        if do & 1:
            k = fast_channels.couple if c.CHANNELS else fast_couplings.couple
            k[(batch * c.HV // c.HEADS,)](to, inputs, strides, p.A_log, p.dt_bias, p.D, at, rec, steps, operand, c, num_warps=opts.get("cw", 4 if c.CHANNELS else 1), **({'maxnreg': opts['cr']} if opts.get('cr') else {}))
        tiles = batch * c.HV * c.BLOCKS
        if do & 2:
            if twin:
                fast_dot.window[(tiles,)](layer.state, layer.state.stride(0), to, inputs, strides, out, at, rec, steps, operand, c, num_warps=4)
            else:
                call = fast_mma.Call(layer.state, layer.state.stride(0), to, inputs, strides, out, rec, steps, tiles)
                kw = {"maxnreg": opts["reg"]} if opts.get("reg") else {}
                if c not in programs:
                    k = fast_mma.window.warmup(call, c, grid=(1,), num_warps=warps, **kw)
                    k._init_handles()
                    programs[c] = min(65536 // (k.n_regs * 32 * warps), 232448 // (k.metadata.shared + 1024)) * torch.cuda.get_device_properties(0).multi_processor_count
                fast_mma.window[(min(tiles, programs[c]),)](call, c, num_warps=warps, **kw)
        return out

    return verify
