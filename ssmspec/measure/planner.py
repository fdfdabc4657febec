"""Page and block sizes as vLLM 0.33.0's hybrid KV-cache planner sets them. Paths in docstrings are of that release.

All cache groups draw pages of one size from one pool: a page holds one block of tokens of an attention layer, or the
whole state of a recurrent layer. So the recurrent state sets the size of the attention block.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import lcm

from ssmspec import layout
from ssmspec.geometry import Arch, DType, Geometry, Window
from ssmspec.layout import Layout
from ssmspec.model import Model


class CacheMode(StrEnum):
    NONE = "none"  # no prefix caching
    ALIGN = "align"  # states are kept at block boundaries; vLLM's default, since it turns prefix caching on


PREFILL_GRID = {Arch.GDN: 64, Arch.KDA: 0, Arch.MAMBA2: 1}
"""Where a prefill kernel can export states from inside a prompt, in tokens; 0: it cannot (gdn_attn.py:34, FlashInfer on
Hopper and Blackwell; mamba_mixer2.py:1117; Triton exports none, FlashKDA of Kimi-K3 and GLM every 16)."""


@dataclass(frozen=True, kw_only=True)
class Paging:
    """What the planner is told. ``tp`` ranks share the heads; all sizes are of one rank."""

    kv_dtype: DType = DType.BF16
    cache_mode: CacheMode = CacheMode.NONE
    tp: int = 1
    records_in_page: bool = False  # as vllm-project/vllm#58863 did; else they are keyed by request slot
    in_page: Layout = ()  # further entries of the page, of one rank
    block: int = 16  # tokens: the attention kernel's smallest block, and the block size asked for
    prefill_grid: int | None = None  # align only; None: the PREFILL_GRID of the recurrence

    def __post_init__(self) -> None:
        for name, least in (("tp", 1), ("block", 1), ("prefill_grid", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}={value} must be at least {least}")


@dataclass(frozen=True)
class Group:
    """The layers of one kind, dealt to ``tables`` block tables of equal width."""

    layers: int
    tables: int
    block_tokens: int | None  # that one block stands for; None: the whole context
    page: Layout = ()  # entries of one layer's page; none for KV

    @property
    def width(self) -> int:
        """Layers behind the widest block table."""
        return -(-self.layers // self.tables) if self.tables else 0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What an engine would set. Bytes are of one rank; a block is one page in each layer behind a block table."""

    beside: Layout  # what the policy keeps outside the page, by request slot
    page_bytes: int  # what the entries of the largest state page take
    padded_bytes: int  # what every page takes: an attention block, at least page_bytes
    token_bytes: int  # KV of one token in one attention layer
    alignment: int  # tokens: the attention block is a multiple of it
    recurrent: Group  # its page: conv window, state, records if they live there
    attention: Group
    ple: Group  # Qwen4Exp's conv of the n-gram embeddings, a state like another
    state_blocks: int  # of one request in one block table of states
    replicated_bytes: int  # of a layer's page and records: what all ranks hold beyond a single rank's

    @property
    def block_tokens(self) -> int:
        """Tokens of an attention block, which is also the block of prefix caching."""
        assert self.attention.block_tokens is not None
        return self.attention.block_tokens

    @property
    def padding(self) -> float:
        """Unused share of a recurrent page, as a fraction of its entries (platforms/interface.py:1129)."""
        return (self.padded_bytes - self.page_bytes) / self.page_bytes if self.page_bytes else 0.0

    @property
    def width(self) -> int:
        """Layers that one block serves: those behind the widest block table."""
        return max(g.width for g in (self.recurrent, self.attention, self.ple))

    @property
    def block_bytes(self) -> int:
        """Bytes that one block takes from the pool (v1/core/kv_cache_planning.py:574-605)."""
        return self.padded_bytes * self.width

    def blocks(self, tokens: int) -> int:
        """Blocks of a request of that many tokens (v1/core/kv_cache_utils.py:1061-1093)."""
        kv = self.attention.tables * -(-tokens // self.block_tokens)
        return kv + (self.recurrent.tables + self.ple.tables) * self.state_blocks

    def request_bytes(self, tokens: int) -> int:
        """What a request of that many tokens takes from the pool."""
        return self.blocks(tokens) * self.block_bytes

    def profiling_bytes(self, max_num_seqs: int) -> int:
        """The cache allocated while graphs are measured, one block for each sequence in reach of a graph
        (v1/worker/gpu/cudagraph_utils.py:1042-1062)."""
        return max_num_seqs * self.block_bytes

    def reusable(self, prompt: int, *, drafting: bool, match_unit: int | None = None) -> int:
        """Tokens that a resend of a prompt takes from the prefix cache: its last token is recomputed, and one unit
        more for the hidden states that an MTP or EAGLE ``drafting`` head reads (v1/kv_cache_interface.py:1169-1186).

        ``match_unit`` is vLLM's --prefix-match-unit. A prompt that shares only a beginning may find no state there:
        prefix_cache_retention_interval=0, the default, keeps a prompt's last boundary and the ends of beginnings that
        were shared before (config/cache.py:275-281).
        """
        if self.recurrent.block_tokens is None:
            return 0
        unit = self.block_tokens if match_unit is None else match_unit
        if unit < 1 or self.block_tokens % unit:
            legal = (u for u in range(1, min(unit, self.block_tokens) + 1) if self.block_tokens % u == 0)
            nearest = max(legal, default=1)
            raise ValueError(
                f"match_unit={unit} does not divide the block of {self.block_tokens} tokens;"
                f" the nearest legal value is {nearest}"
            )
        whole = prompt if drafting else prompt - 1
        return max(0, whole // unit * unit - (unit if drafting else 0))


def nbytes(fields: Layout) -> int:
    return sum(f.nbytes for f in fields)


def page_entries(g: Geometry, w: Window) -> Layout:
    """The conv window and one state: what every policy's page holds, that of the record policies too, which leave the
    stock page as it is. The conv entry is [D, W-1+K]: a window's newest input is never read again, so vLLM stores
    one fewer than this package's own window (model_executor/layers/mamba/mamba_utils.py:186-205, 272-293).
    """
    return layout.conv(g.conv, w.max_len - 1, g.act_dtype), layout.state(g)


def slot_entries(policy: str, g: Geometry, w: Window) -> Layout:
    """What a policy keeps beside the page, by request slot: records, a read copy, cursors."""
    return tuple(f for f in layout.of(policy, g, w) if f.name not in ("state", "snapshots"))


def _held(policy: str, g: Geometry, w: Window) -> int:
    beside = (f for f in slot_entries(policy, g, w) if not f.shared)
    return nbytes((*page_entries(g, w), *beside))


def _tables(*layers: int) -> list[int]:
    """Block tables of each kind of layers: the scarcest kind sets their width, or the commonest where it has less
    than half as many layers again (v1/core/kv_cache_planning.py:521-555)."""
    few, many = min(filter(None, layers), default=1), max(layers, default=1)
    width = many if many < 1.5 * few else few
    return [-(-n // width) for n in layers]


def _alignment(model: Model, paging: Paging, grid: int) -> int:
    """Tokens that the attention block is a multiple of: MLA kernels want 128, and in align mode states are exported
    on the prefill kernel's grid (platforms/interface.py:1066-1093)."""
    block = max(paging.block, 128) if model.attention.latent else paging.block
    return lcm(block, grid or 1)


def plan(policy: str, model: Model, window: Window, paging: Paging = Paging()) -> Plan:
    """Page, block and group sizes of a model under a policy.

    The attention block is the least multiple of the alignment whose KV covers the recurrent page
    (platforms/interface.py:1096-1137). A request holds 1 + nsb state blocks, in align mode 2 + nsb and one more where
    prefill exports states (v1/kv_cache_interface.py:1135-1141); nsb is K for native, 0 where one checkpoint serves the
    whole window (model_executor/layers/mamba/abstract.py:75-94). Raises ValueError where ``tp`` does not fit.
    """
    g = model.geometry.shard(paging.tp)
    drafts = window.max_len - 1
    aligned = paging.cache_mode is CacheMode.ALIGN
    wanted = PREFILL_GRID[g.arch] if paging.prefill_grid is None else paging.prefill_grid
    grid = wanted if aligned else 0
    kept = slot_entries(policy, g, window)
    inside = tuple(f for f in kept if paging.records_in_page and f.name.startswith("rec_"))
    entries = (*page_entries(g, window), *inside, *paging.in_page)
    ple = (layout.conv(model.ple, drafts, g.act_dtype, "ple"),) if model.ple else ()
    size = max(nbytes(entries) if g.num_layers else 0, nbytes(ple))
    attention = model.attention.num_layers + (model.attention.draft_layers if drafts else 0)
    token = model.attention.bytes_per_token(paging.kv_dtype, paging.tp) if attention else 0
    unit = _alignment(model, paging, grid)
    block = max(paging.block, unit * -(-size // (unit * token))) if token else paging.block
    if aligned and block < window.max_len:
        raise ValueError(
            f"the block of {block} tokens is shorter than the window of max_len={window.max_len};"
            f" the nearest legal value of block is {window.max_len}"
        )
    counts = g.num_layers, attention, model.num_ple_layers
    states = block if aligned else None
    tables = _tables(*counts)
    snapshots = drafts if policy == "native" else 0
    return Plan(
        beside=tuple(f for f in kept if f not in inside),
        page_bytes=size,
        padded_bytes=max(size, block * token),
        token_bytes=token,
        alignment=unit,
        recurrent=Group(counts[0], tables[0], states, entries),
        attention=Group(counts[1], tables[1], block),
        ple=Group(counts[2], tables[2], states, ple),
        state_blocks=1 + snapshots + (1 if aligned else 0) + (1 if grid else 0),
        replicated_bytes=paging.tp * _held(policy, g, window) - _held(policy, model.geometry, window),
    )
