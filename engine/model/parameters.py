"""The weights of a decoder as it runs them: packed, and on its device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from engine.kernels.linear import Linear

FeedForward = Callable[[Tensor], Tensor]
"""The part of a layer after attention: [T, hidden] -> [T, hidden]."""


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """down(activation(gate) * up): the dense feed-forward part."""

    gate_up: Linear
    """hidden -> gate, up, one after the other."""
    down: Linear
    glu: Callable[[Tensor, str], Tensor]
    """gate, up -> activation(gate) * up"""
    activation: str = "silu"

    def __call__(self, x: Tensor, /) -> Tensor:
        return self.down(self.glu(self.gate_up(x), self.activation))


@dataclass(slots=True, kw_only=True)
class LayerWeights:
    """The weights of one layer; norms that its description does not have are None."""

    qkv: Linear
    """hidden -> queries, keys, values, one after another."""
    o: Linear
    feed_forward: FeedForward
    input_norm: Tensor | None = None
    """[hidden]"""
    attention_norm: Tensor | None = None
    post_norm: Tensor | None = None
    feed_forward_norm: Tensor | None = None
    q_norm: Tensor | None = None
    """[head_dim], or [heads * head_dim] where all heads are normed as one row."""
    k_norm: Tensor | None = None
    per_layer_gate: Linear | None = None
    """hidden -> gates of the layer's own embedding."""
    per_layer_out: Linear | None = None
    per_layer_norm: Tensor | None = None
    """[hidden]"""
    scalar: float = 1.0
    """What leaves the layer is multiplied by it."""


@dataclass(frozen=True, slots=True)
class LayerEmbeddingWeights:
    """See `LayerEmbeddings`."""

    table: Tensor | Linear
    """[vocab, layers * size] in the type of the checkpoint; on a CPU, it may be the memory of the mapped file, or a
    linear map whose rows it is: see `Kernels.keeps_narrow`."""
    map: Linear
    norm: Tensor
    """[size]"""


@dataclass(slots=True)
class Weights:
    embedding: Tensor | Linear
    """[vocab, hidden], or a linear map whose rows it is: see `Kernels.keeps_narrow`."""
    layers: list[LayerWeights]
    final_norm: Tensor
    lm_head: Linear
    is_tied: bool
    """The rows of the output head are those of the embedding."""
    layer_embeddings: LayerEmbeddingWeights | None = None

    @property
    def rows(self) -> Tensor | Linear:
        """The embedding; the output head if it has the same rows."""
        return self.lm_head if self.is_tied else self.embedding
