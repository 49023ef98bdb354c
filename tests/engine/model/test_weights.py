from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from penstock.engine.config import LoadOptions
from penstock.engine.errors import CheckpointError
from penstock.engine.execution.loader import load_model
from penstock.engine.kernels.linear import DenseLinear, IntegerLinear, Linear
from penstock.engine.kernels.ops import reference_kernels
from penstock.engine.model.files import open_files
from penstock.engine.model.parse import read_config
from penstock.engine.model.safetensors import TensorFiles
from penstock.engine.model.tensors import Recipe, check_tensors
from penstock.engine.model.weights import load_weights
from penstock.engine.program.parameters import AttentionWeights, LayerWeights, MlpWeights, Weights
from penstock.engine.quant.integers import Integers
from penstock.engine.quant.quantization import Quantization
from tests.engine.checkpoints import Config, make_checkpoint, make_config, random_tensors, save_tensors

CPU = torch.device("cpu")


def load(
    folder: Path,
    progress: list[tuple[int, int]] | None = None,
    quantization: Quantization | None = None,
) -> Weights:
    told = [] if progress is None else progress
    kernels = reference_kernels(CPU, torch.float32)
    return load_weights(
        read_config(folder),
        TensorFiles(folder),
        kernels,
        lambda done, total: told.append((done, total)),
        Recipe(quantization=quantization),
    )


def matrix(linear: Linear) -> Tensor:
    assert isinstance(linear, DenseLinear)
    return linear.weight


def table(weights: Weights) -> Tensor:
    assert isinstance(weights.embedding, Tensor)
    return weights.embedding


def mlp(layer: LayerWeights) -> MlpWeights:
    assert isinstance(layer.feed_forward, MlpWeights)
    return layer.feed_forward


def attention(layer: LayerWeights) -> AttentionWeights:
    assert isinstance(layer.mixer, AttentionWeights)
    return layer.mixer


def checkpoint_without(
    folder: Path, name: str, replacement: Tensor | None = None, **overrides: object
) -> Path:
    make_checkpoint("llama", folder)
    config = make_config("llama", **overrides)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = random_tensors(config, 0)
    del tensors[name]
    if replacement is not None:
        tensors[name] = replacement
    save_tensors(folder, tensors)
    return folder


def test_every_tensor_lands_where_it_belongs(tmp_path: Path) -> None:
    tensors = load_file(make_checkpoint("qwen3", tmp_path) / "model.safetensors")
    weights = load(tmp_path)
    assert torch.equal(table(weights), tensors["model.embed_tokens.weight"])
    assert torch.equal(matrix(weights.lm_head), table(weights))
    assert torch.equal(weights.final_norm, tensors["model.norm.weight"])
    for i, layer in enumerate(weights.layers):
        own = {name.removeprefix(f"model.layers.{i}."): t for name, t in tensors.items()}
        qkv = torch.cat([own[f"self_attn.{part}_proj.weight"] for part in "qkv"])
        gate_up = torch.cat([own["mlp.gate_proj.weight"], own["mlp.up_proj.weight"]])
        assert torch.equal(matrix(attention(layer).qkv), qkv)
        assert torch.equal(matrix(mlp(layer).gate_up), gate_up)
        assert torch.equal(matrix(attention(layer).o), own["self_attn.o_proj.weight"])
        assert torch.equal(matrix(mlp(layer).down), own["mlp.down_proj.weight"])
        assert layer.input_norm is not None
        assert layer.post_norm is not None
        assert torch.equal(layer.input_norm, own["input_layernorm.weight"])
        assert torch.equal(layer.post_norm, own["post_attention_layernorm.weight"])
        q_norm = attention(layer).q_norm
        assert q_norm is not None
        assert torch.equal(q_norm, own["self_attn.q_norm.weight"])


def test_shards_bring_the_same_as_one_file(tmp_path: Path) -> None:
    one = load(make_checkpoint("llama", tmp_path / "one"))
    many = load(make_checkpoint("llama", tmp_path / "many", num_shards=4))
    assert not (tmp_path / "many" / "model.safetensors").exists()
    assert torch.equal(table(one), table(many))
    assert torch.equal(matrix(one.lm_head), matrix(many.lm_head))
    assert torch.equal(matrix(attention(one.layers[2]).qkv), matrix(attention(many.layers[2]).qkv))


