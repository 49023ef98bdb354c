"""The one decoder that every architecture describes, written over the kernel table."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.kernels.ops import Attention, ForwardPass, Kernels
from engine.kernels.reference import slot_mapping
from engine.kv.cache import KVCache
from engine.model.batch import Batch
from engine.model.config import ModelConfig, RopeConfig
from engine.model.parameters import LayerWeights, Weights


def make_decoder(
    config: ModelConfig, weights: Weights, kernels: Kernels, kv: KVCache, max_position: int
) -> ForwardPass:
    """The kernel table's own decoder if it has one, else the one below.

    Args:
        max_position: no token will ever have this position or a higher one.
    """
    if kernels.decoder is None:
        return Decoder(config, weights, kernels, kv, max_position)
    return kernels.decoder(config, weights, kv, *rotary_tables(config, max_position))


class Decoder:
    """batch -> logits [R, vocab] float32 of the rows that the batch wants; the step's keys and values go into `kv`."""

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
        config, kernels, weights = self.config, self.kernels, self.weights
        step = _Step(batch, self)
        hidden = weights.embedding[batch.token_ids].to(kernels.activation_dtype)
        for i, layer in enumerate(weights.layers):
            hidden = hidden + self._attend(i, layer, hidden, step)
            hidden = hidden + self._transform(layer, hidden)
        wanted = kernels.rms_norm(hidden[batch.sample_rows], weights.final_norm, config.rms_norm_eps)
        return weights.lm_head(wanted).float()

    def _attend(self, index: int, layer: LayerWeights, hidden: Tensor, step: _Step) -> Tensor:
        config, kernels = self.config, self.kernels
        normed = kernels.rms_norm(hidden, layer.input_norm, config.rms_norm_eps)
        heads = layer.qkv(normed).view(hidden.shape[0], -1, config.head_dim)
        sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        queries, keys, values = torch.split(heads, sizes, dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            queries = kernels.rms_norm(queries, layer.q_norm, config.rms_norm_eps)
            keys = kernels.rms_norm(keys, layer.k_norm, config.rms_norm_eps)
        queries, keys = kernels.rotary(queries, step.cos, step.sin), kernels.rotary(keys, step.cos, step.sin)
        kernels.write_kv(self.kv.layer(index), keys, values, step.slots)
        return layer.o(step.attention(queries, self.kv.layer(index), config.window(index)))

    def _transform(self, layer: LayerWeights, hidden: Tensor) -> Tensor:
        normed = self.kernels.rms_norm(hidden, layer.post_norm, self.config.rms_norm_eps)
        return layer.down(self.kernels.silu_mul(layer.gate_up(normed)))


class _Step:
    """What all layers of one step share."""

    def __init__(self, batch: Batch, decoder: Decoder) -> None:
        self.cos, self.sin = decoder.cos[batch.positions], decoder.sin[batch.positions]
        self.slots = slot_mapping(batch, decoder.kv.block_size)
        self.attention: Attention = decoder.kernels.attention(batch, decoder.kv.shape)


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
