"""Latent attention in GGUF files: its metadata, and the names of its tensors.

llama.cpp's converter of DeepSeek V2 is the source. Newer files describe the attention to latents: one key-value head as
long as a latent and the rotated numbers, the sizes of a head beside it, and K, transposed, and V apart. Older ones
describe the heads, and have K and V in one tensor, as transformers has them.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.model.gguf.container import Header
from penstock.engine.spec import LatentAttention

NAMES = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
"""ggml's names of a layer's modules, and the engine's."""

OF_HEADS = tuple(f"{NAMES[name]}.weight" for name in ("attn_k_b", "attn_v_b"))
"""The tensors with an axis for heads before that of rows."""

_RANKS = {"attention.q_lora_rank": "q_lora_rank", "attention.kv_lora_rank": "kv_lora_rank"}


def latent_entries(header: Header, name: str) -> dict[str, object]:
    """The entries of a config.json for latent attention; none if a file has no rank of latents.

    Raises:
        CheckpointError: a size is missing or malformed, or no number of a head is left unrotated.
    """
    fields = header.fields
    if not fields.has(f"{name}.attention.kv_lora_rank"):
        return {}
    ranks = {
        entry: fields.size(f"{name}.{key}") for key, entry in _RANKS.items() if fields.has(f"{name}.{key}")
    }
    rotated = fields.size(f"{name}.rope.dimension_count")
    keys, values = (
        fields.size(f"{name}.attention.{part}_length_mla", fields.size(f"{name}.attention.{part}_length"))
        for part in ("key", "value")
    )
    if keys <= rotated:
        raise fields.error(f"{name}.rope.dimension_count is {rotated}, and a head has {keys} numbers in all")
    # The numbers that are rotated are a head of their own, rotated whole.
    sizes = {"qk_rope_head_dim": rotated, "qk_nope_head_dim": keys - rotated, "v_head_dim": values}
    return {**ranks, **sizes, "partial_rotary_factor": 1.0}


def stored_latent(mixer: LatentAttention, layer: int, header: Header) -> LatentAttention:
    """The mixer as a file has it."""
    return replace(
        mixer,
        is_split=f"blk.{layer}.attn_k_b.weight" in header.tensors,
        has_bias=f"blk.{layer}.attn_kv_a_mqa.bias" in header.tensors,
    )
