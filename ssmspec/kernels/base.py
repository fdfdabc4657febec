"""The two primitives that every policy is made of, and the cursors between them, as a backend supplies them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ssmspec.geometry import Geometry
from ssmspec.layout import Ring
from ssmspec.pool import StatePool
from ssmspec.step import Commit


@dataclass(frozen=True, kw_only=True)
class LayerParams:
    """A layer's constants in the recurrence."""

    index: int
    A_log: Tensor  # [HV] fp32
    dt_bias: Tensor  # [HV], KDA [HV, K]; fp32, or as a model stores it
    D: Tensor | None = None  # [HV] fp32, Mamba2's skip


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """One layer's window inputs, as the layer has them: views into the packed conv output, and raw gates."""

    q: Tensor  # [B, T, H, K]; Mamba2: C
    k: Tensor  # [B, T, H, K]; Mamba2: B
    v: Tensor  # [B, T, HV, V]; Mamba2: x
    a: Tensor  # [B, T, HV]; KDA: the raw gate [B, T, HV, K]; Mamba2: dt
    b: Tensor | None = None  # [B, T, HV]; none for Mamba2

    @classmethod
    def unpack(cls, g: Geometry, packed: Tensor, a: Tensor, b: Tensor | None = None) -> "Tokens":
        """Views of a packed conv output [B, T, D]: q | k | v for the delta rules, x | B | C for Mamba2."""
        h, hv = g.num_k_heads, g.num_v_heads
        keys, values = h * g.head_k, hv * g.head_v
        v_at, k_at, q_at = (0, values, values + keys) if b is None else (2 * keys, keys, 0)
        lead = packed.shape[:-1]

        def part(at: int, heads: int, dim: int) -> Tensor:
            return packed[..., at : at + heads * dim].view(*lead, heads, dim)

        return cls(q=part(q_at, h, g.head_k), k=part(k_at, h, g.head_k), v=part(v_at, hv, g.head_v), a=a, b=b)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer's constants and its share of the pool, as views."""

    params: LayerParams
    state: Tensor  # [rows, HV, V, K]; rows are slots, or slots * T for native snapshots, or pages
    read: Tensor | None  # [slots, HV, V, K], the copy that outputs read
    records: dict[str, Tensor]  # name without "rec_" -> [slots, H | HV, R, ...]; empty without records
    rows: Tensor | None = None  # [slots] int64, the row of ``state`` that holds a slot's; None: its number

    @classmethod
    def of(cls, pool: StatePool, params: LayerParams, state: Tensor) -> "Layer":
        i = params.index
        records = {n.removeprefix("rec_"): t[i] for n, t in pool.tensors.items() if n.startswith("rec_")}
        return cls(
            params=params,
            state=state,
            read=pool["read"][i] if "read" in pool else None,
            records=records,
            rows=None if pool.rows is None else pool.rows[i],
        )

    @property
    def capacity(self) -> int:
        """R, the length of the record ring; 1 without records."""
        return self.records["k"].shape[2] if self.records else 1


@dataclass(frozen=True, kw_only=True)
class History:
    """Committed records that verify replays in front of the window, per slot."""

    base: Tensor  # [slots] int32, ring position of the oldest record
    count: Tensor  # [slots] int32
    limit: int  # L: a row with records and count + len > L first folds them into the checkpoint
    ends: Tensor | None = None  # [slots] int64, bit p: the record at ring position p ended an accepted step


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Where stochastic rounding draws from, per batch row."""

    seed: Tensor  # [B] int32
    position: Tensor  # [B] int32, tokens that the row's checkpoint covers


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to fold: per row, replay ``count`` records from ring position ``base`` onto ``state[src]``.

    The state after ``count`` records goes to ``dst``, on the way the state after ``mark`` to ``mark_dst``; null
    destinations are skipped. A program loads its tile before it stores, so both may alias ``src`` of the same row.
    """

    src: Tensor  # [B]
    base: Tensor  # [B]
    count: Tensor  # [B]
    dst: Tensor  # [B]
    mark: Tensor  # [B]
    mark_dst: Tensor  # [B]
    ends: Tensor | None = None  # [B] int64
    noise: Noise | None = None


class Verify(Protocol):
    def __call__(
        self,
        layer: Layer,
        x: Tokens,
        rows: Tensor,
        lens: Tensor,
        *,
        history: History | None = None,
        snapshots: Tensor | None = None,
        noise: Noise | None = None,
    ) -> Tensor:
        """Run each row's window from its state -> out [B, T, HV, V]; zero on null rows and behind ``lens``.

        With ``snapshots`` [B, T] every token's state is stored at that row of ``state`` (null: not stored); such
        layers have no ``rows`` of their own. With records, one per token is written behind the row's committed ones.
        ``history`` as in History.
        """


class Fold(Protocol):
    def __call__(self, layers: Sequence[Layer], plan: Plan) -> None:
        """Carry out the plan in every layer."""


class Advance(Protocol):
    def __call__(self, pool: StatePool, commit: Commit, ring: Ring) -> Plan:
        """Move the cursors of every row past its accepted tokens -> what is left to fold."""


@dataclass(frozen=True)
class Kernels:
    verify: Verify
    fold: Fold
    advance: Advance
