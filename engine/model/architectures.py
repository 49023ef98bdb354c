"""One short spec for each family of models. It adds to a config what config.json leaves to the family's own code.

The sources are the configuration and modeling files of transformers 5; test_architectures and test_transformer compare
every spec with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from engine.errors import CheckpointError
from engine.fields import Fields
from engine.model.config import ModelConfig


def llama(fields: Fields, config: ModelConfig) -> ModelConfig:
    bias = fields.flag("attention_bias")
    return replace(config, qkv_bias=bias, o_bias=bias, mlp_bias=fields.flag("mlp_bias"))


def mistral(fields: Fields, config: ModelConfig) -> ModelConfig:
    """All layers have the same window: null is no window, and a missing entry is the 4096 of the first Mistral 7B."""
    window = _window(fields)
    return replace(config, sliding_windows=(window,) * config.num_layers if window else ())


def qwen2(fields: Fields, config: ModelConfig) -> ModelConfig:
    return replace(config, qkv_bias=True, sliding_windows=_upper_windows(fields, config.num_layers))


def qwen3(fields: Fields, config: ModelConfig) -> ModelConfig:
    bias, windows = fields.flag("attention_bias"), _upper_windows(fields, config.num_layers)
    return replace(
        config,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        sliding_windows=windows,
        head_dim=fields.size("head_dim", 128),
    )


ARCHITECTURES: dict[str, Callable[[Fields, ModelConfig], ModelConfig]] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
}


def _window(fields: Fields) -> int | None:
    return fields.optional_size("sliding_window") if "sliding_window" in fields else 4096


def _upper_windows(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Qwen's windows are off unless `use_sliding_window` is set.

    Then the layers have them that `layer_types` names, or without it those from `max_window_layers` on.
    """
    window = _window(fields)
    if not fields.flag("use_sliding_window") or not window:
        return ()
    first = fields.integer("max_window_layers", 28)
    by_depth = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    kinds = fields.strings("layer_types") or by_depth
    if len(kinds) < num_layers or {*kinds} - {"sliding_attention", "full_attention"}:
        raise CheckpointError(
            f"{fields.source}: layer_types does not say sliding_attention or full_attention for each layer"
        )
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds[:num_layers])
