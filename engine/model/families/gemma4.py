"""Gemma 4: heads of two sizes, keys and values that later layers share, embeddings for each layer, and experts next to
the dense part."""

from __future__ import annotations

import math
from dataclasses import replace

from penstock.engine.fields import Fields
from penstock.engine.model.families.common import FULL, SLIDING, Sizes, check_heads, layer_types, read_rope
from penstock.engine.model.families.routers import read_router
from penstock.engine.spec import (
    Experts,
    Layer,
    LayerEmbedding,
    LayerEmbeddings,
    Mlp,
    ModelSpec,
    Norm,
    default_stacks,
)

GEMMA4 = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "hidden_size_per_layer_input": 256,
}
"""The values of missing entries."""
UNIFIED = {**GEMMA4, "sliding_window": 1024, "hidden_size_per_layer_input": 0}
MAX_COUNT = 1 << 16
"""More layers, or numbers in an embedding for a layer, than any model has."""


def gemma4(fields: Fields) -> ModelSpec:
    """The last `num_kv_shared_layers` read the keys and values of the last layer of their kind before them."""
    fields.one_of("use_bidirectional_attention", "vision", default="vision")
    sizes = Sizes.of(fields)
    kinds = layer_types(fields, sizes.num_layers, lambda layer: (layer + 1) % 6 == 0)
    kinds[-1] = FULL
    num_own = sizes.num_layers - _count(fields, "num_kv_shared_layers")
    layers = []
    for number, kind in enumerate(kinds):
        found = [other for other in range(min(number, max(0, num_own))) if kinds[other] == kind]
        if number >= num_own and not found:
            raise fields.error(
                f"num_kv_shared_layers leaves no layer with {kind} and keys and values of its own"
            )
        shares = found[-1] if number >= num_own else None
        own = _sizes(fields, sizes, number if shares is None else shares, kind)
        layers.append(_layer(fields, own, kind, shares))
    wide = _sizes(fields, sizes, sizes.num_layers - 1, FULL)
    return sizes.model(
        layers,
        [read_rope(fields, wide, kind=FULL), read_rope(fields, sizes, kind=SLIDING)],
        fields,
        embedding_scale=math.sqrt(sizes.hidden),
        logit_softcap=fields.number("final_logit_softcapping", 0.0),
        layer_embeddings=_embeddings(fields, sizes),
    )


def _sizes(fields: Fields, sizes: Sizes, number: int, kind: str) -> Sizes:
    """The sizes of one layer: transformers writes them for each, published checkpoints for all without a window."""
    if fields.has("per_layer_config"):
        own = fields.nested("per_layer_config").nested(str(number))
        head_dim = own.size("head_dim", sizes.head_dim)
        num_kv_heads = own.size("num_key_value_heads", sizes.num_kv_heads)
    elif kind == FULL:
        head_dim, num_kv_heads = fields.size("global_head_dim", 512), sizes.num_kv_heads
        if fields.flag("attention_k_eq_v"):
            num_kv_heads = fields.size("num_global_key_value_heads", num_kv_heads)
    else:
        return sizes
    check_heads(fields.source, sizes.num_heads, num_kv_heads, head_dim)
    return replace(sizes, head_dim=head_dim, num_kv_heads=num_kv_heads)


def _layer(fields: Fields, sizes: Sizes, kind: str, shares: int | None) -> Layer:
    norms, bias = sizes.head_norms(), fields.flag("attention_bias")
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    keys_are_values = kind == FULL and fields.flag("attention_k_eq_v")
    attention = sizes.attention(
        scale=1.0,
        rope=int(kind != FULL),
        window=0 if kind == FULL else fields.size("sliding_window"),
        shares=shares,
        q_norm=norms["q_norm"],
        k_norm=norms["k_norm"] if shares is None else None,
        norms_values=shares is None,
        qkv=names[:2] if keys_are_values else names,
        qkv_bias=bias,
        o_bias=bias,
    )
    is_wide = shares is not None and fields.flag("use_double_wide_mlp")
    size = _count(fields, "hidden_size_per_layer_input")
    embedding = LayerEmbedding(
        hidden_size=sizes.hidden,
        size=size,
        norm=sizes.norm("post_per_layer_input_norm"),
        activation=sizes.activation,
    )
    mlp = sizes.mlp(inner_size=sizes.inner * (2 if is_wide else 1))
    has_experts = fields.flag("enable_moe_block")
    return sizes.layer(
        attention,
        _experts(fields, sizes, mlp) if has_experts else mlp,
        attention_norm=sizes.norm("post_attention_layernorm"),
        post_norm=None if has_experts else sizes.norm("pre_feedforward_layernorm"),
        feed_forward_norm=sizes.norm("post_feedforward_layernorm"),
        embedding=embedding if size else None,
        scalar="layer_scalar",
    )


def _experts(fields: Fields, sizes: Sizes, dense: Mlp) -> Experts:
    """Experts, the dense part and the router read the stream, each by a norm of its own."""
    router = read_router(
        fields,
        name="router.proj",
        renormalizes=True,
        expert_scale="router.per_expert_scale",
        norm=sizes.norm("router.scale", suffix="", factor=sizes.hidden**-0.5),
    )
    return sizes.experts(
        router,
        inner_size=fields.size("moe_intermediate_size"),
        prefix="experts",
        stacks=default_stacks("experts"),
        norm=sizes.norm("pre_feedforward_layernorm_2"),
        out_norm=sizes.norm("post_feedforward_layernorm_2"),
        shared=dense,
        shared_norm=sizes.norm("pre_feedforward_layernorm"),
        shared_out_norm=sizes.norm("post_feedforward_layernorm_1"),
    )


def _embeddings(fields: Fields, sizes: Sizes) -> LayerEmbeddings | None:
    size = _count(fields, "hidden_size_per_layer_input")
    if not size:
        return None
    vocab_size = fields.size("vocab_size_per_layer_input", fields.size("vocab_size"))
    if vocab_size < fields.size("vocab_size"):
        raise fields.error(
            f"vocab_size_per_layer_input is {vocab_size}, and some of the {fields.size('vocab_size')} "
            "tokens have no embedding for each layer"
        )
    return LayerEmbeddings(
        vocab_size=vocab_size,
        num_layers=sizes.num_layers,
        size=size,
        scale=math.sqrt(size),
        map_scale=sizes.hidden**-0.5,
        norm=Norm(name="model.per_layer_projection_norm", size=size),
    )


def _count(fields: Fields, name: str) -> int:
    """A number that may be 0 or missing, which is the same."""
    return int(fields.within(name, 0, MAX_COUNT) or 0)
