"""Fast mode's verify: couplings, then the window, as two launches."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssmspec.geometry import Arch, Geometry, Window
from ssmspec.kernels import fast_dot, fast_mma
from ssmspec.kernels.base import History, Layer, Noise, Tokens, Verify
from ssmspec.kernels.fast_couplings import couple
from ssmspec.kernels.fast_shape import Cursors, Shape
from ssmspec.kernels.triton_records import Records
from ssmspec.kernels.window import Inputs
CACHE={}

def make_verify(g: Geometry, w: Window, twin: bool | None = None, opts=None, do=3) -> Verify:
    """Verify as base.Verify says, through matrix products; keeps no snapshots."""
    mamba = g.arch is Arch.MAMBA2
    twin = triton.knobs.runtime.interpret if twin is None else twin
    least = (8 if twin else 4) * (2 if mamba else 1)
    tokens = max(least, triton.next_power_of_2(w.max_len))
    operand = tl.float32 if triton.knobs.runtime.interpret else getattr(tl, g.act_dtype)
    opts = opts or {}

    def verify(
        layer: Layer,
        x: Tokens,
        rows: Tensor,
        lens: Tensor,
        *,
        history: History | None = None,
        snapshots: Tensor | None = None,
        noise: Noise | None = None,
    ) -> Tensor:
        assert snapshots is None
        out = torch.empty_like(x.v, memory_format=torch.contiguous_format)
        batch, length = x.v.shape[:2]
        if not batch:
            return out
        at = Cursors(rows, lens, history.base if history else None, history.count if history else None, history.limit if history else 0)
        warps = 4 if not twin else opts.get("w", 4)
        while warps > 1 and g.head_v % (16 * warps):
            warps //= 2
        c = Shape(
            MAMBA=mamba, SOFTPLUS=g.dt_softplus, H=g.num_k_heads, HV=g.num_v_heads, K=g.head_k, V=g.head_v,
            T=length, R=layer.capacity, TP=tokens,
            HP=triton.next_power_of_2(max(history.limit, w.max_len, 16)) if history else 0,
            BV=16 * warps, HEADS=min(g.group, opts.get('heads', 4)), STAGES=opts.get('st', 2),
        )
        t = (x.q, x.k, x.v, x.a, x.b)
        inputs, strides = Inputs(*t), Inputs(*(None if y is None else y.stride()[:3] for y in t))
        rec, steps = Records(**layer.records), Records(**{n: f.stride(0) for n, f in layer.records.items()})
        W = out.new_empty(batch, g.num_v_heads, c.COEFFICIENTS, dtype=torch.float32)
        cursors = rows.new_empty(batch, dtype=torch.int64)
        p = layer.params
        if do & 1:
            couple[(batch * c.HV // c.HEADS,)](W, cursors, inputs, strides, p.A_log, p.dt_bias, p.D, at, rec, steps, operand, c, num_warps=opts.get('cw', 1), **({'maxnreg': opts['cr']} if opts.get('cr') else {}))
        tiles = batch * c.HV * c.BLOCKS
        args = (layer.state, layer.state.stride(0), W, inputs, strides, out, at, rec, steps)
        call = fast_mma.Call(layer.state, layer.state.stride(0), W, cursors, inputs, strides, out, rec, steps, tiles)
        if do & 2:
            if twin:
                fast_dot.window[(tiles,)](*args, operand, c, num_warps=warps)
            else:
                kw = {"maxnreg": opts["reg"]} if opts.get("reg") else {}
                key = (c, layer.state.dtype, opts.get("reg"))
                if key not in CACHE:
                    k = fast_mma.window.warmup(call, c, grid=(1,), num_warps=warps, **kw)
                    k._init_handles()
                    CACHE[key] = (min(65536 // (k.n_regs * 32 * warps), 232448 // (k.metadata.shared + 1024)) * torch.cuda.get_device_properties(0).multi_processor_count, k)
                fast_mma.window[(min(tiles, CACHE[key][0]),)](call, c, num_warps=warps, **kw)
        return out

    return verify
