"""A model, its layers, and the embeddings that layers may have of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from penstock.engine.spec.attention import Attention, Rope
from penstock.engine.spec.experts import Experts
from penstock.engine.spec.feed_forward import Mlp
from penstock.engine.spec.latent import LatentAttention
from penstock.engine.spec.maps import LinearMap, Norm, Rows, Vector
from penstock.engine.spec.state_mixers import StateMixer

Mixer = Attention | LatentAttention | StateMixer
"""The part of a layer in which tokens see earlier ones."""


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

    A layer's own embedding is a row of a table. The embedding that all layers have in common is mapped and multiplied
    by `map_scale`, and each layer's part of the product is normed.
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
    """A mixer and a feed-forward part, or one of them, each of which adds to the residual stream.

    Each reads the stream, or a norm of it; its output may be normed, too.
    """

    mixer: Mixer | None
    feed_forward: Mlp | Experts | None
    input_norm: Norm | None = None
    """The norm of the mixer's input."""
    attention_norm: Norm | None = None
    """The norm of the mixer's output."""
    post_norm: Norm | None = None
    """The norm of the feed-forward part's input. Without it and `input_norm`, both parts read the stream as it is."""
    feed_forward_norm: Norm | None = None
    """The norm of the feed-forward part's output."""
    is_parallel: bool = False
    """Whether the feed-forward part reads the input of the mixer, rather than the stream after it."""
    residual_scale: float = 1.0
    """Either part's output is multiplied by it."""
    embedding: LayerEmbedding | None = None
    """Adds to the stream, too, after the feed-forward part."""
    scalar: str = ""
    """The name of a tensor with one number, by which the stream is multiplied in the end; "" is none."""

    @property
    def attention(self) -> Attention | LatentAttention | None:
        """The mixer if it has keys and values, or latents; None if there is none, or one with a state."""
        return self.mixer if isinstance(self.mixer, Attention | LatentAttention) else None

    @property
    def state(self) -> StateMixer | None:
        """The mixer if it has a state; None if there is none, or attention."""
        return None if isinstance(self.mixer, Attention | LatentAttention) else self.mixer

    @property
    def parts(self) -> list[Mixer | Mlp | Experts]:
        """The mixer and the feed-forward part, in the order in which they run, as far as there are both."""
        return [part for part in (self.mixer, self.feed_forward) if part is not None]

    def maps(self) -> dict[str, LinearMap]:
        """The linear maps by their field of its weights, in the order in which they run."""
        own = {field: map for part in self.parts for field, map in part.maps().items()}
        return own if self.embedding is None else own | self.embedding.maps()

    def norms(self) -> dict[str, Norm]:
        """The norms by their field of its weights."""
        inner = {field: norm for part in self.parts for field, norm in part.norms().items()}
        of_embedding = {} if self.embedding is None else {"per_layer_norm": self.embedding.norm}
        return {**self.outer_norms(), **inner, **of_embedding}

    def outer_norms(self) -> dict[str, Norm]:
        """Returns the norms of the inputs and outputs of its parts, which are no part's own."""
        outer = ("input_norm", "attention_norm", "post_norm", "feed_forward_norm")
        return {name: norm for name in outer if (norm := getattr(self, name)) is not None}

    def vectors(self) -> dict[str, Vector]:
        """The vectors by their field of the weights of its parts."""
        return {field: vector for part in self.parts for field, vector in part.vectors().items()}

    def with_attention(self, **changes: object) -> Layer:
        """The layer with changes to its attention; itself if it has none."""
        if self.attention is None:
            return self
        return replace(self, mixer=replace(self.attention, **changes))  # type: ignore[arg-type]

    def with_feed_forward(self, **changes: object) -> Layer:
        """The layer with changes to its feed-forward part; itself if it has none."""
        if self.feed_forward is None:
            return self
        return replace(self, feed_forward=replace(self.feed_forward, **changes))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Multi-token prediction: a layer that drafts for its model, whose embedding and output head it shares.

    It reads map([token_norm(embedding of a token), features_norm(features of the token before)]), and its final norm is
    of its output. Features are the model's hidden state after the model's own final norm.

    Gloeckle et al., "Better & faster large language models via multi-token prediction", 2024; DeepSeek-AI, "DeepSeek-V3
    technical report", 2024, chain it so.
    """

    layer: Layer
    token_norm: Norm
    features_norm: Norm
    final_norm: Norm
    map: str
    """The full name, as in the norms. The map has no bias."""
    prefix: str
    """The prefix of the names in its layer."""
    follows_norm: bool = True
    """Whether a chain goes on from its hidden state after the final norm, and not before it."""
    is_told: bool = True
    """Whether the config says that there is one; otherwise the tensors do, if there are any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What a stage, which has some consecutive layers of a model, has to know of the whole."""

    number: int
    """The first stage, 0, has the embedding."""
    count: int
    """The stages of the model, the last of which has the final norm and the output head."""
    first_layer: int
    """The number in the model of the stage's first layer; the stage's own numbers begin with 0."""
    windows: tuple[int, ...]
    """The windows of the model's block tables, which a sequence has on all stages: see `KVLayout.windows`."""
    context_window: int
    """See `ModelConfig.context_window`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder: an embedding, layers, a final norm, and an output head; or a stage of one."""

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
    """The embeddings that the layers with a `LayerEmbedding` read."""
    prediction: Prediction | None = None
    stage: Stage | None = None
    """The stage that the layers are, if they are not a whole model."""

    @property
    def has_embedding(self) -> bool:
        """Whether it begins with token ids, and not with the hidden states of another stage."""
        return self.stage is None or self.stage.number == 0

    @property
    def has_head(self) -> bool:
        """Whether it ends with the final norm and the output head, and not with hidden states for another stage."""
        return self.stage is None or self.stage.number == self.stage.count - 1

    @property
    def first_layer(self) -> int:
        """The number of its first layer in the whole model."""
        return 0 if self.stage is None else self.stage.first_layer

    @property
    def attentions(self) -> dict[int, Attention | LatentAttention]:
        """The layers with attention by their numbers."""
        found = ((number, layer.attention) for number, layer in enumerate(self.layers))
        return {number: attention for number, attention in found if attention is not None}

    @property
    def states(self) -> dict[int, StateMixer]:
        """The layers with a state by their numbers."""
        found = ((number, layer.state) for number, layer in enumerate(self.layers))
        return {number: state for number, state in found if state is not None}

    @property
    def last_with_keys(self) -> int:
        """The last layer with a state, or with keys and values of its own: after it, tokens no longer see each other's
        hidden states."""
        keeping = (number for number, own in self.attentions.items() if own.shares is None)
        return max([*keeping, *self.states], default=-1)

    @property
    def chosen_share(self) -> float:
        """The share of a layer's experts that each token chooses, on average of the layers with experts; 0 without."""
        parts = (layer.feed_forward for layer in self.layers)
        routers = [part.router for part in parts if isinstance(part, Experts)]
        return sum(router.top_k / router.num_experts for router in routers) / max(1, len(routers))

    def norms(self) -> Iterator[tuple[str, Norm]]:
        """All norms by their full names."""
        for number, layer in enumerate(self.layers):
            yield from ((f"model.layers.{number}.{norm.name}", norm) for norm in layer.norms().values())
        if self.layer_embeddings is not None:
            yield self.layer_embeddings.norm.name, self.layer_embeddings.norm
        if self.has_head:
            yield self.final_norm.name, self.final_norm
