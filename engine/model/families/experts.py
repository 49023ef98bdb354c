"""Qwen 3 MoE, Mixtral and OLMoE: layers of Llama's kind whose feed-forward parts are experts."""

from __future__ import annotations

from engine.fields import Fields
from engine.model.families.common import Sizes, read_rope
from engine.model.families.llama import upper_windows
from engine.spec import ModelSpec, Norm, Router, Stack, default_stacks

MAX_EXPERTS = 1 << 16
"""More than any layer has: each is some tensors."""


def qwen3_moe(fields: Fields) -> ModelSpec:
    """Layers of `mlp_only_layers` are dense, and those whose number is not a multiple of `decoder_sparse_step`."""
    sizes, bias = Sizes.of(fields, head_dim=128), fields.flag("attention_bias")
    attention = sizes.attention(qkv_bias=bias, o_bias=bias, **sizes.head_norms())
    inner = fields.size("moe_intermediate_size")
    sparse = sizes.layer(attention, sizes.experts(read_router(fields), inner_size=inner))
    dense, every = sizes.layer(attention), fields.size("decoder_sparse_step", 1)
    dense_layers = fields.integers("mlp_only_layers")
    layers = [
        (sparse if number not in dense_layers and (number + 1) % every == 0 else dense).with_attention(
            window=window
        )
        for number, window in enumerate(upper_windows(fields, sizes))
    ]
    return sizes.model(layers, [read_rope(fields, sizes)], fields)


def mixtral(fields: Fields) -> ModelSpec:
    prefix = "block_sparse_moe.experts"
    sizes, router = Sizes.of(fields), read_router(fields, name="block_sparse_moe.gate", renormalizes=True)
    experts = sizes.experts(router, prefix=prefix, gate_up=("w1", "w3"), down="w2", stacks=_mixtral_stacks())
    layer = sizes.layer(sizes.attention(window=fields.optional_size("sliding_window") or 0), experts)
    return sizes.model([layer] * sizes.num_layers, [read_rope(fields, sizes, theta=1e6)], fields)


def olmoe(fields: Fields) -> ModelSpec:
    """Queries and keys are normed as one row each."""
    if fields.has("clip_qkv"):
        raise fields.error("clip_qkv is not supported")
    sizes, bias = Sizes.of(fields), fields.flag("attention_bias")
    plain = sizes.attention(qkv_bias=bias, o_bias=bias)
    norms = {
        "q_norm": Norm(name="self_attn.q_norm", size=plain.q_size),
        "k_norm": Norm(name="self_attn.k_norm", size=plain.kv_size),
    }
    attention = sizes.attention(qkv_bias=bias, o_bias=bias, **norms)
    layer = sizes.layer(attention, sizes.experts(read_router(fields)))
    return sizes.model([layer] * sizes.num_layers, [read_rope(fields, sizes)], fields)


def read_router(fields: Fields, **changes: object) -> Router:
    """The router as most families say it: `num_experts`, `num_experts_per_tok` and `norm_topk_prob`.

    Raises:
        CheckpointError: naming what is missing or malformed, or that a token has more experts than there are.
    """
    name = "num_local_experts" if fields.has("num_local_experts") else "num_experts"
    num_experts = fields.size(name, most=MAX_EXPERTS)
    top_k = fields.size("num_experts_per_tok", most=MAX_EXPERTS)
    if top_k > num_experts:
        raise fields.error(f"num_experts_per_tok is {top_k}, and there are {num_experts} experts ({name})")
    plain = {
        "num_experts": num_experts,
        "top_k": top_k,
        "renormalizes": fields.flag("norm_topk_prob"),
    }
    return Router(**{**plain, **changes})  # type: ignore[arg-type]


def _mixtral_stacks() -> tuple[Stack, ...]:
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    return tuple(
        Stack(stack.name, tuple(names[map] for map in stack.maps))
        for stack in default_stacks("block_sparse_moe.experts")
    )
