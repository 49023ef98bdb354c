"""Models of random weights that are real checkpoints, and the arithmetic that is counted of them."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from loadtests.gpu.sizes import (
    LLAMA_8B,
    LLAMA_SMALL,
    QWEN3_06B,
    TEXT_TOKENS,
    ModelShape,
    serving,
    speculation,
)  # fmt: skip
from penstock.app.bench.checkpoint import write_checkpoint
from penstock.engine.config import LoadOptions
from penstock.engine.execution.loader import load_model
from penstock.engine.fields import Fields
from penstock.engine.kernels.batch import blank_batch
from penstock.engine.model.parse import parse_config, read_config
from penstock.engine.model.tensors import expected_shapes, linear_specs, make_recipe
from penstock.engine.quant.float8 import Float8
from penstock.engine.quant.integers import Integers


@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_a_quantized_checkpoint_is_loaded_as_it_is_and_chooses_only_text(
    quantization: str, tmp_path: Path
) -> None:
    shape = replace(LLAMA_SMALL, quantization=quantization)
    write_checkpoint(shape.config, tmp_path)
    options = LoadOptions(device="cpu", dtype="float32", num_blocks=4, block_size=32)
    model = load_model(tmp_path, options, lambda _: None, lambda *_: None)
    config = read_config(tmp_path)
    found = {
        name: tensor.format for name, tensor in linear_specs(config, 0, make_recipe(config, options)).items()
    }
    assert {type(each) for each in found.values()} == {Float8 if quantization == "fp8" else Integers}
    batch = blank_batch([32], [32], torch.tensor([[1]], dtype=torch.int32))
    batch.token_ids = torch.tensor(TEXT_TOKENS, dtype=torch.int32)[torch.randint(0, len(TEXT_TOKENS), (32,))]
    batch.sample_rows = torch.arange(32, dtype=torch.int32)
    with torch.inference_mode():
        chosen = model.lm_head(model.decoder(batch)).argmax(-1).tolist()
    assert all(token in TEXT_TOKENS for token in chosen)
    assert len(set(chosen)) > 10, "answers are not one token over and over"


@pytest.mark.parametrize(("shape", "billions"), [(LLAMA_8B, 8.03), (QWEN3_06B, 0.596)])
def test_the_shapes_are_those_of_their_names(shape: ModelShape, billions: float) -> None:
    config = parse_config(Fields("config.json", shape.config))
    assert sum(map(prod, expected_shapes(config).values())) / 1e9 == pytest.approx(billions, rel=0.005)
    assert ("q_norm" in config.attentions[0].norms()) == (shape is QWEN3_06B)


def test_heads_and_layers_that_draft_are_as_large_as_published_ones() -> None:
    """The head of Llama 3.1 8B: qkv of two rows, a map of three, logits of a quarter of the tokens."""
    (_, head, own), sizes = speculation("full")
    assert (sizes.streams, head.config) == ((1, 8, 32), LLAMA_8B.config)
    assert head.draft is not None
    layer = parse_config(Fields("config.json", head.draft), "LlamaForCausalLM")
    assert (layer.hidden_size, layer.num_layers, head.draft["draft_vocab_size"]) == (4096, 1, 32_064)
    config = parse_config(Fields("config.json", own.config))
    assert sum(map(prod, expected_shapes(config).values())) / 1e9 == pytest.approx(8.03, rel=0.005)
    assert (len(config.attentions), config.spec.states) == (32, {})
    assert config.spec.prediction is not None


def test_a_head_drafts_the_first_tokens_and_of_them_text_alone(tmp_path: Path) -> None:
    (_, head, _), _ = speculation("dry")
    assert head.draft is not None
    write_checkpoint(head.draft, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["d2t"].tolist() == [0] * 4112
    logits = tensors["lm_head.weight"].float()
    assert logits.shape == (4112, 64)
    for rows, deviation in ((logits[:258], 0.001), (logits[258:], 0.02)):
        assert rows.std().item() == pytest.approx(deviation, rel=0.05)
    check_size(tmp_path, tensors)


def test_prefill_counts_linear_maps_and_half_of_the_square() -> None:
    """6.979 B parameters in linear maps; attention of 32 layers and 4096 query elements; one row of logits."""
    linear, head = 2 * 6.979e9, 2 * 4096 * 128_256
    assert LLAMA_8B.prefill_flop(1000) == pytest.approx(
        1000 * linear + head + 32 * 2 * 4096 * 1000 * 1001, rel=1e-3
    )


@pytest.mark.parametrize("mode", ["full", "quick", "dry"])
@pytest.mark.parametrize("name", ["llama-8b", "qwen3-0.6b", "llama-8b-int4"])
def test_no_prompt_is_longer_than_the_model_or_the_step_it_is_to_fill(name: str, mode: str) -> None:
    shape, sizes = serving(name, mode)
    assert all(context + sizes.slope_tokens <= shape.max_length for context in sizes.contexts)
    assert sizes.prefill_tokens <= sizes.max_batch_tokens
    assert max(sizes.clients, sizes.host_streams, (sizes.requests or (0,))[0]) <= sizes.max_num_seqs


@pytest.mark.parametrize("quantization", [None, "fp8", "int4"])
def test_tensors_are_random_numbers_of_one_deviation(quantization: str | None, tmp_path: Path) -> None:
    """Norms are 1; rows of the vocabulary that are no text are twenty times smaller."""
    shape = replace(LLAMA_SMALL, quantization=quantization)
    write_checkpoint(shape.config, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    head = tensors["lm_head.weight"].float()
    assert head.shape == (16_448, 64)
    for rows, deviation in ((head[:258], 0.001), (head[258:16_384], 0.02), (head[16_384:], 0.001)):
        assert rows.std().item() == pytest.approx(deviation, rel=0.05)
    assert not torch.equal(head, tensors["model.embed_tokens.weight"].float())
    assert tensors["model.norm.weight"].tolist() == [1.0] * 64
    prefix = "model.layers.1.mlp.down_proj.weight"
    if quantization is None:
        weight, other = (tensors[f"model.layers.{i}.mlp.down_proj.weight"].float() for i in (0, 1))
        assert weight.shape == (64, 96)
        assert weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert not torch.equal(weight, other)
    elif quantization == "fp8":
        weight, scale = tensors[prefix], tensors[f"{prefix}_scale"]
        assert (weight.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.bfloat16)
        assert weight.float().std().item() == pytest.approx(1, rel=0.05)
        assert scale.float().unique().tolist() == [pytest.approx(0.02, rel=0.01)]
    else:
        words, scale = tensors[f"{prefix}_packed"], tensors[f"{prefix}_scale"]
        assert (words.dtype, words.shape, scale.shape) == (torch.int32, (64, 12), (64, 3))
        assert tensors[f"{prefix}_shape"].tolist() == [64, 96]
        assert scale.float().unique().tolist() == [pytest.approx(0.02 / 4.6, rel=0.01)]
        nibbles = torch.stack([(words >> 4 * i) & 15 for i in range(8)]).float() - 8
        assert nibbles.std().item() == pytest.approx(4.6, rel=0.02)
    check_size(tmp_path, tensors)


def check_size(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Checks that the file has the tensors and their header, which is aligned, and nothing else."""
    size = (folder / "model.safetensors").stat().st_size
    header = int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little")
    assert (header % 8, size) == (0, 8 + header + sum(tensor.nbytes for tensor in tensors.values()))
