"""Configs of models by their sizes, without a config.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from penstock.engine.config import ModelConfig
from penstock.engine.fields import Fields
from penstock.engine.kernels.batch import Batch
from penstock.engine.kernels.kv_cache import KVLayout
from penstock.engine.model.families.common import Sizes
from penstock.engine.spec import Layer, Mixer, ModelSpec, Norm, Rope


def llama_config(
    *,
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    intermediate_size: int,
    max_position: int,
    rms_norm_eps: float = 1e-5,
    tie_word_embeddings: bool = False,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    sliding_windows: Sequence[int] = (),
) -> ModelConfig:
    """A model of Llama's kind."""
    sizes = Sizes(
        hidden=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        inner=intermediate_size,
        activation="silu",
        max_position=max_position,
        eps=rms_norm_eps,
    )
    norms = sizes.head_norms() if qk_norm else {}
    attention = sizes.attention(qkv_bias=qkv_bias, o_bias=o_bias, **norms)
    layer = sizes.layer(attention, sizes.mlp(has_bias=mlp_bias))
    spec = sizes.model(
        [layer] * num_layers, [Rope()], Fields("", {"tie_word_embeddings": tie_word_embeddings})
    )
    config = ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=vocab_size, max_position=max_position, spec=spec
    )
    return with_windows(config, sliding_windows) if sliding_windows else config


def state_config(*mixers: Mixer | None) -> ModelConfig:
    """A model with these mixers, and no feed-forward parts."""
    layers = tuple(Layer(mixer=mixer, feed_forward=None) for mixer in mixers)
    spec = ModelSpec(hidden_size=8, layers=layers, norm_eps=1e-6, final_norm=Norm(name="model.norm", size=8))
    return ModelConfig(architecture="Mamba2ForCausalLM", vocab_size=8, max_position=64, spec=spec)


def with_windows(config: ModelConfig, windows: Sequence[int]) -> ModelConfig:
    """The model with a window in each of its layers; 0 is none."""
    layers = [
        layer.with_attention(window=window) for layer, window in zip(config.layers, windows, strict=True)
    ]
    return with_spec(config, layers=tuple(layers))


def with_spec(config: ModelConfig, **changes: object) -> ModelConfig:
    return replace(config, spec=replace(config.spec, **changes))  # type: ignore[arg-type]


def with_attention(config: ModelConfig, **changes: object) -> ModelConfig:
    """The model with these changes in the attention of every layer."""
    return with_spec(config, layers=tuple(layer.with_attention(**changes) for layer in config.layers))


def spread(batch: Batch, layout: KVLayout) -> Batch:
    """A batch with one block table a sequence, as one with all tables of a layout, in as many times the blocks."""
    num = len(layout.windows)
    blocks = batch.block_tables[..., None] * num + torch.arange(num, dtype=torch.int32)
    return replace(batch, block_tables=blocks.flatten(1))
