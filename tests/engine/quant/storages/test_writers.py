"""Checkpoints that the libraries themselves write, file names and config.json included, against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torchao.quantization as ao
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams
from transformers import AutoModelForCausalLM, TorchAoConfig

from tests.engine.checkpoints import make_checkpoint
from tests.engine.quant.storages.makers import INT4
from tests.engine.quant.storages.test_checkpoints import load, logits

TOKENS = torch.arange(40) * 7


def check(folder: Path, tolerance: float) -> None:
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        wanted = oracle(TOKENS.unsqueeze(0)).logits[0].float()
    error = logits(load(folder), TOKENS) - wanted
    assert error.square().mean().sqrt() < tolerance * wanted.square().mean().sqrt()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("config", "included", "tolerance"),
    [
        (ao.Int8WeightOnlyConfig(), False, 0.05),
        (ao.IntxWeightOnlyConfig(weight_dtype=INT4, granularity=ao.PerGroup(32)), True, 0.05),
        (ao.Float8WeightOnlyConfig(), False, 1e-5),
    ],
)
def test_torchao_by_transformers(tmp_path: Path, config: object, included: bool, tolerance: float) -> None:
    dense = make_checkpoint("llama", tmp_path / "dense", intermediate_size=96, num_hidden_layers=2)
    quantization = TorchAoConfig(config, include_input_output_embeddings=included)
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32, quantization_config=quantization)
    model.save_pretrained(tmp_path / "quantized")
    check(tmp_path / "quantized", tolerance)


@pytest.mark.filterwarnings("ignore")
def test_compressed_tensors(tmp_path: Path) -> None:
    dense = make_checkpoint("llama", tmp_path / "dense", intermediate_size=96, num_hidden_layers=2)
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.bfloat16)
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(num_bits=4, strategy="group", group_size=32)
    )
    apply_quantization_config(model, QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"]))
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and hasattr(module, "weight_scale"):
            groups = torch.unflatten(module.weight, 1, (-1, 32))
            scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
            module.get_parameter("weight_scale").data.copy_(scale)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path / "quantized")
    compressor.update_config(tmp_path / "quantized")
    check(tmp_path / "quantized", 0.05)
