"""Layers with a state of random weights, and the dense model beside them: what both benches of states are made of."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from penstock.engine.config import ModelConfig
from penstock.engine.kernels.linear import Linear
from penstock.engine.kernels.ops import Kernels
from penstock.engine.kernels.recurrent import StateVectors
from penstock.engine.program.parameters import AttentionWeights, LayerWeights, MlpWeights, StateWeights
from penstock.engine.quant.formats import DENSE
from penstock.engine.spec import Attention, GatedDelta, LatentAttention, Layer, LinearMap, StateMixer

QWEN_08B: dict[str, object] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 1024,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 16_384,
    "rms_norm_eps": 1e-6,
}
"""The shape of Qwen 3.5 0.8B, with fewer tokens."""


def dense(config: ModelConfig) -> ModelConfig:
    """The model with gated attention of as many numbers in the place of each gated delta net."""
    layers = list[Layer]()
    attention = next(iter(config.spec.attentions.values()))
    assert isinstance(attention, Attention)
    for layer in config.layers:
        if isinstance(state := layer.state, GatedDelta):
            heads = state.value_size // attention.head_dim
            assert 2 * state.key_size == 2 * heads * attention.head_dim, "of queries and keys"
            layer = replace(layer, mixer=replace(attention, num_heads=heads, num_kv_heads=heads))
        layers.append(layer)
    return replace(config, spec=replace(config.spec, layers=tuple(layers)))


def random_layer(
    kernels: Kernels,
    layer: Layer,
    linear: Callable[[Kernels, LinearMap], Linear],
    ones: Callable[[int], Tensor],
) -> LayerWeights:
    """
    Args:
        linear: makes the operator of a map.
        ones: makes a norm's weights, of as many numbers.
    """
    mixer = layer.mixer
    assert mixer is not None
    norm = ones(mixer.hidden_size)
    own = {name: linear(kernels, map) for name, map in layer.maps().items()}
    feed_forward = None
    if layer.feed_forward is not None:
        feed_forward = MlpWeights(own.pop("gate_up"), own.pop("down"))
    if isinstance(mixer, Attention):
        head_norm = ones(mixer.head_dim)
        mixed: AttentionWeights | StateWeights = AttentionWeights(
            qkv=own["qkv"], o=own["o"], q_norm=head_norm, k_norm=head_norm
        )
    else:
        assert not isinstance(mixer, LatentAttention)
        mixed = StateWeights(spec=mixer, vectors=random_vectors(mixer, norm.device), **own)
    return LayerWeights(mixer=mixed, feed_forward=feed_forward, input_norm=norm, post_norm=norm)


def random_linear(kernels: Kernels, map: LinearMap) -> Linear:
    """In the numbers that the kernels compute with."""
    return kernels.linear({"weight": random_weight(map)}, DENSE, None, gated=map.is_gated)


def random_weight(map: LinearMap) -> Tensor:
    """[out, in] float32"""
    rows = sum(part.count for part in map.rows)
    return torch.randn(rows, map.in_features) / math.sqrt(map.in_features)


def random_vectors(mixer: StateMixer, device: torch.device) -> StateVectors:
    own = {name: torch.randn(vector.shape) / 2 for name, vector in mixer.vectors().items()}
    if "decay" in own:
        own["decay"] = -own["decay"].exp() / 10
    own |= {name: torch.ones(norm.size) for name, norm in mixer.norms().items()}
    return StateVectors(**{name: tensor.to(device) for name, tensor in own.items()})
