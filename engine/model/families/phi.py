"""Phi 3 and 4: fused linear maps, and heads of which a part is rotated."""

from __future__ import annotations

from penstock.engine.fields import Fields
from penstock.engine.model.families.common import FUSED_GATE_UP, FUSED_QKV, Sizes, read_rope
from penstock.engine.spec import ModelSpec


def phi3(fields: Fields) -> ModelSpec:
    sizes = Sizes.of(fields)
    rope = read_rope(fields, sizes)
    attention = sizes.attention(
        qkv=FUSED_QKV,
        window=fields.optional_size("sliding_window") or 0,
        rotated=int(sizes.head_dim * rope.share),
    )
    layer = sizes.layer(attention, sizes.mlp(gate_up=FUSED_GATE_UP))
    return sizes.model([layer] * sizes.num_layers, [rope], fields)
