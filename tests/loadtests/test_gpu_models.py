"""Models of random weights that are real checkpoints, and the arithmetic that is counted of them."""

from __future__ import annotations

from dataclasses import astuple, replace
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from loadtests.gpu import checkpoints
from loadtests.gpu.checkpoints import token_ids, write_checkpoint
from loadtests.gpu.sizes import (
    LLAMA_1B,
    LLAMA_8B,
    LLAMA_SMALL,
    QWEN3_06B,
    QWEN3_SMALL,
    ModelShape,
    serving,
    speculation,
)  # fmt: skip
from penstock.engine.config import LoadOptions
from penstock.engine.execution.loader import load_model
from penstock.engine.fields import Fields
from penstock.engine.kernels.batch import blank_batch
from penstock.engine.model.parse import parse_config, read_config
from penstock.engine.model.tensors import expected_shapes, linear_specs, make_recipe
from penstock.engine.planning.tokenizer import Tokenizer
from penstock.engine.quant.float8 import Float8
from penstock.engine.quant.integers import Integers


@pytest.mark.parametrize("shape", [LLAMA_SMALL, QWEN3_SMALL])
def test_a_checkpoint_is_one_that_others_read_and_chooses_only_text(
    shape: ModelShape, tmp_path: Path
) -> None:
    write_checkpoint(shape, tmp_path, num_random=100_000)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    prompts = torch.tensor(token_ids())[torch.randint(0, len(token_ids()), (4, 32))]
    with torch.inference_mode():
        chosen = model(prompts).logits.argmax(-1).flatten().tolist()
    assert all(token in token_ids() for token in chosen)
    assert len(set(chosen)) > 20, "answers are not one token over and over"
    tokenizer = Tokenizer.load(tmp_path)
    assert all(tokenizer.decode([token]).strip() for token in chosen[:10])


@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_a_quantized_checkpoint_is_loaded_as_it_is_and_chooses_only_text(
    quantization: str, tmp_path: Path
) -> None:
    shape = replace(LLAMA_SMALL, quantization=quantization)
    write_checkpoint(shape, tmp_path, num_random=100_000)
    options = LoadOptions(device="cpu", dtype="float32", num_blocks=4, block_size=32)
    model = load_model(tmp_path, options, lambda _: None, lambda *_: None)
    config = read_config(tmp_path)
    found = {
        name: tensor.format for name, tensor in linear_specs(config, 0, make_recipe(config, options)).items()
    }
    assert {type(each) for each in found.values()} == {Float8 if quantization == "fp8" else Integers}
    batch = blank_batch([32], [32], torch.tensor([[1]], dtype=torch.int32))
    batch.token_ids = torch.tensor(token_ids(), dtype=torch.int32)[torch.randint(0, len(token_ids()), (32,))]
    batch.sample_rows = torch.arange(32, dtype=torch.int32)
    with torch.inference_mode():
        chosen = model.lm_head(model.decoder(batch)).argmax(-1).tolist()
    assert all(token in token_ids() for token in chosen)
    assert len(set(chosen)) > 10, "answers are not one token over and over"


@pytest.mark.parametrize(("shape", "billions"), [(LLAMA_8B, 8.03), (QWEN3_06B, 0.596)])
def test_the_shapes_are_those_of_their_names(shape: ModelShape, billions: float) -> None:
    config = parse_config(Fields("config.json", shape.config))
    assert sum(map(prod, expected_shapes(config).values())) / 1e9 == pytest.approx(billions, rel=0.005)
    assert (config.attentions[0].q_norm is not None) == (shape is QWEN3_06B)


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


def test_a_config_has_all_sizes_of_its_model() -> None:
    llama = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14_336,
        "vocab_size": 128_256, "max_position_embeddings": 65_536, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
        "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
        "bos_token_id": 256, "eos_token_id": 257, "torch_dtype": "bfloat16",
    }  # fmt: skip
    assert LLAMA_8B.config == llama
    assert LLAMA_1B.config == llama | {
        "hidden_size": 2048, "num_hidden_layers": 16, "head_dim": 64, "intermediate_size": 8192,
        "tie_word_embeddings": True,
    }  # fmt: skip
    assert QWEN3_06B.config == llama | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28,
        "num_attention_heads": 16, "intermediate_size": 3072, "vocab_size": 151_936, "max_position_embeddings": 40_960,
        "tie_word_embeddings": True,
    }  # fmt: skip
    small = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 96, "vocab_size": 16_448, "max_position_embeddings": 1024,
    }  # fmt: skip
    assert LLAMA_SMALL.config == llama | small | {"head_dim": 16}
    assert QWEN3_SMALL.config == QWEN3_06B.config | small | {"head_dim": 24}


@pytest.mark.parametrize(("shape", "group_size"), [(LLAMA_8B, 128), (LLAMA_SMALL, 32)])
def test_a_config_says_how_its_weights_are_stored(shape: ModelShape, group_size: int) -> None:
    assert replace(shape, quantization="fp8").config == shape.config | {
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "ignored_layers": ["lm_head"],
        }
    }
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group_size}
    assert replace(shape, quantization="int4").config["quantization_config"] == {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


@pytest.mark.parametrize(
    ("mode", "shapes", "sizes"),
    [
        ("full", (LLAMA_8B, LLAMA_1B), ((1, 8, 32), 4, 0.8, 256)),
        ("quick", (LLAMA_8B, LLAMA_1B), ((1, 8, 32), 4, 0.8, 128)),
        ("dry", (LLAMA_SMALL, replace(LLAMA_SMALL, num_layers=1)), ((1, 3), 4, 0.8, 40)),
    ],
)
def test_a_smaller_model_drafts_for_the_larger(
    mode: str, shapes: tuple[ModelShape, ModelShape], sizes: tuple[object, ...]
) -> None:
    *found, of_drafts = speculation(mode)
    assert (*found,) == shapes
    assert astuple(of_drafts) == sizes


@pytest.mark.parametrize("quantization", [None, "fp8", "int4"])
def test_tensors_are_random_numbers_of_one_deviation(quantization: str | None, tmp_path: Path) -> None:
    """Norms are 1; rows of the vocabulary that are no text are twenty times smaller."""
    shape = replace(LLAMA_SMALL, quantization=quantization)
    write_checkpoint(shape, tmp_path, num_random=100_000)
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
    size = (tmp_path / "model.safetensors").stat().st_size
    header = int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little")
    assert (header % 8, size) == (0, 8 + header + sum(tensor.nbytes for tensor in tensors.values()))


def test_each_tensor_starts_further_on_in_numbers_that_all_share() -> None:
    noise = torch.arange(10)
    assert torch.cat(list(checkpoints._repeated(25, noise, 27))).tolist() == [
        *range(7, 10),
        *range(10),
        *range(10),
        0,
        1,
    ]
    assert list(checkpoints._repeated(0, noise, 3)) == []
    floats, bits = checkpoints._Noise.of(4000).floats, checkpoints._Noise.of(4000).bits
    assert (floats.shape, floats.dtype, bits.shape, bits.dtype) == (
        (4000,),
        torch.bfloat16,
        (1000,),
        torch.int32,
    )
    assert torch.equal(floats, checkpoints._Noise.of(4000).floats)
    assert bits.double().mean().abs().item() < 1 << 28
    assert bits.min().item() < -(1 << 31) * 0.98
    assert bits.max().item() > (1 << 31) * 0.98
