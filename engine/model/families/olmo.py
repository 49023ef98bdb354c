"""OLMo 2 and 3 and EXAONE 4: each part reads the stream as it is, and its output is normed."""

from __future__ import annotations

from collections.abc import Callable

from penstock.engine.fields import Fields
from penstock.engine.model.families.common import FULL, SLIDING, Sizes, layer_types, read_rope
from penstock.engine.spec import Attention, Layer, ModelSpec, Norm


def olmo2(fields: Fields) -> ModelSpec:
    sizes = Sizes.of(fields)
    layer = _layer(sizes, _attention(fields, sizes))
    return sizes.model([layer] * sizes.num_layers, [read_rope(fields, sizes)], fields)


def olmo3(fields: Fields) -> ModelSpec:
    """Layers with a window have a table of their own, which is never scaled."""
    sizes, window = Sizes.of(fields), fields.size("sliding_window", 4096)
    kinds = layer_types(fields, sizes.num_layers, lambda layer: layer % 4 == 3)
    attention = _attention(fields, sizes)
    layers = [
        _layer(sizes, attention).with_attention(window=0 if kind == FULL else window, rope=int(kind != FULL))
        for kind in kinds
    ]
    full = read_rope(fields, sizes, kind=FULL, theta=500_000.0)
    local = read_rope(fields, sizes, kind=SLIDING, theta=500_000.0, scales=False)
    return sizes.model(layers, [full, local], fields)


def exaone4(fields: Fields) -> ModelSpec:
    """Describes EXAONE 4: layers without a window know no positions, if others have one."""
    sizes, window = Sizes.of(fields), fields.optional_size("sliding_window") or 0
    if "sliding_window" not in fields:
        window = 4096
    kinds = layer_types(fields, sizes.num_layers, _is_full(fields) if window else lambda _: True)
    attention = sizes.attention(**sizes.head_norms())
    layers = [
        _layer(sizes, attention).with_attention(
            window=0 if kind == FULL else window, rope=None if window and kind == FULL else 0
        )
        for kind in kinds
    ]
    return sizes.model(layers, [read_rope(fields, sizes)], fields)


def _is_full(fields: Fields) -> Callable[[int], bool]:
    """Returns a test for layers that see all tokens: each nth for a `sliding_window_pattern` n, or its letters G."""
    if not fields.is_text("sliding_window_pattern"):
        every = fields.size("sliding_window_pattern", 4)
        return lambda layer: (layer + 1) % every == 0
    letters = fields.text("sliding_window_pattern")
    return lambda layer: letters[layer % len(letters)] == "G"


def _attention(fields: Fields, sizes: Sizes) -> Attention:
    bias = fields.flag("attention_bias")
    attention = sizes.attention(qkv_bias=bias, o_bias=bias)
    norms = {
        "q_norm": Norm(name="self_attn.q_norm", size=attention.q_size),
        "k_norm": Norm(name="self_attn.k_norm", size=attention.kv_size),
    }
    return sizes.attention(qkv_bias=bias, o_bias=bias, **norms)


def _layer(sizes: Sizes, attention: Attention) -> Layer:
    return sizes.layer(
        attention,
        input_norm=None,
        post_norm=None,
        attention_norm=sizes.norm("post_attention_layernorm"),
        feed_forward_norm=sizes.norm("post_feedforward_layernorm"),
    )
