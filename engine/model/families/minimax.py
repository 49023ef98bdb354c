"""MiniMax M2."""

from __future__ import annotations

from penstock.engine.fields import Fields
from penstock.engine.model.families.common import Sizes, read_rope
from penstock.engine.model.families.routers import MIXTRAL_EXPERTS, read_router
from penstock.engine.spec import ModelSpec


def minimax_m2(fields: Fields) -> ModelSpec:
    """Queries and keys are normed as one row each, and the first dimensions of a head are rotated."""
    router = read_router(
        fields,
        name="block_sparse_moe.gate",
        scoring="sigmoid",
        choice_bias="block_sparse_moe.e_score_correction_bias",
        renormalizes=True,
    )
    sizes = Sizes.of(fields, head_dim=128)
    share = (fields.optional_size("rotary_dim") or sizes.head_dim) / sizes.head_dim
    rope = read_rope(fields, sizes, theta=5e6, share=share)
    attention = sizes.attention(rotated=int(sizes.head_dim * rope.share), **sizes.row_norms())
    layer = sizes.layer(attention, sizes.experts(router, **MIXTRAL_EXPERTS))
    return sizes.model([layer] * sizes.num_layers, [rope], fields)
