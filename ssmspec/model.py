"""A hybrid model as far as capacity and traffic need it: its recurrent layers, its attention, where the facts come from."""

from dataclasses import dataclass

from ssmspec.geometry import Conv, DType, Geometry


@dataclass(frozen=True, kw_only=True)
class Attention:
    """The layers that keep a KV cache. ``latent`` > 0 is MLA: that many values per token, shared by all heads."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    latent: int = 0
    draft_layers: int = 0  # attention layers of the MTP head; only with speculation

    def bytes_per_token(self, kv_dtype: DType, tp: int = 1) -> int:
        """KV bytes of one token in one layer on one rank; heads are replicated where tp exceeds them."""
        heads = max(1, self.num_kv_heads // tp)
        values = self.latent or 2 * heads * self.head_dim
        return kv_dtype.nbytes(values)


@dataclass(frozen=True, kw_only=True)
class Model:
    """What a config.json says: ``ssmspec.presets.load`` makes one of a preset's name, a Hub id or a path."""

    name: str
    geometry: Geometry
    attention: Attention
    num_layers: int  # of all kinds
    hidden_size: int
    ple: Conv | None = None  # Qwen4Exp's dilated conv of the n-gram embeddings; whole on every rank
    num_ple_layers: int = 0
    max_context: int | None = None
    weights_gib: float | None = None  # of a published checkpoint in its dtype; None: unknown
    source: str = ""
    notes: tuple[str, ...] = ()  # defaults taken, and anything a reader should know
