"""Gemma 2 and 3: norms before and after each part, windows in some of the layers, scaled embeddings."""

from __future__ import annotations

import math
from dataclasses import replace

from penstock.engine.fields import Fields
from penstock.engine.model.families.common import FINAL_NORM, FULL, Sizes, layer_types, read_rope
from penstock.engine.spec import Layer, ModelSpec, Norm, Rope

GEMMA2 = {
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "vocab_size": 256_000,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}
GEMMA3 = {**GEMMA2, "max_position_embeddings": 131_072, "vocab_size": 262_208}
"""The values of missing entries: shipped files leave them out."""


def gemma2(fields: Fields) -> ModelSpec:
    sizes, window = Sizes.of(fields), _window(fields)
    kinds = layer_types(fields, sizes.num_layers, lambda layer: layer % 2 == 1)
    layers = [_layer(fields, sizes, window=0 if kind == FULL else window, norms={}) for kind in kinds]
    return _model(fields, sizes, layers, read_rope(fields, sizes), logit_softcap=_cap(fields, "final", 30.0))


def gemma3(fields: Fields) -> ModelSpec:
    """Layers with a window have a table of rotary embeddings of their own.

    The context is as long as the scaling of the other table has made it.
    """
    sizes, window = Sizes.of(fields), _window(fields)
    pattern = fields.size("sliding_window_pattern", 6)
    kinds = layer_types(fields, sizes.num_layers, lambda layer: (layer + 1) % pattern == 0)
    norms = sizes.head_norms(offset=1.0)
    layers = [
        _layer(fields, sizes, window=0 if kind == FULL else window, norms=norms, rope=int(kind != FULL))
        for kind in kinds
    ]
    full = read_rope(fields, sizes, kind=FULL, theta=1e6)
    full = replace(full, original_max_position=int(sizes.max_position / full.factor))
    local = Rope(theta=_local_theta(fields))
    return _model(fields, sizes, layers, full, local, logit_softcap=_cap(fields, "final", 0.0))


def _layer(fields: Fields, sizes: Sizes, *, window: int, norms: dict[str, Norm], rope: int = 0) -> Layer:
    bias = fields.flag("attention_bias")
    attention = sizes.attention(
        scale=fields.positive("query_pre_attn_scalar", 256) ** -0.5,
        softcap=_cap(fields, "attn", 0.0 if norms else 50.0),
        window=window,
        rope=rope,
        qkv_bias=bias,
        o_bias=bias,
        **norms,
    )
    return sizes.layer(
        attention,
        input_norm=sizes.norm("input_layernorm", offset=1.0),
        attention_norm=sizes.norm("post_attention_layernorm", offset=1.0),
        post_norm=sizes.norm("pre_feedforward_layernorm", offset=1.0),
        feed_forward_norm=sizes.norm("post_feedforward_layernorm", offset=1.0),
    )


def _model(
    fields: Fields, sizes: Sizes, layers: list[Layer], *ropes: Rope, logit_softcap: float
) -> ModelSpec:
    fields.says_nothing("use_bidirectional_attention", False)
    return sizes.model(
        layers,
        ropes,
        fields,
        embedding_scale=math.sqrt(sizes.hidden),
        final_norm=sizes.norm(FINAL_NORM, offset=1.0),
        logit_softcap=logit_softcap,
    )


def _window(fields: Fields) -> int:
    return fields.size("sliding_window", 4096)


def _cap(fields: Fields, which: str, default: float) -> float:
    """Reads a softcap; null is none, and the value of a missing entry differs by family."""
    name = f"{which}_logit_softcapping"
    return fields.number(name, 0.0 if name in fields else default)


def _local_theta(fields: Fields) -> float:
    rope = fields.nested("rope_parameters").nested("sliding_attention")
    return rope.positive("rope_theta", fields.positive("rope_local_base_freq", 10_000.0))
