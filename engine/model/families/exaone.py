"""EXAONE 4."""

from __future__ import annotations

from collections.abc import Callable

from penstock.engine.fields import Fields
from penstock.engine.model.families.common import FULL, Sizes, layer_types, read_rope
from penstock.engine.model.families.olmo import normed_after
from penstock.engine.spec import ModelSpec


def exaone4(fields: Fields) -> ModelSpec:
    """Describes EXAONE 4: layers without a window know no positions, if others have one."""
    sizes, window = Sizes.of(fields), fields.optional_size("sliding_window") or 0
    if "sliding_window" not in fields:
        window = 4096
    kinds = layer_types(fields, sizes.num_layers, _is_full(fields) if window else lambda _: True)
    attention = sizes.attention(**sizes.head_norms())
    layers = [
        normed_after(sizes, attention).with_attention(
            window=0 if kind == FULL else window, rope=None if window and kind == FULL else 0
        )
        for kind in kinds
    ]
    return sizes.model(layers, [read_rope(fields, sizes)], fields)


def _is_full(fields: Fields) -> Callable[[int], bool]:
    """Returns a test for layers that see all tokens: each nth for a `sliding_window_pattern` n, or its letters G."""
    if not fields.is_text("sliding_window_pattern"):
        every = fields.size("sliding_window_pattern", 4)
        return lambda layer: (layer + 1) % every == 0
    letters = fields.text("sliding_window_pattern")
    return lambda layer: letters[layer % len(letters)] == "G"
