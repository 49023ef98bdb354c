"""The weights of a decoder as it runs them: packed, and on its device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Linear(Protocol):
    """A packed linear map: [..., in] -> [..., out]."""

    def __call__(self, x: Tensor, /) -> Tensor: ...


@dataclass(slots=True)
class LayerWeights:
    input_norm: Tensor
    """[hidden]"""
    qkv: Linear
    """hidden -> queries, keys, values, one after another."""
    q_norm: Tensor | None
    """[head_dim]"""
    k_norm: Tensor | None
    o: Linear
    post_norm: Tensor
    gate_up: Linear
    """hidden -> gate, up, one after the other."""
    down: Linear


@dataclass(slots=True)
class Weights:
    embedding: Tensor
    """[vocab, hidden]"""
    layers: list[LayerWeights]
    final_norm: Tensor
    lm_head: Linear
