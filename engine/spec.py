"""The description of a model: all that its decoder computes, and the tensors that it computes with.

A family of models is a function that makes a `ModelSpec` from the entries of a config.json. Whatever loads, plans,
splits, quantizes or runs a model reads its spec, and knows no family.

Names are those of transformers; those of a layer follow `model.layers.N.`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """A table of rotary embeddings: dimension i of a head is rotated with dimension i + head_dim / 2."""

    theta: float = 10_000.0
    scaling: str = "default"
    """The way frequencies are scaled: "default" (not at all), "linear", "llama3", "yarn", "factors", or "proportional"
    (the first `share` of all frequencies of a head; the others are 0)."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8_192
    factors: tuple[float, ...] = ()
    """What each frequency is divided by."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """A norm over the last dimension: RMSNorm, or LayerNorm without a bias."""

    name: str
    size: int
    offset: float = 0.0
    """Is added to the weights as they are stored."""
    is_centered: bool = False
    """Whether the mean is subtracted, as in LayerNorm."""


@dataclass(frozen=True, slots=True)
class HeadOrder:
    """The dimensions of a head that a checkpoint rotates in pairs.

    Loading puts them in our order, in which every pair is half a head apart: queries and keys in another order have the
    same products.
    """

    head_dim: int
    rotated: int
    """The first dimensions, so many, are rotated, and the others pass."""
    is_interleaved: bool
    """Whether dimension 2i is rotated with 2i + 1; otherwise dimension i is rotated with i + rotated / 2."""

    @property
    def is_ours(self) -> bool:
        return self.rotated == self.head_dim and not self.is_interleaved

    @property
    def dimensions(self) -> list[int]:
        """The checkpoint's dimension for each of ours."""
        first = range(0, self.rotated, 2) if self.is_interleaved else range(self.rotated // 2)
        second = range(1, self.rotated, 2) if self.is_interleaved else range(self.rotated // 2, self.rotated)
        middle = (self.rotated + self.head_dim) // 2
        return [*first, *range(self.rotated, middle), *second, *range(middle, self.head_dim)]


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a linear map that one tensor of the checkpoint has."""

    name: str
    sections: tuple[int, ...]
    """What the rows are, one kind after another; each is split among ranks by itself."""
    heads: HeadOrder | None = None
    """The order of the rows of each head, where that is another one than ours; of all sections but a third."""

    @property
    def count(self) -> int:
        return sum(self.sections)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearMap:
    """A linear map of a layer, fused of one or more of the checkpoint's."""

    rows: tuple[Rows, ...]
    in_features: int
    has_bias: bool = False
    is_gated: bool = False
    """Whether the rows are gates, then as many ups."""
    sums: bool = False
    """Among ranks, each has some of its inputs, and the outputs are summed. Otherwise each has some of its outputs."""
    stays: bool = False
    """Whether it stays in floating point where others are quantized."""


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
    shares: int | None = None
    """The layer whose keys and values it reads, in place of any of its own."""
    softcap: float = 0.0
    """c: a score s becomes c tanh(s / c) before the softmax; 0 is none."""
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    """RMSNorm of each head, or of all heads as one row if it has that size."""
    norms_values: bool = False
    """Whether values go through RMSNorm of each head, without weights."""
    norms_after_rotation: bool = False
    temperature: tuple[float, int] | None = None
    """(b, n): queries at position p are multiplied by 1 + b log(1 + p // n) after the rotation."""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """The checkpoint's maps of queries, keys and values: three, two if keys are the values, too, or one with all rows.
    Of a layer that shares others' keys and values, the first is all there is."""
    o: str = "self_attn.o_proj"
    qkv_bias: bool = False
    o_bias: bool = False
    rotated: int = 0
    """The dimensions of a head that are rotated in the checkpoint's order; 0 stands for all."""
    is_interleaved: bool = False
    """See `HeadOrder`."""

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def head_order(self) -> HeadOrder | None:
        """The checkpoint's order of a head's dimensions; None if it is ours."""
        order = HeadOrder(self.head_dim, self.rotated or self.head_dim, self.is_interleaved)
        return None if order.is_ours else order

    def maps(self) -> dict[str, LinearMap]:
        q, kv, order = self.q_size, self.kv_size, self.head_order
        query, *rest = self.qkv
        if self.shares is not None:
            rows: tuple[Rows, ...] = (Rows(query, (q,), order),)
        elif not rest:
            rows = (Rows(query, (q, kv, kv), order),)
        else:
            rows = (Rows(query, (q,), order), Rows(rest[0], (kv,), order), Rows(rest[-1], (kv,)))
        return {
            "qkv": LinearMap(rows=rows, in_features=self.hidden_size, has_bias=self.qkv_bias),
            "o": LinearMap(
                rows=(Rows(self.o, (self.hidden_size,)),), in_features=q, has_bias=self.o_bias, sums=True
            ),
        }

    def norms(self) -> dict[str, Norm]:
        return {name: norm for name in ("q_norm", "k_norm") if (norm := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlp:
    """down(activation(gate) * up): the dense feed-forward part."""

    hidden_size: int
    inner_size: int
    activation: str = "silu"
    """One of ACTIVATIONS."""
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """The checkpoint's maps of gates and ups: two, or one with the rows of both."""
    down: str = "mlp.down_proj"
    has_bias: bool = False

    def maps(self) -> dict[str, LinearMap]:
        inner = self.inner_size
        if len(self.gate_up) == 1:
            rows: tuple[Rows, ...] = (Rows(self.gate_up[0], (inner, inner)),)
        else:
            rows = tuple(Rows(name, (inner,)) for name in self.gate_up)
        return {
            "gate_up": LinearMap(
                rows=rows, in_features=self.hidden_size, has_bias=self.has_bias, is_gated=True
            ),
            "down": LinearMap(
                rows=(Rows(self.down, (self.hidden_size,)),),
                in_features=inner,
                has_bias=self.has_bias,
                sums=True,
            ),
        }


ACTIVATIONS = ("silu", "gelu_tanh")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerEmbedding:
    """norm(out(activation(gate) * embedding)): a part of a layer that reads the token's embedding for it."""

    hidden_size: int
    size: int
    norm: Norm
    activation: str = "silu"
    gate: str = "per_layer_input_gate"
    out: str = "per_layer_projection"

    def maps(self) -> dict[str, LinearMap]:
        return {
            "per_layer_gate": LinearMap(
                rows=(Rows(self.gate, (self.size,)),), in_features=self.hidden_size, stays=True
            ),
            "per_layer_out": LinearMap(
                rows=(Rows(self.out, (self.hidden_size,)),), in_features=self.size, stays=True
            ),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerEmbeddings:
    """The embeddings that a token has for each layer, side by side: (scale * own + norm(mapped)) / sqrt(2).

    What is its own is a row of a table. The embedding that all layers have in common is mapped and multiplied by
    `map_scale`, and each layer's part of that is normed.
    """

    vocab_size: int
    num_layers: int
    size: int
    """Of one layer's part."""
    scale: float
    map_scale: float
    norm: Norm
    table: str = "model.embed_tokens_per_layer"
    map: str = "model.per_layer_model_projection"

    @property
    def width(self) -> int:
        return self.num_layers * self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Attention and a feed-forward part, each of which adds to the residual stream.

    Each reads the stream, or a norm of it; what it adds may be normed, too.
    """

    attention: Attention
    feed_forward: GatedMlp
    input_norm: Norm | None = None
    attention_norm: Norm | None = None
    """Of what attention adds."""
    post_norm: Norm | None = None
    """Of what the feed-forward part reads. Without it and `input_norm`, both parts read the stream as it is."""
    feed_forward_norm: Norm | None = None
    """Of what the feed-forward part adds."""
    is_parallel: bool = False
    """Whether the feed-forward part reads what attention reads, rather than what it left."""
    residual_scale: float = 1.0
    """What either part adds is multiplied by it."""
    embedding: LayerEmbedding | None = None
    """Adds to the stream, too, after the feed-forward part."""
    scalar: str = ""
    """The name of a tensor with one number, by which the stream is multiplied in the end; "" is none."""

    def maps(self) -> dict[str, LinearMap]:
        """The linear maps by their field of `LayerWeights`, in the order in which they run."""
        of_embedding = {} if self.embedding is None else self.embedding.maps()
        return {**self.attention.maps(), **self.feed_forward.maps(), **of_embedding}

    def norms(self) -> dict[str, Norm]:
        """The norms by their field of `LayerWeights`."""
        outer = ("input_norm", "attention_norm", "post_norm", "feed_forward_norm")
        own = {name: norm for name in outer if (norm := getattr(self, name)) is not None}
        of_embedding = {} if self.embedding is None else {"per_layer_norm": self.embedding.norm}
        return {**own, **self.attention.norms(), **of_embedding}

    def with_attention(self, **changes: object) -> Layer:
        return replace(self, attention=replace(self.attention, **changes))  # type: ignore[arg-type]

    def with_feed_forward(self, **changes: object) -> Layer:
        return replace(self, feed_forward=replace(self.feed_forward, **changes))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder: an embedding, layers, a final norm, and an output head."""

    hidden_size: int
    layers: tuple[Layer, ...]
    ropes: tuple[Rope, ...] = field(default=(Rope(),))
    norm_eps: float
    final_norm: Norm
    ties_embeddings: bool = False
    embedding_scale: float = 1.0
    """Rows of the embedding are multiplied by it, once it is rounded to their type."""
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    """c: a logit x becomes c tanh(x / c), after it was scaled; 0 is none."""
    layer_embeddings: LayerEmbeddings | None = None
    """What the layers with a `LayerEmbedding` read."""

    @property
    def last_with_keys(self) -> int:
        """The last layer with keys and values of its own: after it, tokens no longer see each other's hidden states."""
        return max(number for number, layer in enumerate(self.layers) if layer.attention.shares is None)

    def norms(self) -> Iterator[tuple[str, Norm]]:
        """All norms by their full names."""
        for number, layer in enumerate(self.layers):
            yield from ((f"model.layers.{number}.{norm.name}", norm) for norm in layer.norms().values())
        if self.layer_embeddings is not None:
            yield self.layer_embeddings.norm.name, self.layer_embeddings.norm
        yield self.final_norm.name, self.final_norm
