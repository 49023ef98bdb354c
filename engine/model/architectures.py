"""One short spec for each family of models. It says what config.json leaves to the family's own code in transformers.

The sources are the configuration and modeling files of transformers 5. test_architectures and test_transformer compare
every spec with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import CheckpointError
from engine.model.fields import Fields

MAX_LAYERS = 4096
"""No model has more layers. Lists with an entry for each layer are made before the tensors prove that the layers are
there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """The differences between the families' decoders. The fields are named as in ModelConfig."""

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_windows: tuple[int, ...] = ()
    head_dim: int | None = None
    """The head size of a config.json that gives none; None stands for hidden_size / num_attention_heads."""


def llama(fields: Fields) -> Traits:
    bias = fields.flag("attention_bias")
    return Traits(qkv_bias=bias, o_bias=bias, mlp_bias=fields.flag("mlp_bias"))


def mistral(fields: Fields) -> Traits:
    """All layers have the same window: null is no window, and a missing entry is the 4096 of the first Mistral 7B."""
    window = fields.optional_size("sliding_window") if "sliding_window" in fields else 4096
    return Traits(sliding_windows=(window,) * num_layers(fields) if window else ())


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


def num_layers(fields: Fields) -> int:
    """The number of layers, which is small enough for a list with an entry for each."""
    return fields.size("num_hidden_layers", most=MAX_LAYERS)


def _upper_windows(fields: Fields) -> tuple[int, ...]:
    """Qwen's windows are off unless `use_sliding_window` is set.

    Then the layers have them that `layer_types` names, or without it those from `max_window_layers` on.
    """
    window = fields.optional_size("sliding_window") if "sliding_window" in fields else 4096
    if not fields.flag("use_sliding_window") or not window:
        return ()
    count = num_layers(fields)
    first = fields.integer("max_window_layers", 28)
    by_depth = ["sliding_attention" if i >= first else "full_attention" for i in range(count)]
    kinds = fields.strings("layer_types") or by_depth
    if len(kinds) < count or {*kinds} - {"sliding_attention", "full_attention"}:
        raise CheckpointError(
            f"{fields.source}: layer_types does not say sliding_attention or full_attention for each layer"
        )
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds[:count])
