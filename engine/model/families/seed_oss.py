"""Seed-OSS."""

from __future__ import annotations

from penstock.engine.fields import Fields
from penstock.engine.model.families.common import Sizes, read_rope
from penstock.engine.spec import ModelSpec


def seed_oss(fields: Fields) -> ModelSpec:
    sizes = Sizes.of(fields, head_dim=128)
    attention = sizes.attention(
        qkv_bias=fields.flag("attention_bias", True), o_bias=fields.flag("attention_out_bias")
    )
    layer = sizes.layer(attention, sizes.mlp(has_bias=fields.flag("mlp_bias")))
    return sizes.model([layer] * sizes.num_layers, [read_rope(fields, sizes)], fields)
