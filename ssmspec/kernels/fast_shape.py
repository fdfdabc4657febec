"""What the kernels of fast mode are compiled for, and how their arguments are bundled."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl

from ssmspec.kernels.heads import Recurrent, revision


class Cursors(NamedTuple):
    """Where each batch row stands; base and count are None where a policy has no history."""

    rows: Any  # [B]
    pages: Any  # [slots], as Layer.rows
    lens: Any  # [B]
    base: Any  # [slots]
    count: Any  # [slots]
    limit: Any
    batch: Any = None  # how many rows; for fast_rows.place_row


class Couplings(NamedTuple):
    """What the coupling kernels hand to the window kernel."""

    heads: Any  # [B, HV, COEFFICIENTS] fp32
    seen: Any  # [B, H (HV for decays per channel), NC, HP] fp32
    vectors: Any  # [B, HV, VECTORS, K] fp32, for decays per channel
    cursors: Any  # [B, 2] int64, a row's numbers in one and the row, in the order of fast_rows.place_row


class Gates(NamedTuple):
    """What the window kernel norms and gates its outputs with."""

    z: Any  # [B, T, HV, V], neighbours along V
    step: Any  # of z over (batch, token, head)
    weight: Any  # [V]


@dataclass(frozen=True, kw_only=True)
class Shape(Recurrent):
    """A geometry, the padded sizes of a window and its history, and a tile.

    Every token has probes, the vectors that the state is multiplied with: k and q for the delta rules, side by
    side, and q alone for Mamba2.
    """

    SOFTPLUS: bool
    BOUND: float | None
    R: int
    TP: int  # tokens, padded
    HP: int  # most committed records, padded; 0: there is no history
    BV: int  # rows of V in a tile
    HEADS: int  # value heads of a coupling program
    REVISION: str = revision(__file__)  # of the properties below, which Triton's cache on disk does not see
    TUNED: bool = False  # whether the Gluon kernels serve
    GATE: str | None = None  # of normed outputs, as norm.Gate has it; None: outputs are stored as they are
    EPS: float = 0.0  # of their norm

    @property
    def PROBES(self) -> int:
        """Per token."""
        return 1 if self.MAMBA else 2

    @property
    def NC(self) -> int:
        """Probes of a window: the columns."""
        return self.PROBES * self.TP

    @property
    def KP(self) -> int:
        return 1 << (self.K - 1).bit_length()

    @property
    def SHARED(self) -> int:
        """Value heads that see their records alike."""
        return 1 if self.CHANNELS else self.GROUP

    @property
    def BLOCKS(self) -> int:
        return -(-self.V // self.BV)

    @property
    def QUERY(self) -> float:
        """What a delta rule's normed query is multiplied with."""
        return float(self.K**-0.5)

    # one value head's coefficients, in this order: solve [NC, TP], scale [NC], fold [HP], total
    @property
    def SCALE(self) -> int:
        return self.NC * self.TP

    @property
    def FOLD(self) -> int:
        return self.SCALE + self.NC

    @property
    def TOTAL(self) -> int:
        return self.FOLD + self.HP

    @property
    def COEFFICIENTS(self) -> int:
        """Numbers per value head, in whole 16 bytes. The total is there four times: the window kernel would wait for a
        scalar as soon as its load is under way."""
        return self.TOTAL + 4

    # one value head's vectors, where decays are per channel: probes [NC], keys to fold [HP], total
    @property
    def VECTORS(self) -> int:
        return self.NC + self.HP + 1

    def shared(self, state: int, probe: int) -> int:
        """Bytes of shared memory that the Gluon kernel takes at most, of so many per element of state and probe."""
        past = max(self.HP, 16)
        tile = self.BV * (self.KP * state + past * 4)
        return 2 * (tile + (self.NC + past) * self.KP * probe) + self.BV * self.NC * 4

    # layouts of the Gluon kernel
    def lines(self, width: int, bits: int, warps: int) -> gl.BlockedLayout:
        """[rows, width] in pieces of 16 bytes."""
        piece = 128 // bits
        across = min(32, width // piece)
        return gl.BlockedLayout([1, piece], [32 // across, across], [warps, 1], [1, 0])

    def wide(self, state: object, probe: object) -> bool:
        """Whether state and probes meet as they are, in 16 bits."""
        return state == probe and state != gl.float32

    def swizzled(self, state: object, probe: object) -> gl.SwizzledSharedLayout:
        """[rows, KP] so that eight rows of a fragment lie in different banks; 16-bit ones are loaded as matrices."""
        piece = 8 if self.wide(state, probe) else 16
        return gl.SwizzledSharedLayout(piece, 1, min(8, self.KP // piece), [1, 0])

    def row(self) -> gl.BlockedLayout:
        """[rows, KP] of one warp, a lane with neighbouring channels of every row."""
        return gl.BlockedLayout([1, self.KP // 32], [1, 32], [1, 1], [1, 0])

    def line(self) -> gl.BlockedLayout:
        """[many] of one warp."""
        return gl.BlockedLayout([1], [32], [1], [0])

    def columns(self, warps: int) -> gl.BlockedLayout:
        """[BV, tokens], four neighbours of V in a thread."""
        return gl.BlockedLayout([4, 1], [self.BV // 4, 128 // self.BV], [1, warps], [0, 1])

    def pairs(self, warps: int) -> gl.BlockedLayout:
        """Two of ``columns``, [BV, tokens, 2]."""
        return gl.BlockedLayout([4, 1, 2], [self.BV // 4, 128 // self.BV, 1], [1, warps, 1], [2, 0, 1])

    def tokens(self) -> gl.DistributedLinearLayout:
        """[BV, TP] as the even columns of an [BV, 2 TP] accumulator lie in registers."""
        t = [1 << i for i in range((self.TP - 1).bit_length())]
        v = [1 << i for i in range((self.BV - 1).bit_length())]
        return gl.DistributedLinearLayout(
            [[0, i] for i in t[2:]] + [[8, 0]],
            [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
            [[i, 0] for i in v[4:]],
            [],
            [self.BV, self.TP],
        )
