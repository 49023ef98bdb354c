"""Llama, and the families that differ from it by a value or two."""

from __future__ import annotations

from penstock.engine.fields import Fields
from penstock.engine.model.families.common import FULL, Sizes, check_heads, layer_types, read_rope, rotating
from penstock.engine.spec import Layer, ModelSpec


def llama(fields: Fields) -> ModelSpec:
    sizes, bias = Sizes.of(fields), fields.flag("attention_bias")
    attention = sizes.attention(qkv_bias=bias, o_bias=bias)
    layer = sizes.layer(attention, sizes.mlp(has_bias=fields.flag("mlp_bias")))
    return sizes.model([layer] * sizes.num_layers, [read_rope(fields, sizes)], fields)


def mistral(fields: Fields) -> ModelSpec:
    """All layers have the same window: null is no window, and a missing entry is the 4096 of the first Mistral 7B."""
    sizes = Sizes.of(fields)
    is_interleaved = fields.flag("rope_interleave")
    layer = sizes.layer(sizes.attention(window=_window(fields), is_interleaved=is_interleaved))
    return sizes.model([layer] * sizes.num_layers, [read_rope(fields, sizes)], fields)


def qwen2(fields: Fields) -> ModelSpec:
    sizes = Sizes.of(fields)
    attention = sizes.attention(qkv_bias=True)
    layers = [sizes.layer(attention).with_attention(window=window) for window in upper_windows(fields, sizes)]
    return sizes.model(layers, [read_rope(fields, sizes)], fields)


def qwen3(fields: Fields) -> ModelSpec:
    sizes, bias = Sizes.of(fields, head_dim=128), fields.flag("attention_bias")
    attention = sizes.attention(qkv_bias=bias, o_bias=bias, **sizes.head_norms())
    layers = [sizes.layer(attention).with_attention(window=window) for window in upper_windows(fields, sizes)]
    return sizes.model(layers, [read_rope(fields, sizes)], fields)


def ministral3(fields: Fields) -> ModelSpec:
    sizes, rope = Sizes.of(fields, head_dim=128), fields.nested("rope_parameters")
    beta = rope.number("llama_4_scaling_beta", 0.0)
    attention = sizes.attention(
        window=fields.optional_size("sliding_window") or 0,
        is_interleaved=fields.flag("rope_interleave"),
        temperature=(beta, rope.size("original_max_position_embeddings"), 0) if beta else None,
    )
    return sizes.model([sizes.layer(attention)] * sizes.num_layers, [read_rope(fields, sizes)], fields)


def smollm3(fields: Fields) -> ModelSpec:
    """SmolLM3 does not rotate positions in the layers whose `no_rope_layers` is 0."""
    sizes, bias = Sizes.of(fields), fields.flag("attention_bias")
    rotates = rotating(fields, sizes.num_layers)
    window = fields.optional_size("sliding_window") if fields.flag("use_sliding_window") else None
    kinds = layer_types(fields, sizes.num_layers, lambda layer: not window or rotates[layer])
    layer = sizes.layer(
        sizes.attention(qkv_bias=bias, o_bias=bias), sizes.mlp(has_bias=fields.flag("mlp_bias"))
    )
    layers = [
        layer.with_attention(rope=0 if rotates[number] else None, window=0 if kind == FULL else window or 0)
        for number, kind in enumerate(kinds)
    ]
    return sizes.model(layers, [read_rope(fields, sizes, theta=2e6)], fields)


def seed_oss(fields: Fields) -> ModelSpec:
    sizes = Sizes.of(fields, head_dim=128)
    attention = sizes.attention(
        qkv_bias=fields.flag("attention_bias", True), o_bias=fields.flag("attention_out_bias")
    )
    layer = sizes.layer(attention, sizes.mlp(has_bias=fields.flag("mlp_bias")))
    return sizes.model([layer] * sizes.num_layers, [read_rope(fields, sizes)], fields)


def ernie4_5(fields: Fields) -> ModelSpec:
    """Neighbouring pairs of a head are rotated."""
    sizes, bias = Sizes.of(fields, head_dim=128), fields.flag("use_bias")
    attention = sizes.attention(qkv_bias=bias, o_bias=bias, is_interleaved=True)
    layer = sizes.layer(attention, sizes.mlp(has_bias=bias))
    return sizes.model([layer] * sizes.num_layers, [read_rope(fields, sizes, theta=500_000.0)], fields)


def hunyuan(fields: Fields) -> ModelSpec:
    """Queries and keys are normed after the rotation."""
    sizes, bias = Sizes.of(fields), fields.flag("attention_bias")
    norms = sizes.head_norms(q="query_layernorm", k="key_layernorm")
    attention = sizes.attention(qkv_bias=bias, o_bias=bias, norms_after_rotation=True, **norms)
    return sizes.model([sizes.layer(attention)] * sizes.num_layers, [read_rope(fields, sizes)], fields)


def decilm(fields: Fields) -> ModelSpec:
    """Llama's layers in sizes of their own, some of them without attention or without a feed-forward part."""
    sizes, blocks = Sizes.of(fields.with_defaults({"intermediate_size": 1})), fields.objects("block_configs")
    if len(blocks) != sizes.num_layers:
        raise fields.error(f"block_configs has {len(blocks)} entries for {sizes.num_layers} layers")
    layers = [_block(sizes, block.nested("attention"), block.nested("ffn")) for block in blocks]
    return sizes.model(layers, [read_rope(fields, sizes)], fields)


def _block(sizes: Sizes, attention: Fields, ffn: Fields) -> Layer:
    for name in ("replace_with_linear", "sparsify", "window_length", "num_sink_tokens", "unshifted_sink"):
        attention.says_nothing(name, False)
        ffn.says_nothing(name, False)
    mixer = feed_forward = None
    if not attention.flag("no_op"):
        num_kv_heads = sizes.num_heads // attention.size("n_heads_in_group", most=sizes.num_heads)
        check_heads(attention.source, sizes.num_heads, num_kv_heads, sizes.head_dim)
        mixer = sizes.attention(num_kv_heads=num_kv_heads)
    if not ffn.flag("no_op"):
        inner = int(2 * ffn.positive("ffn_mult") * sizes.hidden / 3)
        feed_forward = sizes.mlp(inner_size=-(-inner // 256) * 256)
    return Layer(
        mixer=mixer,
        feed_forward=feed_forward,
        input_norm=None if mixer is None else sizes.norm("input_layernorm"),
        post_norm=None if feed_forward is None else sizes.norm("post_attention_layernorm"),
    )


def _window(fields: Fields) -> int:
    return (fields.optional_size("sliding_window") or 0) if "sliding_window" in fields else 4096


def upper_windows(fields: Fields, sizes: Sizes) -> list[int]:
    """Returns Qwen's window for each layer; windows are off unless `use_sliding_window` is set.

    If it is, the layers that `layer_types` names have one, or without it the layers from `max_window_layers` on.
    """
    window = _window(fields) if fields.flag("use_sliding_window") else 0
    if not window:
        return [0] * sizes.num_layers
    first = fields.integer("max_window_layers", 28)
    kinds = layer_types(fields, sizes.num_layers, lambda layer: layer < first)
    return [0 if kind == FULL else window for kind in kinds]
