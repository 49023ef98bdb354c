"""The arithmetic of a token, from a model's description."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.engine.config import ModelConfig
from penstock.engine.spec import Experts, Layer


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Multiply-adds of the linear operators, as floating point operations (two each)."""

    body: int
    """A token through all layers."""
    head: int
    """A token's logits, computed only where one is sampled."""
    vocabulary: int
    kv: int
    """Numbers that a token leaves in the KV cache."""

    def total(self, num_prompt_tokens: int, num_output_tokens: int) -> int:
        """Counts requests with so many tokens in all; that nothing follows the last token of each is ignored."""
        return self.body * (num_prompt_tokens + num_output_tokens) + self.head * num_output_tokens

    @property
    def per_output_token(self) -> int:
        return self.body + self.head


def arithmetic_of(config: ModelConfig) -> Arithmetic:
    """Returns a model's arithmetic: experts count as often as a token chooses one, states by their linear maps only."""
    caching = (attention for attention in config.attentions if attention.shares is None)
    return Arithmetic(
        body=2 * sum(map(num_multiplied, config.layers)),
        head=2 * config.hidden_size * config.vocab_size,
        vocabulary=config.vocab_size,
        kv=sum(2 * attention.kv_size for attention in caching),
    )


def num_weights(config: ModelConfig) -> int:
    """The numbers of all linear maps, of the embedding and of the output head."""
    tables = 1 if config.spec.ties_embeddings else 2
    layers = sum(num_multiplied(layer, every_expert=True) for layer in config.layers)
    return layers + tables * config.hidden_size * config.vocab_size


def num_multiplied(layer: Layer, *, every_expert: bool = False) -> int:
    """The numbers of a layer's linear maps that a token is multiplied with."""
    part = layer.feed_forward
    if isinstance(part, Experts) and not every_expert:
        layer = layer.with_feed_forward(num_own=part.router.top_k)
    return sum(rows.count * own.in_features for own in layer.maps().values() for rows in own.rows)
