"""The specs against transformers: the same parameters by name and shape, the same windows, the same sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from penstock.engine.model import families
from penstock.engine.model.parse import read_config
from penstock.engine.model.tensors import expected_shapes
from tests.engine.checkpoints import FAMILIES, make_checkpoint, make_config, tensor_shapes
from tests.engine.families import BY_HAND, INSIDE, RENAMED, SPARSE, STATES, STATES_INSIDE, TINY

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CLASSES: dict[str, Any] = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}
CASES = [
    *((family, {}) for family in FAMILIES),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", {"head_dim": 24, "num_key_value_heads": 4}),
    ("mistral", {"head_dim": 24, "sliding_window": None}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}),
    (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0, "attention_bias": True},
    ),
    ("qwen3", {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"] * 2}),
]


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_a_config_written_by_transformers_means_the_same_model(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    theirs = CLASSES[family](**{**SMALL, **changes})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs)
    theirs.architectures = [type(model).__name__]
    theirs.save_pretrained(tmp_path)
    ours = read_config(tmp_path)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert expected_shapes(ours) == shapes
    windows = [getattr(layer.self_attn, "sliding_window", None) or 0 for layer in model.model.layers]
    if family == "mistral":
        windows = [theirs.sliding_window or 0] * 4
    assert [attention.window for attention in ours.attentions] == windows
    assert (ours.num_heads, ours.num_kv_heads, ours.max_position) == (
        4,
        theirs.num_key_value_heads,
        theirs.max_position_embeddings,
    )
    assert ours.spec.norm_eps == theirs.rms_norm_eps


@pytest.mark.parametrize("family", FAMILIES)
def test_the_factory_writes_what_the_spec_expects(family: str, tmp_path: Path) -> None:
    assert expected_shapes(read_config(make_checkpoint(family, tmp_path))) == tensor_shapes(
        make_config(family)
    )


def test_every_architecture_is_compared_with_transformers() -> None:
    compared = {str(make_config(family)["architectures"][0]) for family in FAMILIES}  # type: ignore[index]
    compared |= {tiny.architecture for tiny in (TINY | SPARSE | STATES).values()}
    compared |= INSIDE.keys() | STATES_INSIDE.keys() | {*RENAMED, *BY_HAND}
    assert compared == families.FAMILIES.keys()
    assert compared.isdisjoint(families.NOT_YET)
