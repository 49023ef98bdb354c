"""Mamba-2 alone, and the mixers of its kind."""

from __future__ import annotations

from typing import Any

from penstock.engine.fields import Fields
from penstock.engine.model.families.common import MAX_KERNEL, Sizes
from penstock.engine.spec import Layer, Mamba2, ModelSpec

_ANY_LENGTH = {"max_position_embeddings": 1 << 18, "num_attention_heads": 1, "intermediate_size": 1}
"""The entries that the config of a model without positions, attention or feed-forward parts leaves out."""
MAMBA2 = {**_ANY_LENGTH, "layer_norm_epsilon": 1e-5}


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
    return sizes.model([layer] * sizes.num_layers, [], fields, final_norm=sizes.norm("model.norm_f"))


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