def test_what_transformers_itself_writes_can_be_read(tmp_path: Path) -> None:
    config = transformers.Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    weights = load(tmp_path)
    assert torch.equal(
        matrix(mlp(weights.layers[1]).down), model.model.layers[1].mlp.down_proj.weight.float()
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_dtype_is_read(tmp_path: Path, dtype: str) -> None:
    path = make_checkpoint("llama", tmp_path, dtype=dtype)
    tensors = load_file(path / "model.safetensors")
    assert tensors["model.norm.weight"].dtype == getattr(torch, dtype)
    assert torch.equal(table(load(path)), tensors["model.embed_tokens.weight"].float())


def test_progress_goes_up_to_the_end(tmp_path: Path) -> None:
    progress: list[tuple[int, int]] = []
    load(make_checkpoint("llama", tmp_path), progress)
    done = [done for done, _ in progress]
    assert done == sorted(set(done))
    assert len({total for _, total in progress}) == 1
    assert (
        done[-1]
        == progress[-1][1]
        == sum(t.nbytes for t in load_file(tmp_path / "model.safetensors").values())
    )


def test_weights_are_copies_and_the_file_may_go(tmp_path: Path) -> None:
    weights = load(make_checkpoint("llama", tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert table(weights).isfinite().all()
    assert matrix(mlp(weights.layers[0]).down).isfinite().all()


def test_tensors_that_are_not_needed_are_passed_over(tmp_path: Path) -> None:
    config = make_config("llama", tie_word_embeddings=True)
    make_checkpoint("llama", tmp_path, tie_word_embeddings=True)
    tensors = random_tensors(config, 0)
    tensors["lm_head.weight"] = torch.zeros(1)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.arange(3)
    save_tensors(tmp_path, tensors)
    weights = load(tmp_path)
    assert torch.equal(matrix(weights.lm_head), tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("name", "replacement", "overrides", "message"),
    [
        (
            "model.layers.1.mlp.up_proj.weight",
            None,
            {},
            r"tensor model\.layers\.1\.mlp\.up_proj\.weight is missing",
        ),
        ("lm_head.weight", None, {}, r"tensor lm_head\.weight is missing"),
        ("model.layers.0.self_attn.q_proj.bias", None, {"attention_bias": True}, r"q_proj\.bias is missing"),
        ("model.norm.weight", torch.zeros(63), {}, r"model\.norm\.weight has shape \[63\].*says \[64\]"),
        (
            "model.norm.weight",
            torch.zeros(64, dtype=torch.int8),
            {},
            r"model\.norm\.weight is I8.*only F32, BF16, F16",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    tmp_path: Path, name: str, replacement: Tensor | None, overrides: Config, message: str
) -> None:
    folder = checkpoint_without(tmp_path, name, replacement, **overrides)
    with pytest.raises(CheckpointError, match=message) as caught:
        check_tensors(read_config(folder), TensorFiles(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("keep", [0, 5, 300, -1])
def test_a_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    file = make_checkpoint("llama", tmp_path) / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated") as caught:
        TensorFiles(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "header",
    [b"[1, 2]", b"{", b'{"a": 3}', b'{"a": {"dtype": "F32", "shape": [2]}}', b"\xff\xff"],
)
def test_a_malformed_header_is_named(tmp_path: Path, header: bytes) -> None:
    make_checkpoint("llama", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        TensorFiles(tmp_path)


def test_offsets_that_do_not_fit_the_shape_are_named(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    header = b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(CheckpointError, match="a: 4 bytes cannot hold F32"):
        TensorFiles(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path, num_shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"model-00002-of-00003\.safetensors is missing; model\.safetensors\.index"
    ):
        TensorFiles(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"holds neither model\.safetensors nor"):
        TensorFiles(folder)
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is there, but only safetensors"):
        TensorFiles(folder)


def test_nothing_is_loaded_before_everything_is_checked(tmp_path: Path) -> None:
    folder = checkpoint_without(tmp_path, "lm_head.weight")
    said: list[object] = []
    with pytest.raises(CheckpointError):
        load_model(folder, LoadOptions(), said.append, lambda *told: said.append(told))
    assert said == []


def test_memory_is_told_before_the_first_byte_is_read(tmp_path: Path) -> None:
    said: list[object] = []
    options = LoadOptions(block_size=8, num_blocks=10, num_threads=1)
    model = load_model(
        make_checkpoint("llama", tmp_path), options, said.append, lambda *told: said.append(told)
    )
    first_read = next(i for i, told in enumerate(said) if isinstance(told, tuple))
    assert model.memory.text in said[:first_read]
    assert model.kv.num_blocks == 10


def test_more_positions_than_the_model_has_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    with pytest.raises(CheckpointError, match="max_model_len 513 is more than the 512 positions"):
        load_model(folder, LoadOptions(max_model_len=513), lambda _: None, lambda *_: None)


def assert_quantized(
    linear: Linear, weights: Sequence[Tensor], bias: Tensor | None, layer: int | None
) -> None:
    """The linear map multiplies by the integers of weights, in the format of their place; None is the head."""
    quantization = Quantization("int4")
    columns = weights[0].shape[1]
    format = quantization.head_format(columns) if layer is None else quantization.layer_format(layer, columns)
    assert isinstance(linear, IntegerLinear)
    assert isinstance(format, Integers)
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(0))
    joined = format.join([format.quantize(weight) for weight in weights])
    assert torch.equal(linear(x), IntegerLinear(joined, format, bias)(x))


@pytest.mark.parametrize("tied", [True, False])
def test_linear_maps_are_quantized_as_they_are_loaded(tmp_path: Path, tied: bool) -> None:
    make_checkpoint("qwen2", tmp_path, tie_word_embeddings=tied, intermediate_size=96)
    tensors = load_file(tmp_path / "model.safetensors")
    weights = load(tmp_path, quantization=Quantization("int4"))
    for i, layer in enumerate(weights.layers):
        own = {name.removeprefix(f"model.layers.{i}."): t for name, t in tensors.items()}
        qkv, biases = (
            [own[f"self_attn.{part}_proj.{kind}"] for part in "qkv"] for kind in ("weight", "bias")
        )
        gate_up = [own["mlp.gate_proj.weight"], own["mlp.up_proj.weight"]]
        assert_quantized(attention(layer).qkv, qkv, torch.cat(biases), i)
        assert_quantized(attention(layer).o, [own["self_attn.o_proj.weight"]], None, i)
        assert_quantized(mlp(layer).gate_up, gate_up, None, i)
        assert_quantized(mlp(layer).down, [own["mlp.down_proj.weight"]], None, i)
    head = tensors["model.embed_tokens.weight" if tied else "lm_head.weight"]
    assert_quantized(weights.lm_head, [head], None, None)
    assert torch.equal(table(weights), tensors["model.embed_tokens.weight"])
    assert not weights.is_tied, "the embedding must not be read out of the head's integers"


def test_groups_that_do_not_divide_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    make_checkpoint("llama", tmp_path)  # 112 inputs of down_proj
    with pytest.raises(CheckpointError, match=r"--quantize int4: groups of 64 do not divide .* 112 inputs"):
        load(tmp_path, told, Quantization("int4", 64))
    assert told == []


def test_a_model_without_an_output_head_is_found_by_its_bare_names(tmp_path: Path) -> None:
    """As sentence-transformers saves embedding models."""
    config = make_config("qwen3", tie_word_embeddings=True)
    tensors = {
        name.removeprefix("model."): tensor
        for name, tensor in random_tensors(config, 0).items()
        if name != "lm_head.weight"
    }
    save_tensors(tmp_path, tensors)
    files = open_files(tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(files.read(name), tensors["layers.1.mlp.down_proj.weight"])
    assert files.own_name(name) == "layers.1.mlp.down_proj.weight"
    assert all(name.startswith("model.") for name in files.entries)
