"""Attention, and the tables of its rotary embeddings."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.engine.spec.maps import Groups, HeadOrder, LinearMap, Norm, Rows, Vector


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """A table of rotary embeddings: dimension i of a head is rotated with dimension i + head_dim / 2."""

    theta: float = 10_000.0
    scaling: str = "default"
    """The way frequencies are scaled: "default" (not at all), "linear", "dynamic", "llama3", "yarn", "factors", or
    "proportional" (the first `share` of all frequencies of a head; the others are 0)."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8_192
    factors: tuple[float, ...] = ()
    """The divisor of each frequency."""
    short_factors: tuple[float, ...] = ()
    """The factors where no sequence is longer than `original_max_position`; empty if they are the same."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether yarn's range of frequencies is widened to whole ones."""
    magnitude: float = 1.0
    """Cosines and sines are multiplied by it."""
    share: float = 1.0
    """The part of a head's dimensions that is rotated; the others have angles of 0."""

    @property
    def longest(self) -> int:
        """The positions that the scaling makes of the original ones; 0 if it has no word in that."""
        makes_longer = self.scaling in ("linear", "dynamic", "yarn")
        return int(self.original_max_position * self.factor) if makes_longer else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Causal attention of grouped queries over a paged cache."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Scores are multiplied by it."""
    rope: int | None = 0
    """The number of its table among `ModelSpec.ropes`; None where positions are not rotated."""
    window: int = 0
    """A token sees itself and at most window - 1 tokens before it; 0 has no bound."""
    is_chunked: bool = False
    """Whether it sees the tokens before it in its own chunk instead: positions are cut into chunks of `window`."""
    shares: int | None = None
    """The layer whose keys and values it reads, in place of any of its own."""
    softcap: float = 0.0
    """c: a score s becomes c tanh(s / c) before the softmax; 0 is none."""
    sinks: str = ""
    """The name of a tensor [heads]: the softmax of a head has one more score, which is this number, and no value;
    "" is none."""
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    """RMSNorm of each head, or of all heads as one row if it has that size."""
    norms_values: bool = False
    """Whether values go through RMSNorm of each head, without weights."""
    norms_after_rotation: bool = False
    temperature: tuple[float, int, int] | None = None
    """(b, n, o): queries at position p are multiplied by 1 + b log(1 + (p + o) // n) after the rotation and norms."""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """The checkpoint's maps of queries, keys and values: three, two if keys are the values, too, or one with all rows.
    Of a layer that shares others' keys and values, the first is all there is."""
    is_grouped: bool = False
    """Whether one map has, for each key-value head, the rows of its queries, of its key and of its value."""
    o: str = "self_attn.o_proj"
    qkv_bias: bool = False
    o_bias: bool = False
    rotated: int = 0
    """The dimensions of a head that are rotated in the checkpoint's order; 0 stands for all."""
    is_interleaved: bool = False
    """See `HeadOrder`."""
    has_gate: bool = False
    """Whether a head's output is multiplied by the sigmoid of its gates, whose rows follow its queries' in the
    checkpoint, and are the first of the fused map."""

    @property
    def reach(self) -> int:
        """The window as kernels take it; a chunk's is negative."""
        return -self.window if self.is_chunked else self.window

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def rotary_size(self) -> int:
        """The numbers of a head that have an angle, if only one of 0."""
        return self.head_dim

    @property
    def gate_size(self) -> int:
        """The numbers of a row that come before its queries."""
        return self.q_size if self.has_gate else 0

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def head_order(self) -> HeadOrder | None:
        """The checkpoint's order of a head's dimensions; None if it is ours."""
        return self._order.unless_ours

    @property
    def _order(self) -> HeadOrder:
        return HeadOrder(self.head_dim, self.rotated or self.head_dim, self.is_interleaved)

    def maps(self) -> dict[str, LinearMap]:
        q, kv, order = self.q_size, self.kv_size, self.head_order
        query, *rest = self.qkv
        queries = Rows(query, (q,), order)
        if self.has_gate:
            queries = Rows(query, (2 * q,), replace(self._order, has_gates=True))
        if self.shares is not None:
            rows: tuple[Rows, ...] = (queries,)
        elif self.is_grouped:
            each = (q // self.num_kv_heads, self.head_dim, self.head_dim)
            rows = (Rows(query, (q + 2 * kv,), groups=Groups(self.num_kv_heads, each)),)
        elif not rest:
            rows = (Rows(query, (q, kv, kv), order),)
        else:
            rows = (queries, Rows(rest[0], (kv,), order), Rows(rest[-1], (kv,)))
        return {
            "qkv": LinearMap(rows=rows, in_features=self.hidden_size, has_bias=self.qkv_bias),
            "o": LinearMap(
                rows=(Rows(self.o, (self.hidden_size,)),), in_features=q, has_bias=self.o_bias, sums=True
            ),
        }

    def vectors(self) -> dict[str, Vector]:
        return {"sinks": Vector(self.sinks, self.num_heads)} if self.sinks else {}

    def norms(self) -> dict[str, Norm]:
        return {name: norm for name in ("q_norm", "k_norm") if (norm := getattr(self, name)) is not None}
