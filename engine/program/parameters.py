"""The weights of decoders as they are run: packed, and on their device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.engine.kernels.cpu.latents import NativeLatentMaps
from penstock.engine.kernels.cpu.linear import NativeLinear
from penstock.engine.kernels.experts import ExpertLinear
from penstock.engine.kernels.linear import Linear
from penstock.engine.kernels.recurrent import StateVectors
from penstock.engine.spec import Experts, StateMixer


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """See `Attention`; norms that it does not have are None."""

    qkv: Linear
    """hidden -> gates if it has them, queries, keys, values, one after another."""
    o: Linear
    q_norm: Tensor | None = None
    """[head_dim], or [heads * head_dim] where all heads are normed as one row."""
    k_norm: Tensor | None = None
    sinks: Tensor | None = None
    """[heads] float32, see `Attention.sinks`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentWeights:
    """See `LatentAttention`."""

    q: Linear
    """hidden, or the output of q_a, normed -> queries."""
    latent: Linear
    """hidden -> latent, rotated key."""
    up: Tensor | NativeLatentMaps
    """[heads, plain + value, latent] in the type of activations: of each head, K and V; native kernels have maps."""
    o: Linear
    latent_norm: Tensor
    """[latent]"""
    q_a: Linear | None = None
    q_norm: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StateWeights:
    """A mixer with a state: the linear maps around its kernel."""

    spec: StateMixer
    into: Linear
    """hidden -> the input of the kernel, see `recurrent`."""
    out: Linear
    gates: Linear | None = None
    """hidden -> two numbers a value head, of a gated delta net."""
    vectors: StateVectors


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """down(activation(gate) * up): the dense feed-forward part, see `Mlp`."""

    gate_up: Linear
    """hidden -> gate, up, one after the other; ups alone where there are no gates."""
    down: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsWeights:
    """Experts, of which a router chooses some for each row, and shared ones: see `Experts`."""

    spec: Experts
    router: Linear
    """hidden -> logits [experts]."""
    gate_up: ExpertLinear
    down: ExpertLinear
    choice_bias: Tensor | None = None
    """[experts] float32"""
    expert_scale: Tensor | None = None
    """[experts] float32"""
    shared: MlpWeights | None = None
    shared_gate: Linear | None = None
    """hidden -> 1"""
    router_norm: Tensor | None = None
    """[hidden]"""
    experts_norm: Tensor | None = None
    experts_out_norm: Tensor | None = None
    shared_norm: Tensor | None = None
    shared_out_norm: Tensor | None = None


@dataclass(slots=True, kw_only=True)
class LayerWeights:
    """The weights of one layer; norms that its description does not have are None."""

    mixer: AttentionWeights | LatentWeights | StateWeights | None
    feed_forward: MlpWeights | ExpertsWeights | None
    input_norm: Tensor | None = None
    """[hidden]"""
    attention_norm: Tensor | None = None
    post_norm: Tensor | None = None
    feed_forward_norm: Tensor | None = None
    per_layer_gate: Linear | None = None
    """hidden -> gates of the layer's own embedding."""
    per_layer_out: Linear | None = None
    per_layer_norm: Tensor | None = None
    """[hidden]"""
    scalar: float = 1.0
    """The output of the layer is multiplied by it."""


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
    """[vocab, hidden], or a linear map whose rows it is: see `Kernels.keeps_narrow`. A stage after the first has no
    rows."""
    layers: list[LayerWeights]
    final_norm: Tensor
    """[hidden]; empty in a stage before the last."""
    lm_head: Linear
    """Makes logits; in a stage before the last, it returns the hidden states that it is given."""
    is_tied: bool
    """Whether the rows of the output head are the embedding's; with ranks, they are not to be read from it."""
    layer_embeddings: LayerEmbeddingWeights | None = None

    @property
    def rows(self) -> Tensor | Linear:
        """The embedding; the output head if it has the same rows, and they can be read from it."""
        return self.lm_head if self.is_tied and isinstance(self.lm_head, NativeLinear) else self.embedding


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleWeights:
    """The weights of a head as it runs them."""

    layer: LayerWeights
    """Its qkv reads twice as many numbers as the head is wide."""
    hidden_norm: Tensor
    """[hidden], of the features that are read of the target."""
    fuse: Linear
    """The target's hidden states, one after another -> hidden."""
    final_norm: Tensor
    lm_head: Linear
    drafted: Tensor | None
    """int32, the tokens whose logits lm_head makes; None for all."""
    embedding: Tensor | None
    """[vocab, hidden]; None if it is the target's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionWeights:
    """See `Prediction`."""

    layer: LayerWeights
    token_norm: Tensor
    """[hidden], as the other norms."""
    features_norm: Tensor
    final_norm: Tensor
    map: Linear
    """Two rows, one after the other -> hidden."""
