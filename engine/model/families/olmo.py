"""OLMo 2 and 3, in which each part reads the stream as it is and its output is normed; and OLMoE."""

from __future__ import annotations

from penstock.engine.fields import Fields
from penstock.engine.model.families.common import FULL, SLIDING, Sizes, layer_types, read_rope
from penstock.engine.model.families.routers import read_router
from penstock.engine.spec import Attention, Layer, ModelSpec, Norm


def olmo2(fields: Fields) -> ModelSpec:
    sizes = Sizes.of(fields)
    layer = normed_after(sizes, _attention(fields, sizes))
    return sizes.model([layer] * sizes.num_layers, [read_rope(fields, sizes)], fields)


def olmo3(fields: Fields) -> ModelSpec:
    """Layers with a window have a table of their own, which is never scaled."""
    sizes, window = Sizes.of(fields), fields.size("sliding_window", 4096)
    kinds = layer_types(fields, sizes.num_layers, lambda layer: layer % 4 == 3)
    attention = _attention(fields, sizes)
    layers = [
        normed_after(sizes, attention).with_attention(
            window=0 if kind == FULL else window, rope=int(kind != FULL)
        )
        for kind in kinds
    ]
    full = read_rope(fields, sizes, kind=FULL, theta=500_000.0)
    local = read_rope(fields, sizes, kind=SLIDING, theta=500_000.0, scales=False)
    return sizes.model(layers, [full, local], fields)


def olmoe(fields: Fields) -> ModelSpec:
    """Queries and keys are normed as one row each."""
    if fields.has("clip_qkv"):
        raise fields.error("clip_qkv is not supported")
    sizes, bias = Sizes.of(fields), fields.flag("attention_bias")
    attention = sizes.attention(qkv_bias=bias, o_bias=bias, **sizes.row_norms())
    layer = sizes.layer(attention, sizes.experts(read_router(fields)))
    return sizes.model([layer] * sizes.num_layers, [read_rope(fields, sizes)], fields)


def _attention(fields: Fields, sizes: Sizes) -> Attention:
    bias = fields.flag("attention_bias")
    attention = sizes.attention(qkv_bias=bias, o_bias=bias)
    norms = {
        "q_norm": Norm(name="self_attn.q_norm", size=attention.q_size),
        "k_norm": Norm(name="self_attn.k_norm", size=attention.kv_size),
    }
    return sizes.attention(qkv_bias=bias, o_bias=bias, **norms)


def normed_after(sizes: Sizes, attention: Attention) -> Layer:
    return sizes.layer(
        attention,
        input_norm=None,
        post_norm=None,
        attention_norm=sizes.norm("post_attention_layernorm"),
        feed_forward_norm=sizes.norm("post_feedforward_layernorm"),
    )
