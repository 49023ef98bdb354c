"""Quantized text models beside an image tower, whose config and tensors have other names around them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.families import TINY, put_inside
from tests.engine.model.test_transformer import load, logits_of, make_batch, oracle_logits
from tests.engine.quant.storages.makers import compressed

TOKEN_IDS = [7 * i % 390 + 3 for i in range(60)]
ARCHITECTURE = "Mistral3ForConditionalGeneration"
STAYS = "model.layers.1.mlp.down_proj.weight"

STATIC_FP8 = {
    "activation_scheme": "static",
    "dequantize": False,
    "modules_to_not_convert": [
        "model.vision_tower",
        "model.multi_modal_projector",
        "lm_head",
        "model.language_model.layers.1.mlp.down_proj",
    ],
    "quant_method": "fp8",
    "weight_block_size": None,
}


def static_fp8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """One scale for a whole weight and one for its inputs, both scalars in bfloat16, and what they stand for."""
    scale = (weight.abs().max() / 448).bfloat16()
    numbers = (weight / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    tensors = {
        "weight": numbers,
        "weight_scale_inv": scale,
        "activation_scale": torch.tensor(0.01).bfloat16(),
    }
    return tensors, numbers.float() * scale.float()


PACKED = compressed("pack-quantized", num_bits=4, strategy="group", group_size=16)
IGNORING = {
    **PACKED.config,
    "ignore": ["language_model.lm_head", "re:.*vision.*", "language_model.model.layers.1.mlp.down_proj"],
}


def packed(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    made = PACKED.make(weight)
    return made.tensors, made.weight.float()


@pytest.mark.parametrize("table", ["torch", "native"])
@pytest.mark.parametrize(
    ("config", "store", "tolerance"),
    [(STATIC_FP8, static_fp8, 1e-4), (IGNORING, packed, 0.2)],
    ids=["fp8", "compressed"],
)
def test_a_text_part_stands_for_the_weights_that_it_stores(
    tmp_path: Path, config: dict[str, Any], store: Any, tolerance: float, table: str
) -> None:
    """As Ministral 3 ships it. Integers are multiplied with activations of 8 bits."""
    text = TINY["Ministral 3"].make(tmp_path / "text")
    file = text / "model.safetensors"
    weights = load_file(file)
    stored: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if not name.endswith("_proj.weight") or name == STAYS:
            stored[name] = weight
            continue
        tensors, weights[name] = store(weight)
        stored |= {f"{name.removesuffix('weight')}{suffix}": tensor for suffix, tensor in tensors.items()}
    save_file(weights, file, {"format": "pt"})
    expected = oracle_logits(text, TOKEN_IDS)
    save_file(stored, file)
    whole = put_inside(text, tmp_path / "whole", ARCHITECTURE)
    content = json.loads((whole / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps({**content, "quantization_config": config}))

    found = logits_of(load(whole, table), make_batch([(TOKEN_IDS, 0)]))
    assert float((found - expected).norm()) <= tolerance * float(expected.norm())
