"""One short spec per family: what its config.json leaves unsaid about the one decoder that they all describe.

Sources: the configuration and modeling files of transformers 5 for each family; test_architectures and test_transformer
hold every line of this against them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import CheckpointError
from engine.model.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What tells one family's decoder from another's. The names are those of ModelConfig."""

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_windows: tuple[int, ...] = ()
    head_dim: int | None = None
    """If config.json gives none; without it, hidden_size / num_attention_heads."""


def llama(fields: Fields) -> Traits:
    bias = fields.flag("attention_bias")
    return Traits(qkv_bias=bias, o_bias=bias, mlp_bias=fields.flag("mlp_bias"))


def mistral(fields: Fields) -> Traits:
    """Every layer sees the same window; null is none, and a missing entry is the 4096 of the first Mistral 7B."""
    window = fields.optional_size("sliding_window") if "sliding_window" in fields else 4096
    return Traits(sliding_windows=(window,) * fields.size("num_hidden_layers") if window else ())


def qwen2(fields: Fields) -> Traits:
    return Traits(qkv_bias=True, sliding_windows=_upper_windows(fields))


def qwen3(fields: Fields) -> Traits:
    bias = fields.flag("attention_bias")
    return Traits(
        qkv_bias=bias, o_bias=bias, qk_norm=True, sliding_windows=_upper_windows(fields), head_dim=128
    )


ARCHITECTURES: dict[str, Callable[[Fields], Traits]] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
}


def _upper_windows(fields: Fields) -> tuple[int, ...]:
    """Qwen's windows: off by default; else as `layer_types` says, or in the layers from `max_window_layers` on."""
    window = fields.optional_size("sliding_window") if "sliding_window" in fields else 4096
    if not fields.flag("use_sliding_window") or not window:
        return ()
    num_layers = fields.size("num_hidden_layers")
    first = fields.integer("max_window_layers", 28)
    by_depth = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    kinds = fields.strings("layer_types") or by_depth
    if len(kinds) < num_layers or {*kinds} - {"sliding_attention", "full_attention"}:
        raise CheckpointError(
            f"{fields.source}: layer_types does not say sliding_attention or full_attention for each layer"
        )
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds[:num_layers])
