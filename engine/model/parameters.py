"""The weights of a decoder as it runs them: packed, and on its device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from penstock.engine.kernels.beside import beside
from penstock.engine.kernels.experts import ExpertLinear
from penstock.engine.kernels.linear import Linear
from penstock.engine.kernels.ops import Kernels
from penstock.engine.kernels.recurrent import StateVectors
from penstock.engine.spec import Experts, StateMixer

FeedForward = Callable[[Tensor], Tensor]
"""The part of a layer after its mixer: [T, hidden] -> [T, hidden]."""


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
    """down(activation(gate) * up): the dense feed-forward part."""

    gate_up: Linear
    """hidden -> gate, up, one after the other; ups alone where there are no gates."""
    down: Linear
    glu: Callable[[Tensor, str], Tensor]
    """gate, up -> activation(gate) * up; or activation(up)."""
    activation: str = "silu"

    def __call__(self, x: Tensor, /) -> Tensor:
        return self.down(self.glu(self.gate_up(x), self.activation))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsWeights:
    """Experts, of which a router chooses some for each row, and shared ones: see `Experts`."""

    spec: Experts
    kernels: Kernels
    eps: float
    """Of its norms."""
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

    def __call__(self, x: Tensor, /) -> Tensor:
        """[T, hidden] -> [T, hidden], with one reduction among ranks."""
        if self.shared is None:
            return self._normed(self._summed(self.routed(x)), self.experts_out_norm)
        made, (shared, gate) = beside(
            x.device, partial(self.routed, x), partial(self._shared, self.shared, x)
        )
        if self.experts_out_norm is None and self.shared_out_norm is None:
            return self._summed(made + _gated(shared, gate))
        made, shared = self._summed(torch.stack((made, shared)))
        shared = _gated(self._normed(shared, self.shared_out_norm), gate)
        return self._normed(made, self.experts_out_norm) + shared

    def routed(self, x: Tensor) -> Tensor:
        """The weighted sum of the experts of each row, as far as this rank has them."""
        router, kernels = self.spec.router, self.kernels
        logits = self.router(self._normed(x, self.router_norm))
        ids, weights = kernels.route(logits, router, self.choice_bias, self.expert_scale)
        return kernels.run_experts(
            self._normed(x, self.experts_norm),
            ids - self.spec.first if self.spec.first else ids,
            weights,
            self.gate_up,
            self.down,
            self.spec.activation,
            weighs_inputs=router.weighs_inputs,
        )

    def _shared(self, shared: MlpWeights, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the output of shared experts, and the gate [T, 1] that multiplies it once it is normed."""
        made = shared(self._normed(x, self.shared_norm))
        return made, None if self.shared_gate is None else self.shared_gate(x).sigmoid()

    def _summed(self, x: Tensor) -> Tensor:
        return x if self.kernels.ranks is None else self.kernels.ranks.sum(x)

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else self.kernels.rms_norm(x, weight, self.eps)


def _gated(x: Tensor, gate: Tensor | None) -> Tensor:
    return x if gate is None else x * gate


@dataclass(slots=True, kw_only=True)
class LayerWeights:
    """The weights of one layer; norms that its description does not have are None."""

    mixer: AttentionWeights | StateWeights | None
    feed_forward: FeedForward | None
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
    """[vocab, hidden], or a linear map whose rows it is: see `Kernels.keeps_narrow`."""
    layers: list[LayerWeights]
    final_norm: Tensor
    lm_head: Linear
    is_tied: bool
    """Whether the rows of the output head are the embedding's."""
    layer_embeddings: LayerEmbeddingWeights | None = None

    @property
    def rows(self) -> Tensor | Linear:
        """The embedding; the output head if it has the same rows."""
        return self.lm_head if self.is_tied else self.embedding
