"""Nemotron H and 3, whose layers have a mixer or a feed-forward part each, and Llama Nemotron."""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.fields import Fields
from penstock.engine.model.families.common import (
    FULL,
    LINEAR,
    MAX_KERNEL,
    MAX_LAYERS,
    Sizes,
    check_heads,
    hybrid_kinds,
    read_rope,
)
from penstock.engine.model.families.mamba import checked, mamba_names, step_limits
from penstock.engine.model.families.routers import read_router
from penstock.engine.spec import Activation, Experts, Layer, Mamba2, Mlp, ModelSpec, default_stacks

NEMOTRON = {"head_dim": 128, "num_hidden_layers": 1, "layer_norm_epsilon": 1e-5}
_KINDS = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}
"""Of Nemotron's layers, by the letter of `hybrid_override_pattern`."""
_RELU2 = Activation(kind="relu2", is_gated=False)


def nemotron_h(fields: Fields) -> ModelSpec:
    kinds = _kinds(fields)
    sizes = replace(Sizes.of(fields, eps="layer_norm_epsilon"), num_layers=len(kinds))
    layers = {kind: _layer(fields, sizes, kind) for kind in dict.fromkeys(kinds)}
    return sizes.model([layers[kind] for kind in kinds], [], fields, final_norm=sizes.norm("model.norm_f"))


def _layer(fields: Fields, sizes: Sizes, kind: str) -> Layer:
    norm = sizes.norm("norm")
    if kind == LINEAR:
        return Layer(mixer=_mixer(fields, sizes), feed_forward=None, input_norm=norm)
    if kind == FULL:
        names = tuple(f"mixer.{name}_proj" for name in "qkv")
        attention = sizes.attention(rope=None, qkv=names, o="mixer.o_proj")
        return Layer(mixer=attention, feed_forward=None, input_norm=norm)
    fields.one_of("mlp_hidden_act", "relu2", default="relu2")
    part = _mlp(sizes, "mixer", sizes.inner) if kind == "mlp" else _experts(fields, sizes)
    return Layer(mixer=None, feed_forward=part, post_norm=norm)


def _mixer(fields: Fields, sizes: Sizes) -> Mamba2:
    fields.one_of("mamba_hidden_act", "silu", default="silu")
    mixer = Mamba2(
        hidden_size=sizes.hidden,
        num_heads=fields.size("mamba_num_heads", 128),
        head_dim=fields.size("mamba_head_dim", 64),
        num_groups=fields.size("n_groups", fields.size("mamba_n_groups", 8)),
        state_size=fields.size("ssm_state_size", 128),
        kernel=fields.size("conv_kernel", fields.size("mamba_d_conv", 4), most=MAX_KERNEL),
        step_limits=step_limits(fields),
        has_bias=fields.flag("use_bias"),
        has_conv_bias=fields.flag("use_conv_bias", fields.flag("mamba_conv_bias", True)),
        **mamba_names("mixer"),
    )
    return checked(fields, mixer)


def _mlp(sizes: Sizes, prefix: str, inner_size: int) -> Mlp:
    return sizes.mlp(
        inner_size=inner_size,
        activation="relu2",
        is_gated=False,
        gate_up=(f"{prefix}.up_proj",),
        down=f"{prefix}.down_proj",
    )


def _experts(fields: Fields, sizes: Sizes) -> Experts:
    if fields.has("moe_latent_size"):
        raise fields.error(
            "moe_latent_size is not supported: experts read hidden states of another width (Nemotron 3 Super, Ultra)"
        )
    router = read_router(
        fields,
        has_groups=True,
        group_best=2,
        name="mixer.gate",
        scoring="sigmoid",
        choice_bias="mixer.gate.e_score_correction_bias",
        renormalizes=fields.flag("norm_topk_prob", True),
        epsilon=1e-20,
        scale=fields.positive("routed_scaling_factor", 1.0),
    )
    inner = fields.size("moe_shared_expert_intermediate_size", 7688)
    return sizes.experts(
        router,
        inner_size=fields.size("moe_intermediate_size", 7688),
        activation=_RELU2,
        prefix="mixer.experts",
        gate_up=("up_proj",),
        stacks=default_stacks("mixer.experts"),
        shared=_mlp(sizes, "mixer.shared_experts", inner),
    )


def _kinds(fields: Fields) -> list[str]:
    """The kind of each layer, from whichever entry says it.

    Raises:
        CheckpointError: there is none, or it says something else.
    """
    if fields.has("hybrid_override_pattern"):
        return _by_letters(fields, "hybrid_override_pattern")
    name = fields.first("layers_block_type", "layer_types", "hybrid_override_pattern")
    kinds = hybrid_kinds(fields, name, *_KINDS.values())
    if not 0 < len(kinds) <= MAX_LAYERS:
        raise fields.error(f"{name} has {len(kinds)} entries, and it must have 1 to {MAX_LAYERS}")
    return kinds


def _by_letters(fields: Fields, name: str) -> list[str]:
    letters = fields.text(name)
    unknown = next((letter for letter in letters if letter not in _KINDS), None)
    if unknown is not None:
        raise fields.error(
            f"{name} has a layer {unknown!r}, which is not supported; only {', '.join(_KINDS)} are"
        )
    if not 0 < len(letters) <= MAX_LAYERS:
        raise fields.error(f"{name} has {len(letters)} layers, and it must have 1 to {MAX_LAYERS}")
    return [_KINDS[letter] for letter in letters]


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
