"""Where a program stands, the records of its head, and their replay: shared by the window and the fold kernel."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ssmspec.kernels.triton_recurrence import lanes, rounded, update


class Records(NamedTuple):
    """One entry per recorded field, None where the layout has none: pointers, or elements per slot."""

    k: Any = None
    rnorm: Any = None
    c: Any = None
    x: Any = None
    dt: Any = None
    decay: Any = None


class Shape(NamedTuple):
    """What a kernel is compiled for: a geometry, a ring length and a tile."""

    ARCH: str
    BOUND: float | None
    SOFTPLUS: bool
    SCALE: float  # of a delta rule's query
    H: int
    HV: int
    PHV: int  # HV, to a power of two
    K: int
    V: int
    R: int
    PK: int  # K of the tile, a power of two
    LK: int
    LV: int
    NV: int
    C: int
    COMPILED: bool


class At(NamedTuple):
    """A program's head and tile."""

    h: Any
    hv: Any
    chunk: Any  # where chunks start along K, [LK, LV, 1, NK, 1]
    k: Any  # offsets along K, [LK, LV, 1, NK, C]
    v: Any  # offsets along V, [LK, LV, NV, 1, 1]
    k_in: Any
    v_in: Any
    lk: Any
    lv: Any


@triton.jit
def locate(hv, v_tile, g: tl.constexpr):
    chunk, k, v, lk, lv = lanes(g)
    v += v_tile * (g.LV * g.NV)
    k_in = k < g.K
    return At(
        chunk=chunk,
        h=hv // (g.HV // g.H),
        hv=hv,
        k=k,
        v=v,
        k_in=k_in,
        v_in=v < g.V,
        lk=lk,
        lv=lv,
    )


@triton.jit
def load_k(pointers, k_in, g: tl.constexpr):
    if g.K == g.PK:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=k_in, other=0.0)


@triton.jit
def load_fp32(pointer, at, g: tl.constexpr):
    """fp32 values along K: eight neighbours are two 16-byte loads, and have to be asked for as such."""
    k = at.chunk[:, :, :, :, :, None] + tl.arange(0, g.C // 4)[None, None, None, None, :, None] * 4
    k += tl.arange(0, 4)[None, None, None, None, None, :]
    x = load_k(pointer + k, k < g.K, g)
    return tl.reshape(x, at.k.shape)


@triton.jit
def load_v(pointers, v_in, g: tl.constexpr):
    if g.V % (g.LV * g.NV) == 0:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=v_in, other=0.0)


@triton.jit
def load_state(pointers, at, g: tl.constexpr):
    if g.K == g.PK and g.V % (g.LV * g.NV) == 0:
        return tl.load(pointers).to(tl.float32)
    else:
        return tl.load(pointers, mask=at.k_in & at.v_in, other=0.0).to(tl.float32)


@triton.jit
def store_state(pointers, s, at, g: tl.constexpr):
    s = s.to(pointers.dtype.element_ty)
    if g.K == g.PK and g.V % (g.LV * g.NV) == 0:
        tl.store(pointers, s)
    else:
        tl.store(pointers, s, mask=at.k_in & at.v_in)


@triton.jit
def store_v(pointers, y, at, g: tl.constexpr):
    """Store [1, LV, NV, 1, 1]; one lane over K writes for all."""
    y = tl.broadcast_to(y, at.v.shape).to(pointers.dtype.element_ty)
    tl.store(pointers, y, mask=(at.lk == 0) & at.v_in)


@triton.jit
def state_at(at, g: tl.constexpr):
    """Offsets of the tile in a [HV, V, K] state."""
    return at.hv * (g.V * g.K) + at.v * g.K + at.k


@triton.jit
def _fetch(rec, step, slot, p, at, g: tl.constexpr):
    """The record at ring position p as it lies there: key, its 1/norm (Mamba2: dt), decay, and c or x."""
    of_key, of_value = at.h * g.R + p, at.hv * g.R + p
    k = load_k(rec.k + slot * step.k + of_key * g.K + at.k, at.k_in, g)
    if g.ARCH == "kda":
        decay = load_fp32(rec.decay + slot * step.decay + of_value * g.K, at, g)
    else:
        decay = tl.load(rec.decay + slot * step.decay + of_value)
    if rec.x is not None:
        scale = tl.load(rec.dt + slot * step.dt + of_value)
        c = load_v(rec.x + slot * step.x + of_value * g.V + at.v, at.v_in, g)
    else:
        scale = tl.load(rec.rnorm + slot * step.rnorm + of_key)
        c = load_v(rec.c + slot * step.c + of_value * g.V + at.v, at.v_in, g)
    return k, scale, decay, c


@triton.jit
def _apply(s, rec, k, scale, decay, c, at, g: tl.constexpr):
    """What verify multiplied, from what it recorded, and onto the state."""
    k, c = k.to(tl.float32), c.to(tl.float32)
    if rec.x is not None:
        c = scale * c
    else:
        k = k * scale
    return update(s * decay, c, k)


@triton.jit
def replay(s, rec, step, slot, base, start, stop, ends, dtype: tl.constexpr, at, g: tl.constexpr):
    """Apply records start..stop of a slot, from ring position base on; the state behind the last is not rounded.

    ``ends`` (None: never) has a bit per ring position behind which native rounded.
    """
    first = start
    while first < stop:
        last = stop
        if ends is not None:  # stretches, since a branch per record would cost as much as the rounding
            if (first > 0) & ended(ends, base + first + g.R - 1, g):
                s = rounded(s, dtype, g)
            last = first + 1
            while (last < stop) & (ended(ends, base + last - 1, g) == 0):
                last += 1
        for j in range(first, last):
            k, scale, decay, c = _fetch(rec, step, slot, (base + j) % g.R, at, g)
            s = _apply(s, rec, k, scale, decay, c, at, g)
        first = last
    return s


@triton.jit
def ended(ends, position, g: tl.constexpr):
    return ((ends >> (position % g.R)) & 1) != 0


@triton.jit
def append(rec, step, slot, p, c, v, at, g: tl.constexpr):
    """Write a tile's share of the record at ring position p; the head's share is written by ``prepare``."""
    of_value = (at.hv * g.R + p) * g.V + at.v
    if rec.x is not None:
        store_v(rec.x + slot * step.x + of_value, v, at, g)
    else:
        store_v(rec.c + slot * step.c + of_value, c, at, g)
