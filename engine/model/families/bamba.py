"""Bamba: Mamba-2 with attention."""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.fields import Fields
from penstock.engine.model.families.common import Sizes, read_rope
from penstock.engine.model.families.mamba import hybrid_mixer
from penstock.engine.spec import ModelSpec


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
