"""Qwen 3.5 and its like: three layers with a gated delta net, then one with gated attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.engine.fields import Fields
from penstock.engine.model.families.common import FULL, LINEAR, MAX_KERNEL, Sizes, layer_types, read_rope
from penstock.engine.model.families.qwen import is_sparse
from penstock.engine.model.families.routers import read_router
from penstock.engine.spec import Attention, Experts, GatedDelta, Mlp, ModelSpec, Rope

_OF_A_KEY_HEAD: dict[str, Any] = {
    "into": ("linear_attn.in_proj_qkvz",),
    "gates": ("linear_attn.in_proj_ba",),
}
"""Qwen 3 Next's maps, whose rows lie by key heads."""

_PREDICTION = {
    "prefix": "mtp.layers.0.",
    "token_norm": "mtp.pre_fc_norm_embedding",
    "features_norm": "mtp.pre_fc_norm_hidden",
    "final_norm": "mtp.norm",
    "map": "mtp.fc",
}
"""The layer that drafts; the configs of Qwen 3 Next do not mention it."""

MOE = {"intermediate_size": 512}
"""No layer is dense."""


def qwen3_5(fields: Fields) -> ModelSpec:
    sizes = Sizes.of(fields, head_dim=256)
    return _model(fields, sizes, [sizes.mlp()] * sizes.num_layers, _delta(fields, sizes))


def qwen3_5_moe(fields: Fields) -> ModelSpec:
    sizes = Sizes.of(fields, head_dim=256)
    parts = [_experts(fields, sizes, renormalizes=True)] * sizes.num_layers
    return _model(fields, sizes, parts, _delta(fields, sizes))


def qwen3_next(fields: Fields) -> ModelSpec:
    sizes = Sizes.of(fields, head_dim=256)
    renormalizes = fields.flag("norm_topk_prob", True)
    sparse, dense = _experts(fields, sizes, renormalizes=renormalizes), sizes.mlp()
    parts = [sparse if is_sparse(fields, number) else dense for number in range(sizes.num_layers)]
    return _model(fields, sizes, parts, _delta(fields, sizes, **_OF_A_KEY_HEAD))


def _model(fields: Fields, sizes: Sizes, parts: Sequence[Mlp | Experts], delta: GatedDelta) -> ModelSpec:
    """Returns the model; all norms but the delta nets' have weights around 0, to which 1 is added."""
    every = fields.size("full_attention_interval", 4)
    kinds = layer_types(fields, sizes.num_layers, lambda number: (number + 1) % every == 0, LINEAR)
    rope = read_rope(fields, sizes, share=0.25)
    attention = _attention(fields, sizes, rope)
    norms = {
        "input_norm": sizes.norm("input_layernorm", offset=1.0),
        "post_norm": sizes.norm("post_attention_layernorm", offset=1.0),
    }
    layers = [
        sizes.layer(attention if kind == FULL else delta, part, **norms)
        for kind, part in zip(kinds, parts, strict=True)
    ]
    predicting = sizes.prediction(fields, sizes.layer(attention, parts[-1], **norms), _PREDICTION, offset=1.0)
    return sizes.model(
        layers,
        [rope],
        fields,
        final_norm=sizes.norm("model.norm", offset=1.0),
        prediction=predicting,
    )


def _attention(fields: Fields, sizes: Sizes, rope: Rope) -> Attention:
    bias = fields.flag("attention_bias")
    return sizes.attention(
        has_gate=fields.flag("attn_output_gate", True),
        rotated=int(sizes.head_dim * rope.share),
        qkv_bias=bias,
        o_bias=bias,
        **sizes.head_norms(offset=1.0),
    )


def _delta(fields: Fields, sizes: Sizes, **changes: object) -> GatedDelta:
    fields.one_of("hidden_act", "silu", "swish", default="silu")
    keys, values = fields.size("linear_num_key_heads", 16), fields.size("linear_num_value_heads", 32)
    if values % keys:
        raise fields.error(
            f"linear_num_value_heads is {values}, which cannot share the {keys} of linear_num_key_heads"
        )
    plain = {
        "hidden_size": sizes.hidden,
        "num_key_heads": keys,
        "num_value_heads": values,
        "key_dim": fields.size("linear_key_head_dim", 128),
        "value_dim": fields.size("linear_value_head_dim", 128),
        "kernel": fields.size("linear_conv_kernel_dim", 4, most=MAX_KERNEL),
    }
    return GatedDelta(**{**plain, **changes})  # type: ignore[arg-type]


def _experts(fields: Fields, sizes: Sizes, *, renormalizes: bool) -> Experts:
    inner = fields.size("shared_expert_intermediate_size", 512)
    return sizes.experts(
        read_router(fields, renormalizes=renormalizes),
        inner_size=fields.size("moe_intermediate_size", 512),
        shared=sizes.shared("mlp.shared_expert", inner),
        shared_gate="mlp.shared_expert_gate",
    )
