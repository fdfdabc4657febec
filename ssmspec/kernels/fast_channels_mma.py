"""The couplings of KDA in Gluon: as ``fast_channels``, of half the registers and three quarters of the instructions.

One warp per (row, value head). The history is on its way into shared memory while the window's tokens are worked out,
and meets the probes on tensor cores. Sums over channels are gathered many at once, one to a lane; norms are left to
the coefficients that the window kernel multiplies with.
"""

# ruff: noqa: RUF005 - Triton unpacks no tuples
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disable-error-code="assignment"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ssmspec.kernels.conv_math import ring_at
from ssmspec.kernels.fast_channels_history import fetch_history, fold_history, hand_over_history, see
from ssmspec.kernels.fast_couplings import EPS, load_channels
from ssmspec.kernels.fast_math import channel_decay, exp, rsqrt, sigmoid
from ssmspec.kernels.fast_mma import above
from ssmspec.kernels.fast_rows import ROWS, live_row, place_row
from ssmspec.kernels.handed import hand_over


@gluon.jit
def _lane_sum(x, c: gl.constexpr):
    """[1, KP] -> [32], of the channels of every lane."""
    return gl.sum(gl.reshape(x, [32, c.KP // 32]), 1)


@gluon.jit
def _of_lane(x, i, lane):
    """[32], lane i's number everywhere."""
    return gl.gather(x, lane * 0 + i, 0)


@gluon.jit
def _halve(xs, lane, MANY: gl.constexpr, BIT: gl.constexpr):
    """MANY tensors [32] -> half as many: a lane keeps one of two, and gets its neighbour's share of that."""
    other = lane ^ BIT
    ys = ()
    for i in gl.static_range(MANY // 2):
        kept = gl.where((lane & BIT) != 0, xs[2 * i + 1], xs[2 * i])
        given = gl.where((lane & BIT) != 0, xs[2 * i], xs[2 * i + 1])
        ys = ys + (kept + gl.gather(given, other, 0),)
    if MANY % 2:
        ys = ys + (xs[MANY - 1] + gl.gather(xs[MANY - 1], other, 0),)
    return ys


@gluon.jit
def _gather_sums(xs, lane, N: gl.constexpr):
    """N <= 32 tensors [32] -> [32], the sum over the i-th one's lanes in lane i."""
    for s in gl.static_range(5):
        xs = _halve(xs, lane, (N + (1 << s) - 1) >> s, 1 << s)
    return xs[0]


@gluon.jit
def _window(loaded, beta, rate, bias, of_w, to_key, to_decay, first, n, k, lane, own, c: gl.constexpr):
    """Solve a window's tokens among each other -> tuple over tokens of raw probes with their decays, key above query
    [2, KP], and the keys' 1/norm, token t's in lane t of [32].

    Coefficients go to ``of_w``; records of decays and raw keys to ring position ``first`` and on.
    """
    TOKENS: gl.constexpr = c.T
    keys, queries, gates = loaded
    upto = gl.full([1, c.KP], 1.0, gl.float32, layout=c.row())
    scale = lane * 0.0
    norms = scale
    probes, decayed, units = (), (), ()
    for t in gl.static_range(TOKENS):
        ring = ring_at(first + t, c) * c.K
        inside = (k < c.K) & (t < n)
        gl.store(to_key + ring + k, keys[t], mask=inside & own)
        key, query = keys[t].to(gl.float32), queries[t].to(gl.float32)
        decay = channel_decay(gates[t].to(gl.float32), rate, bias, c.BOUND)
        gl.store(to_decay + ring + k, decay, mask=inside)
        upto = upto * decay
        probes = probes + (gl.convert_layout(above(key * upto, query * upto), c.row()),)
        later, on_keys, on_queries = (), (), ()
        for j in gl.static_range(t):
            old = decayed[j] * decay
            on_keys = on_keys + (_lane_sum(old * key, c),)
            on_queries = on_queries + (_lane_sum(old * query, c),)
            later = later + (old,)
        decayed = later + (key,)
        on_keys = on_keys + (_lane_sum(key * key, c),)
        on_queries = on_queries + (_lane_sum(key * query, c), _lane_sum(query * query, c))
        sums = _gather_sums(on_keys + on_queries, lane, 2 * t + 3)

        inverse = rsqrt(sums + EPS)
        key_norm = _of_lane(inverse, t, lane)
        query_norm = _of_lane(inverse, 2 * t + 2, lane) * c.QUERY
        norms = gl.where(lane == t, key_norm, norms)
        scale = gl.where(lane == 2 * t, key_norm, gl.where(lane == 2 * t + 1, query_norm, scale))
        gain = _of_lane(beta, t, lane)
        seen = lane * 0.0
        output = seen
        for j in gl.static_range(t):
            seen += _of_lane(sums, j, lane) * units[j]
            output += _of_lane(sums, t + 1 + j, lane) * units[j]
        update = gl.where(lane == t, gain, 0.0) - gain * key_norm * seen
        units = units + (update * key_norm,)
        output += _of_lane(sums, 2 * t + 1, lane) * units[t]
        hand_over(of_w + t * c.NC + lane, update, mask=lane < c.TP)
        hand_over(of_w + (t * c.NC + c.TP) + lane, output * query_norm, mask=lane < c.TP)
    PADDED: gl.constexpr = c.TP
    for t in gl.static_range(TOKENS, PADDED):
        hand_over(of_w + t * c.NC + lane, lane * 0.0, mask=lane < c.NC)
    hand_over(of_w + c.SCALE + lane, scale, mask=lane < c.NC)
    return probes, norms


@gluon.jit
def couple(to, x, x_step, A_log, dt_bias, D, at, rec, rec_step, OPERAND: gl.constexpr, c: gl.constexpr):
    """As fast_channels.couple, but that norms are in the coefficients to.heads, and vectors without them."""
    row = (gl.program_id(0) // c.HV).to(gl.int64)
    head = gl.program_id(0) % c.HV
    h = head // c.GROUP
    slot, n, first, records, flush = live_row(at, row)
    if head == 0:
        place_row(to, at, row, slot, n, first, records, flush, gl.arange(0, ROWS, layout=c.line()))
    if n == 0:
        return
    ROW: gl.constexpr = c.row()
    k = gl.arange(0, c.KP, layout=gl.SliceLayout(0, ROW))[None, :]
    lane = gl.arange(0, 32, layout=_lane_sum(k, c).type.layout)
    # all loads first, those ahead that need not wait for where the history is
    loaded = load_channels(x, x_step, row, h, head, n, k, c)
    of_beta = x.b + row * x_step.b[0] + head * x_step.b[2] + lane * x_step.b[1]
    beta = gl.load(of_beta, mask=lane < n, other=0.0)
    rate = gl.load(A_log + head)
    bias = gl.load(dt_bias + head * c.K + k, mask=k < c.K, other=0.0)
    rec_k = rec.k + slot * rec_step.k + h * (c.R * c.K)
    rec_norm = rec.rnorm + slot * rec_step.rnorm + h * c.R
    rec_decay = rec.decay + slot * rec_step.decay + head * (c.R * c.K)
    if c.HP > 0:
        old_keys, old = fetch_history(rec, rec_k, rec_decay, first, records, c)
        past = gl.arange(0, c.HP, layout=c.line())
        fold = gl.load(rec_norm + ring_at(first + past, c), mask=past < records, other=0.0)

    of_w = to.heads + (row * c.HV + head) * c.COEFFICIENTS
    behind = ring_at(first + records, c)
    own = head % c.GROUP == 0
    beta, rate, bias = sigmoid(beta.to(gl.float32)), exp(rate.to(gl.float32)), bias.to(gl.float32)
    probes, norms = _window(loaded, beta, rate, bias, of_w, rec_k, rec_decay, behind, n, k, lane, own, c)
    gl.store(rec_norm + ring_at(behind + lane, c), norms, mask=(lane < n) & own)

    TOKENS: gl.constexpr = c.T
    of_vectors = to.vectors + (row * c.HV + head) * (c.VECTORS * c.K)
    if c.HP > 0:
        hand_over(of_w + c.FOLD + past, fold)
        hand_over(of_w + c.TOTAL + lane, lane * 0.0 + 1.0, mask=lane < 4)
        total = fold_history(old_keys, old, records, c)
        see(old, probes, to.seen + (row * c.HV + head) * (c.NC * c.HP), c)
        if flush:
            hand_over_history(old, total, of_vectors, records, k, c)
    which = gl.arange(0, 2, layout=gl.SliceLayout(1, c.row()))[:, None]
    for t in gl.static_range(TOKENS):
        probe = probes[t]
        if c.HP > 0:
            probe = probe * total
        hand_over(of_vectors + (2 * t + which) * c.K + k, probe, mask=k < c.K)
