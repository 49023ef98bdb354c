"""Mamba-2 alone, with attention in Bamba, and in Nemotron 3, whose layers have a mixer or a feed-forward part each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.engine.fields import Fields
from penstock.engine.model.families.common import (
    FULL,
    LINEAR,
    MAX_KERNEL,
    MAX_LAYERS,
    Sizes,
    hybrid_kinds,
    read_rope,
)
from penstock.engine.model.families.experts import read_router
from penstock.engine.spec import Activation, Experts, Layer, Mamba2, Mlp, ModelSpec, default_stacks

_ANY_LENGTH = {"max_position_embeddings": 1 << 18, "num_attention_heads": 1, "intermediate_size": 1}
"""The entries that the config of a model without positions, attention or feed-forward parts leaves out."""
MAMBA2 = {**_ANY_LENGTH, "layer_norm_epsilon": 1e-5}
NEMOTRON = {"head_dim": 128, "num_hidden_layers": 1, "layer_norm_epsilon": 1e-5}

_KINDS = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}
"""Of Nemotron's layers, by the letter of `hybrid_override_pattern`."""
_RELU2 = Activation(kind="relu2", is_gated=False)


def mamba2(fields: Fields) -> ModelSpec:
    sizes = Sizes.of(fields, eps="layer_norm_epsilon")
    mixer = Mamba2(
        hidden_size=sizes.hidden,
        num_heads=fields.size("num_heads", 128),
        head_dim=fields.size("head_dim", 64),
        num_groups=fields.size("n_groups", 8),
        state_size=fields.size("state_size", 128),
        kernel=fields.size("conv_kernel", 4, most=MAX_KERNEL),
        step_limits=step_limits(fields),
        has_bias=fields.flag("use_bias"),
        has_conv_bias=fields.flag("use_conv_bias", True),
        **mamba_names("mixer"),
    )
    layer = Layer(mixer=checked(fields, mixer), feed_forward=None, input_norm=sizes.norm("norm"))
    return _model(fields, sizes, [layer] * sizes.num_layers)


def nemotron_h(fields: Fields) -> ModelSpec:
    kinds = _kinds(fields)
    sizes = replace(Sizes.of(fields, eps="layer_norm_epsilon"), num_layers=len(kinds))
    layers = {kind: _layer(fields, sizes, kind) for kind in dict.fromkeys(kinds)}
    return _model(fields, sizes, [layers[kind] for kind in kinds])


def bamba(fields: Fields) -> ModelSpec:
    sizes, bias = Sizes.of(fields), fields.flag("attention_bias")
    rope = read_rope(fields, sizes, share=0.5)
    attention = sizes.attention(qkv_bias=bias, o_bias=bias, rotated=int(sizes.head_dim * rope.share))
    gate_up, down = ("feed_forward.gate_proj", "feed_forward.up_proj"), "feed_forward.down_proj"
    mlp = sizes.mlp(gate_up=gate_up, down=down, has_bias=fields.flag("mlp_bias"))
    full = sizes.layer(attention, mlp, post_norm=sizes.norm("pre_ff_layernorm"))
    linear, listed = replace(full, mixer=hybrid_mixer(fields, sizes)), fields.integers("attn_layer_indices")
    layers = [full if number in listed else linear for number in range(sizes.num_layers)]
    return sizes.model(layers, [rope], fields, final_norm=sizes.norm("model.final_layernorm"))


def hybrid_mixer(fields: Fields, sizes: Sizes) -> Mamba2:
    """Returns the mixer of Bamba and of Granite 4."""
    inner, num_heads = fields.size("mamba_expand", 2) * sizes.hidden, fields.size("mamba_n_heads", 128)
    head_dim = inner // num_heads
    if not fields.is_text("mamba_d_head"):  # "auto" follows from the others
        head_dim = fields.size("mamba_d_head", head_dim)
    if head_dim * num_heads != inner:
        raise fields.error(
            f"mamba_n_heads is {num_heads} and mamba_d_head {head_dim}, and mamba_expand says {inner} numbers"
        )
    mixer = Mamba2(
        hidden_size=sizes.hidden,
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=fields.size("mamba_n_groups", 1),
        state_size=fields.size("mamba_d_state", 256),
        kernel=fields.size("mamba_d_conv", 4, most=MAX_KERNEL),
        step_limits=step_limits(fields),
        has_bias=fields.flag("mamba_proj_bias"),
        has_conv_bias=fields.flag("mamba_conv_bias", True),
        **mamba_names("mamba"),
    )
    return checked(fields, mixer)


def _model(fields: Fields, sizes: Sizes, layers: list[Layer]) -> ModelSpec:
    return sizes.model(layers, [], fields, final_norm=sizes.norm("model.norm_f"))


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


def step_limits(fields: Fields) -> tuple[float, float]:
    """The least and the largest step of Mamba-2: as a rule none, for `time_step_min` is of the first weights alone."""
    return fields.bounds("time_step_limit") or (0.0, float("inf"))


def checked(fields: Fields, mixer: Mamba2) -> Mamba2:
    """The mixer.

    Raises:
        CheckpointError: its heads do not lie in so many groups.
    """
    if mixer.num_heads % mixer.num_groups:
        raise fields.error(
            f"{mixer.num_heads} Mamba heads do not lie in {mixer.num_groups} groups (n_groups, mamba_n_groups)"
        )
    return mixer


def mamba_names(prefix: str) -> dict[str, Any]:
    """Returns the names of a mixer's tensors."""
    names = {"into": "in_proj", "out": "out_proj", "conv": "conv1d", "decay": "A_log", "step_bias": "dt_bias"}
    return {field: f"{prefix}.{name}" for field, name in {**names, "skip": "D", "norm": "norm"}.items()}
