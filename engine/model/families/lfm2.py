"""LFM2: layers with a short convolution, between which some have attention."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.engine.fields import Fields
from penstock.engine.model.families.common import CONV, FULL, MAX_KERNEL, Sizes, layer_types, read_rope
from penstock.engine.model.families.routers import numbered_experts, read_router
from penstock.engine.spec import Experts, Mlp, ModelSpec, ShortConv

LFM2_MOE = {"norm_eps": 1e-5, "tie_word_embeddings": True}
LFM2 = {**LFM2_MOE, "intermediate_size": 12_288}
MAX_INNER = 1 << 24
"""More than any feed-forward part is wide."""


def lfm2(fields: Fields) -> ModelSpec:
    sizes = Sizes.of(fields, eps="norm_eps")
    return _model(fields, sizes, [_mlp(sizes, _inner_size(fields, sizes))] * sizes.num_layers)


def lfm2_moe(fields: Fields) -> ModelSpec:
    """The first `num_dense_layers` have no experts."""
    sizes = Sizes.of(fields, eps="norm_eps")
    num_dense, dense = fields.integer("num_dense_layers", 2), _mlp(sizes, sizes.inner)
    router = read_router(
        fields,
        name="feed_forward.gate",
        scoring="sigmoid",
        choice_bias="feed_forward.expert_bias" if fields.flag("use_expert_bias", True) else "",
        renormalizes=fields.flag("norm_topk_prob", True),
        epsilon=1e-6,
        scale=fields.positive("routed_scaling_factor", 1.0),
    )
    inner = fields.size("moe_intermediate_size", 1792)
    sparse = sizes.experts(router, inner_size=inner, **numbered_experts("feed_forward.experts"))
    return _model(
        fields, sizes, [dense if number < num_dense else sparse for number in range(sizes.num_layers)]
    )


def _mlp(sizes: Sizes, inner_size: int) -> Mlp:
    names = ("feed_forward.w1", "feed_forward.w3")
    return sizes.mlp(inner_size=inner_size, gate_up=names, down="feed_forward.w2")


def _inner_size(fields: Fields, sizes: Sizes) -> int:
    """Returns the config's width, or where it says so, two thirds of it times a factor, rounded up to a multiple."""
    inner = fields.size("block_ff_dim", sizes.inner, most=MAX_INNER)
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return inner
    inner = int(fields.positive("block_ffn_dim_multiplier", 1.0) * int(2 * inner / 3))
    multiple = fields.size("block_multiple_of", 256, most=MAX_INNER)
    return max(1, -(-inner // multiple)) * multiple


def _model(fields: Fields, sizes: Sizes, parts: Sequence[Mlp | Experts]) -> ModelSpec:
    conv = ShortConv(
        hidden_size=sizes.hidden,
        channels=sizes.hidden,
        kernel=fields.size("conv_L_cache", 3, most=MAX_KERNEL),
        has_bias=fields.flag("conv_bias"),
    )
    norms = sizes.head_norms(q="q_layernorm", k="k_layernorm")
    attention = sizes.attention(o="self_attn.out_proj", **norms)
    outer = {"input_norm": sizes.norm("operator_norm"), "post_norm": sizes.norm("ffn_norm")}
    layers = [
        sizes.layer(attention if kind == FULL else conv, part, **outer)
        for kind, part in zip(_kinds(fields, sizes), parts, strict=True)
    ]
    rope = read_rope(fields, sizes, theta=1e6)
    return sizes.model(
        layers,
        [rope],
        fields,
        final_norm=sizes.norm("model.embedding_norm"),
        ties_embeddings=fields.flag("tie_embedding", fields.flag("tie_word_embeddings")),
    )


def _kinds(fields: Fields, sizes: Sizes) -> list[str]:
    full = fields.integers("full_attn_idxs") if fields.has("full_attn_idxs") else range(sizes.num_layers)
    return layer_types(fields, sizes.num_layers, lambda number: number in full, CONV)
