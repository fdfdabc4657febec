"""What a window's Hopper kernel is compiled for, and how a tile of state lies in registers.

A plain Triton kernel cannot choose how a [BV, K] tile lies: a row is spread over 16 or 32 lanes, and every sum over K is
mostly shuffles. Here a lane keeps K / LANES keys of a row, most of which are added inside the thread.
"""

from dataclasses import dataclass
from enum import IntEnum

from triton.experimental.gluon import language as gl

from ssmspec.kernels.heads import Recurrent, revision


class Order(IntEnum):
    """How plain Triton adds the products of one thread in a sum over K."""

    CHAIN = 0  # Triton 3.6: one after another; in the last rows of each 32 the first two are swapped
    TREE = 1  # Triton 3.9: pairwise


def bits(n: int) -> list[int]:
    """Powers of two below n."""
    return [1 << i for i in range((n - 1).bit_length())]


REVISION = revision(__file__)


@dataclass(frozen=True, kw_only=True)
class Shape(Recurrent):
    """What a verify kernel is compiled for."""

    R: int = 0  # ring length; 0: there are no records
    HISTORY: int = 0  # most committed records, a power of 2; 0: there is no history
    ENDS: bool = False  # round at the recorded ends of accepted steps
    SNAPSHOTS: bool = False
    CHUNK: int  # neighbouring keys of a thread: 16 bytes of state, as plain Triton has it
    ORDER: Order
    BV: int = 64
    LANES: int = 8  # over K
    WARPS: int = 4
    SHARED: int = 1  # tiles of a head that a program takes in a row, with keys and queries normed once
    REVISION: str = REVISION

    @property
    def SWAPS(self) -> bool:
        """Whether CHAIN's swapped rows are swapped: for GDN, so that the bits are vLLM's. The other recurrences have
        those of kernels/window.py, which swaps none."""
        return self.ARCH == "gdn"

    @property
    def CHUNKS(self) -> int:
        return self.K // self.CHUNK

    @property
    def SCALE(self) -> float:
        return float(self.K**-0.5)

    @property
    def BLOCKS(self) -> int:
        return self.V // self.BV

    @property
    def _rows(self) -> tuple[list[int], list[int], list[int]]:
        """The bits of a row that a thread, its lanes and its warps have.

        Rows 16 and 8 apart share a thread, so that the compiler knows of nearly every register whether its row is a
        swapped one.
        """
        rows = [r for r in (16, 8, 4, 2, 1, 32, 64) if r < self.BV]
        lanes = 5 - len(bits(self.LANES))
        held = len(bits(self.BV // self.WARPS)) - lanes
        return rows[:held], rows[held : held + lanes], rows[held + lanes :]

    @property
    def TILE(self) -> gl.DistributedLinearLayout:
        """[BV, K]: CHUNK keys and then distant ones in a thread, LANES chunks across lanes, rows over the rest."""
        held, lanes, warps = self._rows
        near = self.CHUNK * self.LANES
        registers = [[0, k] for k in bits(self.CHUNK)] + [[0, k] for k in bits(self.K)[::-1] if k >= near]
        return gl.DistributedLinearLayout(
            registers + [[r, 0] for r in held],
            [[0, k] for k in bits(self.K) if self.CHUNK <= k < near] + [[r, 0] for r in lanes],
            [[r, 0] for r in warps],
            [],
            [self.BV, self.K],
        )

    @property
    def PIECES(self) -> gl.DistributedLinearLayout:
        """[K / CHUNK, CHUNK]: a key or query in chunks, as TILE has it."""
        chunks = [k // self.CHUNK for k in bits(self.K) if k >= self.CHUNK]
        lanes, warps = bits(self.LANES), bits(self.WARPS)
        return gl.DistributedLinearLayout(
            [[0, k] for k in bits(self.CHUNK)] + [[k, 0] for k in chunks[::-1] if k >= self.LANES],
            [[k, 0] for k in lanes] + [[0, 0]] * (5 - len(lanes)),
            [[0, 0]] * len(warps),
            [],
            [self.K // self.CHUNK, self.CHUNK],
        )

    @property
    def APART(self) -> gl.SwizzledSharedLayout:
        """[chunks, CHUNK] fp32 in shared memory, such that the lanes over K of a 16-byte load meet all banks."""
        return gl.SwizzledSharedLayout(4, 4, self.CHUNK // 4, [1, 0])

    @property
    def TURNS(self) -> int:
        """Levels of a sum over K at which a thread gives away half of its rows."""
        return len(self._rows[0])

    def turned(self, i: int) -> gl.DistributedLinearLayout:
        """[BV, LANES >> i], where the i-th of the rows that TILE has in a thread has changed places with the
        farthest chunks: they are added in the thread, and each of the two lanes keeps one row."""
        held, lanes, warps = self._rows
        chunks = bits(self.LANES >> i)
        return gl.DistributedLinearLayout(
            [[0, chunks[-1]]] + [[r, 0] for r in held[i + 1 :]],
            [[0, k] for k in chunks[:-1]] + [[r, 0] for r in held[i::-1] + lanes],
            [[r, 0] for r in warps],
            [],
            [self.BV, self.LANES >> i],
        )

    def spread(self, i: int) -> gl.DistributedLinearLayout:
        """[BV] after i turns: i = TURNS is one row a lane, i = 0 as TILE has it."""
        held, lanes, warps = self._rows
        shared = [0] * (len(bits(self.LANES)) - i)
        return gl.DistributedLinearLayout(
            [[r] for r in held[i:]],
            [[r] for r in shared + held[:i][::-1] + lanes],
            [[r] for r in warps],
            [],
            [self.BV],
        )

    def lines(self, width: int, itemsize: int) -> gl.BlockedLayout:
        """[rows, width] in pieces of 16 bytes, whole rows next to each other."""
        piece = 16 // itemsize
        across = min(32, width // piece)
        return gl.BlockedLayout([1, piece], [32 // across, across], [self.WARPS, 1], [1, 0])
