"""The one decoder that every architecture describes, written over the kernel table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.kernels.batch import Batch
from engine.kernels.cpu import native
from engine.kernels.kv_cache import KVCache
from engine.kernels.linear import Linear
from engine.kernels.ops import Attention, Kernels
from engine.kernels.ranks import embed
from engine.kernels.reference import TokenPlaces
from engine.model.config import ModelConfig, RopeConfig
from engine.model.eagle import EagleConfig
from engine.model.eagle_weights import EagleWeights
from engine.model.parameters import GatedMlp, LayerWeights, Weights

ForwardPass = Callable[[Batch], Tensor]
"""The layers of a decoder: batch -> hidden states [R, hidden] of its sample rows after the final norm.

The step's keys and values go into the KV cache. The output head makes logits of the hidden states.
"""


def make_decoder(
    config: ModelConfig, weights: Weights, kernels: Kernels, kv: KVCache, max_position: int
) -> ForwardPass:
    """The decoder that runs whole passes natively if there are kernels for that, else the one below.

    Args:
        max_position: no token will ever have this position or a higher one.
    """
    if kernels.team is None:
        return Decoder(config, weights, kernels, kv, max_position)
    layers = [_native_layer(layer, config.window(i)) for i, layer in enumerate(weights.layers)]
    return _native_decoder(config, layers, weights.rows, weights.final_norm, kernels.team, kv, max_position)


def make_head(
    head: EagleConfig,
    weights: EagleWeights,
    embedding: Tensor | Linear,
    kernels: Kernels,
    kv: KVCache,
    features: Tensor,
    max_position: int,
) -> native.NativeDecoder:
    """The layer of an EAGLE-3 head, which native kernels run.

    Args:
        embedding: [vocab, hidden], or a linear map whose rows it is.
        features: bfloat16 [blocks, block size, hidden], what the target writes of its tokens.
    """
    assert kernels.team is not None
    layers = [_native_layer(weights.layer, 0)]
    reads = native.NativeHeadInput(
        norm=weights.hidden_norm, features=features, residual_is_normed=head.residual_is_normed
    )
    return _native_decoder(
        head.layer, layers, embedding, weights.final_norm, kernels.team, kv, max_position, reads
    )


def _native_decoder(
    config: ModelConfig,
    layers: Sequence[native.NativeLayer],
    embedding: Tensor | Linear,
    final_norm: Tensor,
    team: native.Team,
    kv: KVCache,
    max_position: int,
    head: native.NativeHeadInput | None = None,
) -> native.NativeDecoder:
    cos, sin = rotary_tables(config, max_position)
    return native.NativeDecoder(
        team,
        kv,
        layers,
        embedding=embedding if isinstance(embedding, Tensor) else _packed(embedding),
        final_norm=final_norm,
        eps=config.rms_norm_eps,
        cos=cos,
        sin=sin,
        head=head,
    )


def _native_layer(layer: LayerWeights, window: int) -> native.NativeLayer:
    assert isinstance(layer.feed_forward, GatedMlp)
    return native.NativeLayer(
        attention_norm=layer.input_norm,
        qkv=_packed(layer.qkv),
        q_norm=layer.q_norm,
        k_norm=layer.k_norm,
        o=_packed(layer.o),
        mlp_norm=layer.post_norm,
        gate_up=_packed(layer.feed_forward.gate_up),
        down=_packed(layer.feed_forward.down),
        window=window,
    )


def _packed(linear: Linear) -> native.PackedLinear:
    assert isinstance(linear, native.PackedLinear)
    return linear


class Decoder:
    """A ForwardPass over the kernel table, on any device."""

    def __init__(
        self, config: ModelConfig, weights: Weights, kernels: Kernels, kv: KVCache, max_position: int
    ) -> None:
        self.config = config
        self.weights = weights
        self.kernels = kernels
        self.kv = kv
        cos, sin = rotary_tables(config, max_position)
        self.cos, self.sin = cos.to(kernels.device), sin.to(kernels.device)

    @torch.inference_mode()
    def __call__(self, batch: Batch) -> Tensor:
        kernels, weights = self.kernels, self.weights
        step = _Step(batch, self)
        assert isinstance(weights.embedding, Tensor)
        hidden = embed(batch.token_ids, weights.embedding, kernels.ranks).to(kernels.activation_dtype)
        delta = None
        for i, layer in enumerate(weights.layers):
            hidden, normed = self._norm(hidden, delta, layer.input_norm)
            hidden, normed = self._norm(hidden, self._attend(i, layer, normed, step), layer.post_norm)
            delta = layer.feed_forward(normed)
        assert delta is not None
        rows = batch.sample_rows
        if rows.numel() != hidden.shape[0] or batch.max_query_len != 1:  # else they are all rows, in order
            hidden, delta = hidden.index_select(0, rows), delta.index_select(0, rows)
        return self._norm(hidden, delta, weights.final_norm)[1]

    def _norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """(the residual stream with what the last sublayer adds to it, its norm)"""
        eps = self.config.rms_norm_eps
        if delta is None:
            return hidden, self.kernels.rms_norm(hidden, weight, eps)
        return self.kernels.add_rms_norm(hidden, delta, weight, eps)

    def _attend(self, index: int, layer: LayerWeights, normed: Tensor, step: _Step) -> Tensor:
        layer_kv = self.kv.layer(index)
        queries = self.kernels.rotate_and_write(
            layer.qkv(normed),
            layer.q_norm,
            layer.k_norm,
            self.config.rms_norm_eps,
            step.places,
            layer_kv,
            self.kv.shape,
        )
        return layer.o(step.attention(queries, layer_kv, self.config.window(index)))


class _Step:
    """What all layers of one step share."""

    def __init__(self, batch: Batch, decoder: Decoder) -> None:
        kernels, kv = decoder.kernels, decoder.kv
        slots = kernels.slot_mapping(batch, kv.block_size)
        self.places = TokenPlaces(batch.positions, slots, decoder.cos, decoder.sin)
        self.attention: Attention = kernels.attention(batch, kv.shape)


def rotary_tables(config: ModelConfig, max_position: int) -> tuple[Tensor, Tensor]:
    """cos and sin of every angle, each [max_position, head_dim / 2], float32."""
    angles = torch.arange(max_position, dtype=torch.float32)[:, None] * inverse_frequencies(
        config.rope, config.head_dim
    )
    return angles.cos(), angles.sin()


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """[head_dim / 2] radians per position, computed step for step as transformers does, in float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.scaling == "linear":
        return frequencies / rope.factor
    if rope.scaling == "factors":
        return frequencies / torch.tensor(rope.factors)
    return _llama3(rope, frequencies) if rope.scaling == "llama3" else frequencies


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Llama 3.1's: long waves are stretched by `factor`, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    longest = rope.original_max_position / rope.low_freq_factor
    shortest = rope.original_max_position / rope.high_freq_factor
    share = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - share) * frequencies / rope.factor + share * frequencies
    stretched = torch.where(wavelengths > longest, frequencies / rope.factor, frequencies)
    between = (wavelengths >= shortest) & (wavelengths <= longest)
    return torch.where(between, blended, stretched)
