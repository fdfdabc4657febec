"""What every tile of a window needs, computed once: norms, gates, the window's records, and one packed row each."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ssmspec.kernels.heads import Heads, power_of_2, revision
from ssmspec.kernels.hopper_fetch import BASE, COUNT, FLUSH, ROW, SLOT
from ssmspec.kernels.hopper_shape import bits
from ssmspec.kernels.hopper_tile import hand_over

EPS = gl.constexpr(1e-6)  # of the l2 norm


REVISION = revision(__file__)


@dataclass(frozen=True, kw_only=True)
class PrepareShape(Heads):
    """What a prepare kernel is compiled for. A program serves HEADS key heads of one token."""

    R: int = 0  # ring length; 0: nothing is recorded
    HISTORY: bool = False
    ENDS: bool = False
    HEADS: int = 8
    WARPS: int = 4
    REVISION: str = REVISION

    @property
    def VALUES(self) -> int:
        """Value heads of a program, to a power of 2."""
        return power_of_2(self.HEADS * self.GROUP)

    @property
    def KEYS(self) -> gl.DistributedLinearLayout:
        """[HEADS, K]: lane i holds keys i, i + 32, .., as four warps of plain Triton do; heads over warps."""
        heads = bits(self.HEADS)
        warps = len(bits(self.WARPS))
        across = [[h, 0] for h in heads[:warps]] + [[0, 0]] * (warps - len(heads[:warps]))
        return gl.DistributedLinearLayout(
            [[0, k] for k in bits(self.K) if k >= 32] + [[h, 0] for h in heads[warps:]],
            [[0, k] for k in bits(32)],
            across,
            [],
            [self.HEADS, self.K],
        )


@gluon.jit
def _rnorm(x, c: gl.constexpr):
    """x [HEADS, K] -> 1 / norm [HEADS]: lanes first, then the pairs of 32 that are farther apart, as plain Triton."""
    s = gl.sum(gl.reshape(x * x, [c.HEADS, 2, c.K // 64, 32]), 3)
    return gl.rsqrt(gl.sum(gl.sum(s, 1), 1) + EPS)


@gluon.jit
def _cursors(slots, lens, history, b, c: gl.constexpr):
    """slot, window length, ring position of the oldest record, records: all 0 for a null row."""
    slot = gl.load(slots + b).to(gl.int64)
    n = gl.load(lens + b).to(gl.int64)
    n = gl.where((slot > 0) & (n > 0), n, 0)
    slot = gl.where(n > 0, slot, 0)
    base = slot * 0
    count = base
    if c.HISTORY:
        base = gl.where(n > 0, gl.load(history.base + slot).to(gl.int64), 0)
        count = gl.where(n > 0, gl.load(history.count + slot).to(gl.int64), 0)
    return slot, n, base, count


@gluon.jit
def _pack(rows, slot, held, n, base, count, history, b, c: gl.constexpr):
    flush = (count > 0) & (count + n > history.limit) if c.HISTORY else slot < 0
    packed = n | (count << COUNT) | (base << BASE) | (flush.to(gl.int64) << FLUSH)
    packed = packed | ((slot & 0xFFFFF) << SLOT) | (held << ROW)
    gl.store(rows + 2 * b, packed)
    if c.ENDS:
        ends = gl.load(history.ends + slot)
        gl.store(rows + 2 * b + 1, (ends >> base) | (ends << (c.R - base)))


@gluon.jit
def _gates(x, strides, A_log, dt_bias, b, t, hv, live):
    """decay = exp(-exp(A_log) softplus(a + dt_bias)) and beta = sigmoid(b), [value heads]."""
    a = gl.load(x.a + b * strides.a[0] + t * strides.a[1] + hv * strides.a[2], mask=live, other=0.0).to(
        gl.float32
    )
    y = a + gl.load(dt_bias + hv, mask=live, other=0.0).to(gl.float32)
    softplus = gl.where(y <= 20.0, gl.log(1 + gl.exp(y)), y)
    decay = gl.exp(-gl.exp(gl.load(A_log + hv, mask=live, other=0.0).to(gl.float32)) * softplus)
    y = gl.load(x.b + b * strides.b[0] + t * strides.b[1] + hv * strides.b[2], mask=live, other=0.0).to(
        gl.float32
    )
    return decay, 1 / (1 + gl.exp(-y))


@gluon.jit
def _write_keys(x, strides, records, record_strides, p_factors, slot, position, b, t, h, c: gl.constexpr):
    """Norms of the keys and queries of HEADS heads, and the key's share of the record. h [HEADS, 1]."""
    HEAD: gl.constexpr = gl.SliceLayout(1, c.KEYS)
    GROUP: gl.constexpr = c.GROUP
    k = gl.arange(0, c.K, layout=gl.SliceLayout(0, c.KEYS))[None, :]
    live = h < c.H
    raw = gl.load(x.k + b * strides.k[0] + t * strides.k[1] + h * strides.k[2] + k, mask=live, other=0.0)
    q = gl.load(x.q + b * strides.q[0] + t * strides.q[1] + h * strides.q[2] + k, mask=live, other=0.0)
    k_norm = gl.convert_layout(_rnorm(raw.to(gl.float32), c), HEAD)[:, None]
    q_norm = gl.convert_layout(_rnorm(q.to(gl.float32), c), HEAD)[:, None]
    for i in gl.static_range(GROUP):
        p = p_factors + (h * GROUP + i) * (4 * c.WINDOW)
        hand_over(p, k_norm, mask=live)
        hand_over(p + c.WINDOW, q_norm, mask=live)
    if c.R > 0:
        at = h * c.R + position
        gl.store(records.k + slot * record_strides.k + at * c.K + k, raw, mask=live)
        gl.store(records.rnorm + slot * record_strides.rnorm + at, k_norm, mask=live)


