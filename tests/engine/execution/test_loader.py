"""Loading as a whole: which kernels a model gets, what memory it really takes, and how the progress goes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.engine.config import LoadOptions, ModelConfig
from penstock.engine.errors import CheckpointError, NotEnoughMemory
from penstock.engine.execution.loaded import LoadedModel
from penstock.engine.execution.loader import load_model
from penstock.engine.execution.memory import Budget, plan_memory, weight_bytes
from penstock.engine.fields import Fields
from penstock.engine.kernels import ops, select
from penstock.engine.kernels.batch import blank_batch
from penstock.engine.kernels.cpu import native
from penstock.engine.kernels.cpu.native import NativeLinear, NativeUnavailable
from penstock.engine.kernels.linear import DenseLinear, IntegerLinear, Linear
from penstock.engine.kernels.ops import Kernels
from penstock.engine.model.parse import parse_config, read_config
from penstock.engine.model.safetensors import TensorFiles
from penstock.engine.model.tensors import Recipe
from penstock.engine.model.weights import load_weights
from penstock.engine.program.interpreter import Interpreter
from penstock.engine.program.native import NativeDecoder
from penstock.engine.program.parameters import AttentionWeights, MlpWeights, Weights
from penstock.engine.quant.quantization import Quantization
from tests.engine.checkpoints import FAMILIES, make_checkpoint, make_config
from tests.engine.kernel_tables import stored_in
from tests.few import examples

CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@pytest.fixture(scope="module")
def team() -> native.Team:
    try:
        return native.load_library(lambda _: None).start_team(1)
    except NativeUnavailable as error:
        pytest.skip(str(error))


def load(folder: Path, said: list[str] | None = None, **options: object) -> LoadedModel:
    wanted = LoadOptions(**{"device": "cpu", "num_blocks": 8, "num_threads": 1, **options})  # type: ignore[arg-type]
    lines = [] if said is None else said
    return load_model(folder, wanted, lines.append, lambda *_: None)


# Which kernels


@pytest.mark.usefixtures("team")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_native_model_keeps_weights_and_cache_in_the_type_asked_for(tmp_path: Path, dtype: str) -> None:
    model = load(make_checkpoint("llama", tmp_path), dtype=dtype)
    assert isinstance(model.decoder, NativeDecoder)
    assert model.kernels.embedding_dtype == model.kernels.kv_dtype == DTYPES[dtype]
    assert model.kv.data.dtype == DTYPES[dtype]
    assert model.kernels.activation_dtype == torch.float32


@pytest.mark.usefixtures("team")
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_quantized_model_has_integers_and_an_embedding_in_16_bits(tmp_path: Path, name: str) -> None:
    model = load(make_checkpoint("qwen2", tmp_path, intermediate_size=128), quantize=name, kv_dtype="float32")
    assert isinstance(model.decoder, NativeDecoder)
    assert isinstance(model.lm_head, NativeLinear)
    assert model.lm_head.activation_dtype == torch.int8
    assert model.kernels.embedding_dtype.itemsize == 2
    assert model.kv.data.dtype == torch.float32
    quantization = Quantization(name)
    narrow = replace(stored_in(torch.float16), keeps_narrow=True)
    assert model.memory.weights == weight_bytes(model.config, narrow, Recipe(quantization=quantization))


@pytest.mark.usefixtures("team")
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_the_native_decoder_computes_with_the_integers_of_plain_torch(tmp_path: Path, name: str) -> None:
    """Both have the same integers, so that only a rounding to the next integer here and there tells them apart."""
    folder = make_checkpoint("llama", tmp_path, intermediate_size=96, dtype="float16")
    models = [load(folder, quantize=name, dtype="float32", block_size=size) for size in (16, 32)]
    assert [model.kernels.name for model in models] == ["native", "torch"]
    logits = []
    for model in models:
        batch = blank_batch([40], [40], torch.tensor([[1, 2, 3]], dtype=torch.int32))
        batch.token_ids = torch.arange(40, dtype=torch.int32) * 7
        batch.sample_rows = torch.arange(40, dtype=torch.int32)
        with torch.inference_mode():
            logits.append(model.lm_head(model.decoder(batch)))
    error = (logits[0] - logits[1]).square().mean().sqrt() / logits[1].square().mean().sqrt()
    assert error < 0.02


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"quantize": "int4"}, "--quantize int4: groups of 32 or 64 do not divide .* 112 inputs"),
        ({"quantize": "int8", "quantize_group_size": 128}, "--quantize int8: groups of 128 do not divide"),
    ],
)
def test_groups_that_do_not_divide_are_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        load(make_checkpoint("llama", tmp_path), **options)


@pytest.mark.parametrize(
    ("block_size", "line"),
    [
        (16, "model on 1 thread, native kernels for {} ({}), bfloat16"),
        (8, "model on cpu, torch kernels, float32"),
    ],
)
def test_what_computes_the_model_is_said(
    tmp_path: Path, team: native.Team, block_size: int, line: str
) -> None:
    said: list[str] = []
    load(make_checkpoint("llama", tmp_path), said, block_size=block_size, dtype="bfloat16")
    assert line.format(team.library.level, team.library.text) in said


@pytest.mark.parametrize("block_size", [1, 4, 8, 15, 17, 32])
def test_blocks_of_another_size_are_for_plain_torch(tmp_path: Path, block_size: int) -> None:
    said: list[str] = []
    model = load(make_checkpoint("llama", tmp_path), said, block_size=block_size, dtype="bfloat16")
    assert isinstance(model.decoder, Interpreter)
    assert model.kernels.name == "torch"
    assert model.kv.block_size == block_size
    assert model.kv.data.dtype == torch.float32
    assert sum("plain torch in float32 serves instead" in line for line in said) == 1


@pytest.mark.usefixtures("team")
@pytest.mark.parametrize("head_dim", range(4, 42, 2))
def test_head_sizes_of_multiples_of_8_are_native(head_dim: int) -> None:
    config = parse_config(Fields("config.json", make_config("llama", head_dim=head_dim)))
    said: list[str] = []
    kernels = select.select(config, CPU, torch.float16, LoadOptions(num_threads=1), said.append)
    assert (kernels.name == "native") == (head_dim % 8 == 0)
    assert len(said) == (kernels.name == "torch")
    assert kernels.embedding_dtype == (torch.float16 if kernels.name == "native" else torch.float32)


# What memory


def parts(weights: Weights) -> Iterator[Tensor | Linear]:
    yield from (weights.embedding, weights.final_norm, weights.lm_head)
    for layer in weights.layers:
        assert isinstance(layer.mixer, AttentionWeights)
        assert isinstance(layer.feed_forward, MlpWeights)
        norms = (layer.input_norm, layer.post_norm, layer.mixer.q_norm, layer.mixer.k_norm)
        yield from (layer.mixer.qkv, layer.mixer.o)
        yield from (layer.feed_forward.gate_up, layer.feed_forward.down)
        yield from (norm for norm in norms if norm is not None)


def real_bytes(weights: Weights) -> int:
    """Counts the bytes of all storages, shared ones once; packed linears count without biases."""
    storages: dict[int, int] = {}
    packed = 0
    for part in parts(weights):
        if isinstance(part, NativeLinear):
            packed += part.num_bytes
            continue
        tensors = [part] if isinstance(part, Tensor) else []
        if isinstance(part, IntegerLinear):
            packed += sum(tensor.nbytes for tensor in part._tensors.values())
        if isinstance(part, DenseLinear):
            tensors = [tensor for tensor in (part.weight, part.bias) if tensor is not None]
        for tensor in tensors:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return packed + sum(storages.values())


def weights_of(
    folder: Path, kernels: Kernels, quantization: Quantization | None = None
) -> tuple[ModelConfig, Weights]:
    config = read_config(folder)
    return config, load_weights(
        config, TensorFiles(folder), kernels, lambda *_: None, Recipe(quantization=quantization)
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_plain_torch_takes_exactly_what_was_estimated(tmp_path: Path, family: str, tied: bool) -> None:
    folder = make_checkpoint(family, tmp_path, tie_word_embeddings=tied)
    config, weights = weights_of(folder, ops.reference_kernels(CPU, torch.float32))
    assert real_bytes(weights) == weight_bytes(config, stored_in(torch.float32))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_weights_take_what_was_estimated_and_a_little_for_norms_and_padding(
    team: native.Team, tmp_path: Path, family: str, dtype: str
) -> None:
    folder = make_checkpoint(family, tmp_path, tie_word_embeddings=False)
    config, weights = weights_of(folder, select.native_kernels(team, DTYPES[dtype]))
    estimate = weight_bytes(config, stored_in(DTYPES[dtype]))
    assert 0.98 * estimate <= real_bytes(weights) <= 1.05 * estimate


@pytest.mark.parametrize("tied", [True, False])
def test_plain_torch_takes_exactly_what_was_estimated_for_8_bits(tmp_path: Path, tied: bool) -> None:
    folder = make_checkpoint("llama", tmp_path, tie_word_embeddings=tied)
    quantization = Quantization("int8")
    config, weights = weights_of(folder, ops.reference_kernels(CPU, torch.float32), quantization)
    assert real_bytes(weights) == weight_bytes(
        config, stored_in(torch.float32), Recipe(quantization=quantization)
    )


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_packed_integers_take_what_was_estimated_and_a_little_for_padding(
    team: native.Team, tmp_path: Path, name: str
) -> None:
    folder = make_checkpoint("llama", tmp_path, hidden_size=128, intermediate_size=256)
    quantization = Quantization(name)
    config, weights = weights_of(folder, select.native_kernels(team, torch.float16), quantization)
    narrow = replace(stored_in(torch.float16), keeps_narrow=True)
    estimate = weight_bytes(config, narrow, Recipe(quantization=quantization))
    assert 0.98 * estimate <= real_bytes(weights) <= 1.05 * estimate


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(1, 70), st.integers(1, 70), st.sampled_from(sorted(DTYPES)), st.booleans())
def test_a_packed_linear_is_padded_to_16_outputs_and_no_more(
    team: native.Team, rows: int, columns: int, dtype: str, gated: bool
) -> None:
    weight = torch.zeros(2 * rows if gated else rows, columns)
    linear = NativeLinear(team, weight, None, DTYPES[dtype], gated)
    padded = -(-rows // 16) * 16 * (2 if gated else 1)
    depth = -(-columns // 32) * 32 if linear.activation_dtype == torch.bfloat16 else columns  # a tile's
    assert linear.num_bytes == padded * depth * DTYPES[dtype].itemsize
    assert linear.out_features == rows


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_blocks", [2, 33])
def test_the_cache_takes_exactly_what_was_planned(tmp_path: Path, family: str, num_blocks: int) -> None:
    model = load(make_checkpoint(family, tmp_path), num_blocks=num_blocks)
    assert model.kv.data.nbytes == model.memory.kv
    assert model.kv.num_blocks == model.memory.num_blocks == num_blocks
    assert model.memory.num_tokens == (num_blocks - 1) * 16


@settings(max_examples=examples(100), deadline=None)
@given(
    st.integers(0, 1 << 26),
    st.integers(1, 64),
    st.integers(1, 300),
    st.integers(1, 512),
    st.none() | st.integers(0, 1 << 22),
)
def test_a_plan_fits_or_says_that_it_does_not(
    available: int, max_num_seqs: int, max_batch_tokens: int, max_model_len: int, kv_bytes: int | None
) -> None:
    config = parse_config(Fields("config.json", make_config("llama")))
    kernels = replace(
        ops.reference_kernels(CPU, torch.float32), embedding_dtype=torch.float16, kv_dtype=torch.float16
    )
    options = LoadOptions(
        max_num_seqs=max_num_seqs,
        max_batch_tokens=max_batch_tokens,
        max_model_len=max_model_len,
        kv_bytes=kv_bytes,
    )
    try:
        plan = plan_memory(config, kernels, options, Budget(available, 0.25)).check()
    except NotEnoughMemory:
        enough = plan_memory(config, kernels, options, Budget(1 << 40, 0.25))
        least = replace(enough, num_blocks=1 + -(-max_model_len // 16))
        budgeted = kv_bytes is not None and kv_bytes > least.kv
        assert available < least.weights + least.workspace + (enough.kv if budgeted else least.kv)
        return
    assert plan.weights + plan.workspace + plan.kv <= available
    assert plan.num_tokens >= max_model_len
    assert plan.num_blocks <= 1 + max_num_seqs * -(-max_model_len // 16)


# How the progress goes


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_shards", [1, 4])
@pytest.mark.parametrize("saved", ["float32", "bfloat16"])
def test_progress_goes_up_to_the_bytes_that_are_needed(
    tmp_path: Path, family: str, num_shards: int, saved: str
) -> None:
    folder = make_checkpoint(
        family, tmp_path, num_shards=num_shards, dtype=saved, attention_bias=family == "llama"
    )
    told: list[tuple[int, int]] = []
    options = LoadOptions(device="cpu", num_blocks=4, num_threads=1)
    model = load_model(folder, options, lambda _: None, lambda *pair: told.append(pair))
    total = weight_bytes(model.config, stored_in(DTYPES[saved]))
    assert {whole for _, whole in told} == {total}
    done = [bytes_done for bytes_done, _ in told]
    assert done == sorted(set(done))
    assert 0 < done[0] <= done[-1] == total
