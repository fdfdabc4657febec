"""What one slot holds. The only place where bytes are declared: pools, capacity, traffic and vLLM sizes derive from it."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from ssmspec.geometry import Arch, Conv, DType, Geometry, Mode, Window


@dataclass(frozen=True)
class Field:
    name: str
    shape: tuple[int, ...]  # of one slot in one layer
    dtype: DType
    durable: bool = True  # must survive between steps
    shared: bool = False  # one copy for all layers (cursors)

    @property
    def nbytes(self) -> int:
        """Bytes of one slot in one layer; an NVFP4 head is a [V, K] tile."""
        return self.dtype.nbytes(prod(self.shape), heads=prod(self.shape[:-2]))


Layout = tuple[Field, ...]


@dataclass(frozen=True)
class Ring:
    """Sizes of a ring of records: a flush is due when count + window > limit; capacity = limit + T at least."""

    limit: int  # L
    capacity: int  # R


def ring(policy: str, w: Window) -> Ring:
    """Every-step replay is checkpointing with no room: each verify folds what the last step accepted."""
    t = w.max_len
    return {
        "recover": Ring(0, t),
        "every-step": Ring(0, 2 * t),  # last window's records are read while this window's are written
        "checkpointing": Ring(w.limit, w.limit + t),
    }[policy]


def state(g: Geometry, name: str = "state", dtype: DType | None = None) -> Field:
    return Field(name, (g.num_v_heads, g.head_v, g.head_k), dtype or g.state_dtype)


def read_copy(g: Geometry) -> Layout:
    return (state(g, "read", g.read_dtype),) if g.read_dtype else ()


def records(g: Geometry, capacity: int, *, durable: bool) -> Layout:
    """What a token does to the state, S <- decay * S + c k^T, for GDN, KDA and Mamba2.

    Each field holds what was multiplied, or what gives it again by the same operation: c = dt * x for Mamba2,
    the key as raw key times 1/norm. KDA's raw gate would be half as long as its decays, but replay would run it
    through the gate function again, which costs more time than the bytes. With a read copy the delta rules record v and
    beta instead of c, so that no error of the copy can enter the anchor.
    """
    h, hv, r, act, f32 = g.num_k_heads, g.num_v_heads, capacity, g.act_dtype, DType.FP32

    def field(name: str, shape: tuple[int, ...], dtype: DType) -> Field:
        return Field(f"rec_{name}", shape, dtype, durable)

    key = field("k", (h, r, g.head_k), act)
    if g.arch is Arch.MAMBA2:
        value: Layout = (field("x", (hv, r, g.head_v), act), field("dt", (hv, r), f32))
    else:
        norm = field("rnorm", (h, r), f32)
        if g.read_dtype:
            value = (norm, field("v", (hv, r, g.head_v), act), field("beta", (hv, r), f32))
        else:
            value = (norm, field("c", (hv, r, g.head_v), g.record_dtype))
    decays = (hv, r, g.head_k) if g.arch is Arch.KDA else (hv, r)
    return (key, *value, field("decay", decays, f32))


def conv(c: Conv, max_len: int, act_dtype: DType, name: str = "conv") -> Field:
    """The settled inputs, then room for one window."""
    return Field(name, (c.channels, c.history + max_len), act_dtype)


def cursor(name: str, dtype: DType = DType.INT32) -> Field:
    return Field(name, (), dtype, shared=True)


def _noise(g: Geometry) -> Layout:
    """Stochastic rounding draws from (seed, position), so a slot must know both."""
    return (cursor("seed"), cursor("position")) if g.stochastic else ()


def _native(g: Geometry, w: Window) -> Layout:
    if g.read_dtype:
        raise ValueError(
            f"read_dtype={g.read_dtype}: native keeps no checkpoint that a read copy could shadow"
        )
    s = state(g)
    return Field("snapshots", (w.max_len, *s.shape), s.dtype), cursor("winner"), *_noise(g)


def _recover(g: Geometry, w: Window) -> Layout:
    r = ring("recover", w).capacity
    return state(g), *read_copy(g), *records(g, r, durable=False), *_noise(g)


def _replay(policy: str) -> Callable[[Geometry, Window], Layout]:
    def layout(g: Geometry, w: Window) -> Layout:
        cursors: Layout = (cursor("base"), cursor("count"))
        if rounds_at_ends(policy, g, w):
            cursors += (cursor("ends", DType.INT64),)
        fields = records(g, ring(policy, w).capacity, durable=True)
        return state(g), *read_copy(g), *fields, *cursors, *_noise(g)

    return layout


def rounds_at_ends(policy: str, g: Geometry, w: Window) -> bool:
    """Whether replay must round at every accepted step's end, as native did, to give native's bits."""
    return policy == "checkpointing" and w.mode is Mode.EXACT and g.state_dtype is not DType.FP32


_LAYOUTS: dict[str, Callable[[Geometry, Window], Layout]] = {
    "native": _native,
    "recover": _recover,
    "every-step": _replay("every-step"),
    "checkpointing": _replay("checkpointing"),
}
POLICY_NAMES = tuple(_LAYOUTS)


def of(policy: str, g: Geometry, w: Window) -> Layout:
    """The fields of one slot under a policy. Raises ValueError where the policy cannot serve the geometry."""
    if policy not in _LAYOUTS:
        raise ValueError(f"policy={policy!r} is not one of {', '.join(POLICY_NAMES)}")
    return _LAYOUTS[policy](g, w)