@gluon.jit
def prepare_window(
    x,
    strides,
    A_log,
    dt_bias,
    slots,
    pages,
    lens,
    history,
    records,
    record_strides,
    prepared,
    c: gl.constexpr,
):
    """Grid (B * T, H / HEADS). Writes ``prepared``, and k, 1/norm and decay of the window's records."""
    b = (gl.program_id(0) // c.T).to(gl.int64)
    t = gl.program_id(0) % c.T
    slot, n, base, count = _cursors(slots, lens, history, b, c)
    if gl.program_id(0) % c.T + gl.program_id(1) == 0:
        held = slot
        if pages is not None:
            held = gl.load(pages + slot)
        _pack(prepared.rows, slot, held, n, base, count, history, b, c)
    if t < n:
        position = (base + count + t).to(gl.int32)
        if c.R > 0:
            position = gl.where(position >= c.R, position - c.R, position)
        first = gl.program_id(1) * c.HEADS
        h = first + gl.arange(0, c.HEADS, layout=gl.SliceLayout(1, c.KEYS))[:, None]
        p_factors = prepared.factors + b * (c.HV * 4 * c.WINDOW) + t
        _write_keys(x, strides, records, record_strides, p_factors, slot, position, b, t, h, c)
        hv = first * c.GROUP + gl.arange(0, c.VALUES, layout=gl.BlockedLayout([1], [32], [c.WARPS], [0]))
        live = (hv < c.HV) & (hv < (first + c.HEADS) * c.GROUP)
        decay, beta = _gates(x, strides, A_log, dt_bias, b, t, hv, live)
        p = p_factors + hv * (4 * c.WINDOW)
        hand_over(p + 2 * c.WINDOW, decay, mask=live)
        hand_over(p + 3 * c.WINDOW, beta, mask=live)
        if c.R > 0:
            p_decay = records.decay + slot * record_strides.decay + hv * c.R + position
            gl.store(p_decay, decay, mask=live)
