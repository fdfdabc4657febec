"""How many requests of a hybrid model fit on a GPU under a policy, and which limit binds."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from enum import StrEnum

from ssmspec.geometry import Window
from ssmspec.measure import planner
from ssmspec.measure.planner import Paging, Plan, nbytes
from ssmspec.model import Model

GIB = 2**30


class Limit(StrEnum):
    MEMORY = "memory"
    MAX_NUM_SEQS = "max_num_seqs"
    STATE_BLOCKS = "state blocks"  # FULL graphs: a block for each sequence, or the engine does not start


class DoesNotFit(ValueError):
    """The weights alone take more than the memory that may be used."""


@dataclass(frozen=True, kw_only=True)
class Settings(Paging):
    """The GPU and the load, per rank. ``overhead_gib`` is activations, graphs and a drafter's weights."""

    gpu_memory_gib: float
    gpu_utilization: float = 0.9
    weights_gib: float | None = None  # of the whole checkpoint; None: the model's own figure
    context: int = 4096  # tokens of a request, prompt and answer
    max_num_seqs: int | None = None  # None: as many as memory holds
    overhead_gib: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.gpu_utilization <= 1:
            nearest = "the nearest legal value is 1" if self.gpu_utilization > 1 else "0 is not legal either"
            raise ValueError(f"gpu_utilization={self.gpu_utilization} is not within 0..1; {nearest}")
        for name, least in (("gpu_memory_gib", 0), ("weights_gib", 0), ("overhead_gib", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}={value} must not be negative; the nearest legal value is {least}")
        for name in ("context", "max_num_seqs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be positive; the nearest legal value is 1")


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Bytes of one request in all layers of one rank, by what they are for."""

    checkpoint: int  # the state that is kept, and its low-precision read copy
    snapshots: int  # further states: native's one per draft, align mode's at the last boundary
    records: int
    conv: int
    cursors: int
    kv: int
    padding: int  # pages larger than their entries, unused tokens of the last KV block, uneven block tables

    @property
    def recurrent_state(self) -> int:
        return self.checkpoint + self.snapshots

    @property
    def total(self) -> int:
        return sum(getattr(self, p.name) for p in fields(self))


@dataclass(frozen=True, kw_only=True)
class CapacityResult:
    """What a GPU holds under a policy. Bytes are of one rank."""

    policy: str
    plan: Plan
    settings: Settings
    parts: Parts
    budget: int  # for caches and records: memory in use less weights and overhead
    slot_bytes: int  # records, read copies and cursors of one request slot, outside the pages
    slots: int  # that are allocated: max_num_seqs, whatever the load
    num_blocks: int
    requests: int  # that fit, each at the full context
    limit: Limit
    largest_max_num_seqs: int  # that FULL graphs allow (config/compilation.py:1516-1532 of vLLM 0.33.0)
    notes: tuple[str, ...]

    @property
    def blocks_per_request(self) -> int:
        return self.plan.blocks(self.settings.context)

    @property
    def concurrency(self) -> float:
        """What vLLM prints as its maximum concurrency: a fraction, and the null block counted as usable."""
        return self.num_blocks / self.blocks_per_request

    def explain(self) -> str:
        """The formula with its numbers, a line for each step."""
        p, s = self.plan, self.settings
        largest = max(p.recurrent.page, p.ple.page, key=nbytes)
        entries = " + ".join(f"{f.name} {list(f.shape)} {f.dtype} {f.nbytes:,}" for f in largest)
        states = p.recurrent.tables + p.ple.tables
        lines = [
            f"page    = {entries} = {p.page_bytes:,} B",
            f"block   = {p.alignment} tokens x ceil({p.page_bytes:,} / ({p.alignment} x {p.token_bytes:,} B of KV))"
            f" = {p.block_tokens:,} tokens = {p.padded_bytes:,} B a page ({p.padding:.2%} padding)",
            f"pool    = {s.gpu_utilization:g} x {s.gpu_memory_gib:,.2f} GiB - weights and overhead = {self.budget:,} B,"
            f" less {self.slots:,} slots x {self.slot_bytes:,} B of records and cursors"
            f" = {self.budget - self.slots * self.slot_bytes:,} B",
            f"blocks  = pool / ({p.width} layers x {p.padded_bytes:,} B) = {self.num_blocks:,}",
            f"request = {p.attention.tables} x ceil({s.context:,} / {p.block_tokens:,}) KV + {states} x"
            f" {p.state_blocks} state = {self.blocks_per_request} blocks",
            f"fit     = ({self.num_blocks:,} - 1 null block) / {self.blocks_per_request} -> {self.requests:,}"
            f" requests ({self.limit} binds; vLLM prints {self.concurrency:.2f}x)",
        ]
        return "\n".join((*lines, *self.notes))


@dataclass(frozen=True, kw_only=True)
class Reuse:
    """Tokens that a resend of a prompt takes from the prefix cache, and what kept it from more."""

    tokens: int
    lost_to_drafting: int  # the unit that an MTP or EAGLE head makes the engine recompute
    lost_to_page: int  # the block grown by drafts and records; negative where it ends nearer the prompt's end


def _parts(p: Plan, context: int) -> Parts:
    """What the entries take; what a request's blocks hold beyond them is padding, dead in-page records included."""
    layers, copies = p.recurrent.layers, p.state_blocks
    conv, state, *inside = p.recurrent.page
    convs = copies * (layers * conv.nbytes + p.ple.layers * nbytes(p.ple.page))
    read = [f for f in p.beside if f.name == "read"]
    cursors = [f for f in p.beside if f.shared]
    records = [*inside, *(f for f in p.beside if f not in (*read, *cursors))]
    kv = p.token_bytes * context * p.attention.layers
    used = convs + layers * (copies * state.nbytes + nbytes(tuple(inside))) + kv
    return Parts(
        checkpoint=layers * (state.nbytes + nbytes(tuple(read))),
        snapshots=layers * (copies - 1) * state.nbytes,
        records=layers * nbytes(tuple(records)),
        conv=convs,
        cursors=nbytes(tuple(cursors)),
        kv=kv,
        padding=p.request_bytes(context) - used,
    )


def _legal_tps(model: Model) -> Iterator[int]:
    """Ranks that can share the heads, few first."""
    for tp in range(1, model.geometry.num_v_heads + 1):
        with suppress(ValueError):
            model.geometry.shard(tp)
            yield tp


def weights_of(model: Model, s: Settings) -> float | None:
    """GiB of all ranks; None: unknown."""
    return model.weights_gib if s.weights_gib is None else s.weights_gib


def _budget(model: Model, s: Settings) -> tuple[int, tuple[str, ...]]:
    """Bytes left on a rank for caches and records. Raises DoesNotFit."""
    weights = weights_of(model, s)
    unknown = (
        (f"weights of {model.name} unknown, counted as 0: pass --weights-gib",) if weights is None else ()
    )
    usable = s.gpu_memory_gib * s.gpu_utilization

    def rank(tp: int) -> float:
        return (weights or 0.0) / tp + s.overhead_gib

    taken = rank(s.tp)
    if taken >= usable:
        ranks = next((tp for tp in _legal_tps(model) if tp > s.tp and rank(tp) < usable), None)
        more = f"; or it needs tp={ranks} or more (the smallest legal)" if ranks else ""
        raise DoesNotFit(
            f"gpu_memory_gib={s.gpu_memory_gib:g} x gpu_utilization={s.gpu_utilization:g} = {usable:.2f} GiB does not"
            f" hold {taken:.2f} GiB of weights and overhead (tp={s.tp}); the nearest legal value of gpu_memory_gib is"
            f" above {taken / s.gpu_utilization:.2f}{more}"
        )
    return int((usable - taken) * GIB), unknown


def of(policy: str, model: Model, window: Window, settings: Settings) -> CapacityResult:
    """Requests that fit, each at the full context, and the limit that binds.

    Records and cursors outside the page are allocated for ``max_num_seqs`` requests whatever the load, before the pool
    of blocks is sized (as vLLM's own KDARecoverSSMRecords are). Raises DoesNotFit for memory below the weights,
    ValueError for a context beyond the model's, and for more slots than memory holds.
    """
    s = settings
    if model.max_context is not None and s.context > model.max_context:
        raise ValueError(
            f"context={s.context} exceeds the max_context={model.max_context} of {model.name};"
            f" the nearest legal value is {model.max_context}"
        )
    p = planner.plan(policy, model, window, s)
    budget, notes = _budget(model, s)
    slot = sum(f.nbytes if f.shared else p.recurrent.layers * f.nbytes for f in p.beside)
    fit = max(0, (budget - p.block_bytes) // (p.request_bytes(s.context) + slot))
    largest = budget // (p.block_bytes + slot)
    slots = fit if s.max_num_seqs is None else s.max_num_seqs
    num_blocks = (budget - slots * slot) // p.block_bytes
    if num_blocks < 0:
        raise ValueError(
            f"max_num_seqs={slots} reserves {slots * slot / GIB:.2f} GiB of records, more than the"
            f" {budget / GIB:.2f} GiB beside the weights; the nearest legal value is {largest}"
        )
    held = max(0, (num_blocks - 1) // p.blocks(s.context))
    limit = Limit.MEMORY if s.max_num_seqs is None or held < slots else Limit.MAX_NUM_SEQS
    if slots > num_blocks:
        limit = Limit.STATE_BLOCKS
        notes += (
            f"FULL graphs do not start: max_num_seqs={slots} exceeds {num_blocks} blocks; at most {largest}",
        )
    return CapacityResult(
        policy=policy,
        plan=p,
        settings=s,
        parts=_parts(p, s.context),
        budget=budget,
        slot_bytes=slot,
        slots=slots,
        num_blocks=num_blocks,
        requests=min(held, slots),
        limit=limit,
        largest_max_num_seqs=largest,
        notes=notes,
    )


def reuse(
    policy: str, model: Model, window: Window, paging: Paging, prompt: int, drafting: bool = True
) -> Reuse:
    """What a resend of ``prompt`` tokens reuses, against the same model without drafts and without records."""
    bare = replace(paging, records_in_page=False, in_page=())
    small = planner.plan("native", model, Window(max_len=1), bare).reusable(prompt, drafting=False)
    p = planner.plan(policy, model, window, paging)
    grown = p.reusable(prompt, drafting=False)
    tokens = p.reusable(prompt, drafting=drafting and window.max_len > 1)
    return Reuse(tokens=tokens, lost_to_drafting=grown - tokens, lost_to_page=small - grown)
