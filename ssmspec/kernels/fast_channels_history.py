"""The records of KDA beside the tokens of its window: how their keys get into shared memory, and to the probes."""

# ruff: noqa: RUF005 - Triton unpacks no tuples
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disable-error-code="assignment, misc"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ssmspec.kernels.fast_mma import product
from ssmspec.kernels.handed import hand_over
from ssmspec.kernels.hopper_tile import async_load

PART = gl.constexpr(8)  # records that are fetched and folded together, or not at all
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def _fetch(memory, p, first, records, FIRST: gl.constexpr, c: gl.constexpr):
    """Start copying PART records [PART, KP] from the FIRST-th on. What rows have in common is added first, so that an
    address is one of two registers and a constant."""
    L: gl.constexpr = c.lines(c.KP, memory.dtype.primitive_bitwidth, 1)
    record = FIRST + gl.arange(0, PART, layout=gl.SliceLayout(1, L))[:, None]
    k = gl.arange(0, c.KP, layout=gl.SliceLayout(0, L))[None, :]
    p = p + (first * c.K + k)
    at = gl.where(record < c.R - first, p, p + (-c.R * c.K)) + record * c.K
    async_load(memory.slice(FIRST, PART, 0), at, mask=(record < records) & (k < c.K))


@gluon.jit
def fetch_history(rec, of_key, of_decay, first, records, c: gl.constexpr):
    """Start copying the records' keys and decays -> where they will be, [HP, KP] each."""
    keys = gl.allocate_shared_memory(rec.k.dtype.element_ty, [c.HP, c.KP], PLAIN)
    decays = gl.allocate_shared_memory(gl.float32, [c.HP, c.KP], PLAIN)
    PARTS: gl.constexpr = c.HP // PART
    for part in gl.static_range(PARTS):
        if records > part * PART:
            _fetch(keys, of_key, first, records, part * PART, c)
            _fetch(decays, of_decay, first, records, part * PART, c)
    async_copy.commit_group()
    return keys, decays


@gluon.jit
def _fold_part(keys, decays, behind, records, FIRST: gl.constexpr):
    """fold_history of PART records from FIRST on -> ``behind`` with their decays."""
    ROW: gl.constexpr = behind.type.layout
    ks, ds = (), ()
    for i in gl.static_range(PART):
        ks = ks + (keys.slice(FIRST + i, 1, 0).load(ROW),)
        ds = ds + (decays.slice(FIRST + i, 1, 0).load(ROW),)
    old = ()
    for i in gl.static_range(PART):
        old = old + (ks[PART - 1 - i].to(gl.float32) * behind,)
        if FIRST + PART - 1 - i < records:
            behind = behind * ds[PART - 1 - i]
    for i in gl.static_range(PART):
        decays.slice(FIRST + i, 1, 0).store(old[PART - 1 - i])
    return behind


@gluon.jit
def fold_history(keys, decays, records, c: gl.constexpr):
    """Turn ``decays`` into raw keys with the decays behind them, zero where there is no record -> all decays [1, KP]."""
    async_copy.wait_group(0)
    PARTS: gl.constexpr = c.HP // PART
    L: gl.constexpr = c.lines(c.KP, 32, 1)
    behind = gl.full([1, c.KP], 1.0, gl.float32, layout=c.row())
    for i in gl.static_range(1, PARTS + 1):
        if records > c.HP - i * PART:
            behind = _fold_part(keys, decays, behind, records, c.HP - i * PART)
        else:
            zeros = gl.full([PART, c.KP], 0.0, gl.float32, layout=L)
            decays.slice(c.HP - i * PART, PART, 0).store(zeros)
    return behind


@gluon.jit
def see(old, probes, of_seen, c: gl.constexpr):
    """Store the products of the folded keys [HP, KP] with the probes, a tuple over tokens of [2, KP]."""
    TOKENS: gl.constexpr = c.T
    PADDED: gl.constexpr = c.TP
    beside = gl.allocate_shared_memory(gl.float32, [c.NC, c.KP], PLAIN)
    for t in gl.static_range(TOKENS):
        beside.slice(2 * t, 2, 0).store(probes[t])
    for t in gl.static_range(TOKENS, PADDED):
        beside.slice(2 * t, 2, 0).store(gl.full([2, c.KP], 0.0, gl.float32, layout=c.row()))
    M: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])
    PARTS: gl.constexpr = c.KP // 32
    seen = gl.full([c.HP, c.NC], 0.0, gl.float32, layout=M)
    for j in gl.static_range(PARTS):
        x = old.slice(j * 32, 32, 1).load(gl.DotOperandLayout(0, M, 4))
        y = beside.slice(j * 32, 32, 1).permute((1, 0)).load(gl.DotOperandLayout(1, M, 4))
        seen = seen + product(x, y)
    past = gl.arange(0, c.HP, layout=gl.SliceLayout(1, M))
    column = gl.arange(0, c.NC, layout=gl.SliceLayout(0, M))
    hand_over(of_seen + (column * c.HP)[None, :] + past[:, None], seen)


@gluon.jit
def hand_over_history(old, total, of_vectors, records, k, c: gl.constexpr):
    """What a flush needs: the folded keys, and all decays."""
    L: gl.constexpr = c.lines(c.KP, 32, 1)
    record = gl.arange(0, c.HP, layout=gl.SliceLayout(1, L))[:, None]
    channel = gl.arange(0, c.KP, layout=gl.SliceLayout(0, L))[None, :]
    of_old = of_vectors + (c.NC + record) * c.K + channel
    hand_over(of_old, old.load(L), mask=(record < records) & (channel < c.K))
    hand_over(of_vectors + (c.NC + c.HP) * c.K + k, total, mask=k < c.K)
