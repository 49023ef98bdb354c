"""Models of GGUF files: their configs and weights are those of the directories they were made from.

Dequantised by the `gguf` library, the weights of a file are a checkpoint that transformers runs: the oracle of logits.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.engine.config import GenerationDefaults, LoadOptions
from penstock.engine.errors import CheckpointError
from penstock.engine.execution.loader import load_model
from penstock.engine.fields import Fields
from penstock.engine.kernels.batch import Batch, blank_batch
from penstock.engine.kernels.cpu.native import load_library
from penstock.engine.kernels.kv_cache import KVCache, KVLayout
from penstock.engine.kernels.linear import DenseLinear, IntegerLinear, Linear
from penstock.engine.kernels.ops import Kernels, reference_kernels
from penstock.engine.kernels.select import native_kernels
from penstock.engine.model.checkpoint import read_config, read_generation_defaults
from penstock.engine.model.files import open_files
from penstock.engine.model.gguf.container import SUPPORTED
from penstock.engine.model.tensors import check_tensors, make_recipe, row_order
from penstock.engine.model.weights import load_weights
from penstock.engine.program.decoders import make_decoder
from penstock.engine.program.native import NativeDecoder
from penstock.engine.program.parameters import AttentionWeights, MlpWeights
from penstock.engine.quant.integers import Factors, Integers
from penstock.engine.spec import Attention, HeadOrder, LatentAttention, Rows
from tests.engine.checkpoints import FAMILIES, make_checkpoint, save_tensors
from tests.engine.configs import spread, with_attention, with_spec
from tests.engine.families import TINY
from tests.engine.gguf_files import ggml_name, same, write_family, write_gguf
from tests.engine.gguf_writing import Types
from tests.engine.model.test_transformer import oracle_logits

CPU = torch.device("cpu")
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 2}
"""Rows of whole blocks of 256."""

TYPES = [name for name in SUPPORTED if name not in ("F32", "F16", "BF16")]

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True, "rope_scaling": None}),
    "llama, tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama, linear rope": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "qwen2, own head": ("qwen2", {"tie_word_embeddings": False}),
}


def like_q4_k_m(name: str) -> str:
    """The mix of types that most files have: some of v and down in Q6_K, and the head."""
    return "Q6_K" if "attn_v" in name or "ffn_down" in name or name == "output.weight" else "Q4_K"


def like_iq4_xs(name: str) -> str:
    """The mix of these files, and MXFP4 for some: tables that are multiplied alone or beside integers."""
    if "attn_v" in name or name == "output.weight":
        return "Q5_K"
    return "IQ4_NL" if "ffn_down" in name else "MXFP4" if "attn_output" in name else "IQ4_XS"


def like_q2_k(name: str) -> str:
    return "Q3_K" if "attn_v" in name or "ffn_down" in name else "Q6_K" if name == "output.weight" else "Q2_K"


def all_types(name: str) -> str:
    """Each matrix has another type, so that nearly all that are multiplied together differ."""
    return TYPES[sum(name.encode()) % len(TYPES)]


def beside_floats(name: str) -> str:
    """Quantized matrices that are multiplied together with matrices in floating point."""
    floats = {"attn_v": "F16", "ffn_up": "BF16", "blk.0.attn_q": "F32", "blk.1.attn_k": "F16"}
    return next((type for part, type in floats.items() if part in name), "Q8_0")


def make_kernels(*, unpacked: bool) -> Kernels:
    """torch's, with linear maps that multiply with what the integers stand for, or with the integers."""
    kernels = reference_kernels(CPU, torch.float32)

    def linear(tensors: Any, format: Any, bias: Tensor | None, *, gated: bool = False) -> Linear:  # noqa: ARG001
        return DenseLinear(format.unpack(tensors).float(), bias)

    return replace(kernels, linear=linear) if unpacked else kernels


# Memory


@pytest.mark.parametrize("mix", [same("Q4_0"), same("Q6_K"), like_q4_k_m])
def test_weights_take_at_most_a_tenth_more_than_in_the_file(mix: Types, tmp_path: Path) -> None:
    """Queries, keys and values of different types, too, which become one: shapes are an eighth of an 8 B Llama's."""
    sizes: dict[str, Any] = {
        "hidden_size": 512,
        "intermediate_size": 1792,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    }
    folder = make_checkpoint("llama", tmp_path, head_dim=64, tie_word_embeddings=True, **sizes)
    path = write_gguf(folder, tmp_path / "model.gguf", mix)
    model = load_model(path, LoadOptions(device="cpu", num_threads=1), lambda _: None, lambda *_: None)
    assert model.kernels.name == "native"
    assert model.memory.weights <= 1.1 * sum(entry.num_bytes for entry in open_files(path).entries.values())


# Configs


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_config_is_that_of_the_directory(variant: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[variant]
    folder = make_checkpoint(family, tmp_path, **overrides)
    expected = read_config(folder)
    found = read_config(write_gguf(folder, tmp_path / "model.gguf"))
    if expected.spec.ropes[0].scaling == "llama3":
        assert found.spec.ropes[0].scaling == "factors"
        expected = with_spec(expected, ropes=found.spec.ropes)
    architecture = expected.architecture.replace("Mistral", "Llama")
    if architecture == "LlamaForCausalLM":
        expected = with_attention(expected, is_interleaved=True)
    expected = with_spec(expected, norm_eps=pytest.approx(1e-5))
    assert found == replace(expected, architecture=architecture)


@pytest.mark.parametrize(("type", "dtype"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16")])
def test_the_type_of_a_model_is_that_of_its_matrices(type: str, dtype: str, tmp_path: Path) -> None:
    path = write_gguf(make_checkpoint("llama", tmp_path), tmp_path / "model.gguf", same(type))
    config = read_config(path)
    assert (config.dtype, config.quantization) == (dtype, None)


def test_ends_are_all_that_the_file_names_or_that_are_known_to_end_a_turn(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)

    def ends(**entries: Any) -> tuple[int, ...]:
        return read_config(write_gguf(folder, tmp_path / "model.gguf", **entries)).eos_token_ids

    end = 1  # <|end|>
    assert ends() == (end,)
    assert ends(tokenizer__ggml__eos_token_id=7) == (7, end)
    assert ends(tokenizer__ggml__eot_token_id=8, tokenizer__ggml__eom_token_id=9) == (end, 8, 9)
    assert ends(tokenizer__ggml__eot_token_id=512) == (end,)
    assert ends(tokenizer__ggml__eos_token_id=None, tokenizer__ggml__token_type=[1] * 512) == ()
    tokens = ["<end_of_turn>", "[|endofturn|]", *(f"<{number}>" for number in range(2, 512))]
    assert ends(tokenizer__ggml__tokens=tokens, tokenizer__ggml__token_type=[3, 1] * 256) == (end, 0)
    # gpt-oss's answers have messages that end in it.
    messages = ["<|end|>", "<|start|>", "<|return|>", "<|call|>", *tokens[4:]]
    fields: dict[str, Any] = {"tokenizer__ggml__tokens": messages, "tokenizer__ggml__token_type": [3] * 512}
    assert ends(**fields, tokenizer__ggml__eos_token_id=2) == (2, 3)


def test_recommended_sampling_is_read(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    sampling = {"temp": 0.5, "top_p": 0.75, "top_k": 20, "min_p": 0.125, "penalty_repeat": 1.5}
    entries = {f"general__sampling__{name}": value for name, value in sampling.items()}
    path = write_gguf(folder, tmp_path / "model.gguf", **entries)  # type: ignore[arg-type]
    assert read_generation_defaults(path) == GenerationDefaults(
        temperature=0.5, top_p=0.75, top_k=20, min_p=0.125, repetition_penalty=1.5
    )
    assert read_generation_defaults(write_gguf(folder, tmp_path / "model.gguf")) == GenerationDefaults()


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (
            {"general__architecture": "gemma3n"},
            "general.architecture gemma3n is not supported; only llama",
        ),
        ({"llama__expert_count": 8}, "llama.expert_used_count is missing"),
        ({"llama__block_count": None}, "llama.block_count is missing"),
        ({"llama__embedding_length": "many"}, "llama.embedding_length must be a whole number, not 'many'"),
        ({"llama__attention__head_count": [4, 4]}, "llama.attention.head_count must be a whole number"),
        ({"llama__attention__head_count_kv": [2] * 9}, "head_count_kv has 9 entries for 3 layers"),
        ({"llama__attention__head_count_kv": 0}, "head_count_kv must be between 1 and"),
        ({"llama__attention__head_count_kv": 3}, "4 heads cannot share 3 key-value heads"),
        ({"llama__attention__layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
        ({"llama__context_length": 2**31}, "llama.context_length must be between 1 and"),
        ({"llama__rope__dimension_count": 8}, "llama.rope.dimension_count is 8, and only heads .* all 16"),
        (
            {"llama__rope__scaling__type": "longrope"},
            "llama.rope.scaling.type 'longrope' is not supported; .* none, linear, yarn",
        ),
        ({"llama__rope__scaling__type": "linear"}, "'linear' is not supported beside rope_freqs.weight"),
        ({"llama__attention__scale": 0.5}, "llama.attention.scale is not supported"),
        ({"tokenizer__ggml__tokens": None}, "tokenizer.ggml.tokens is missing"),
        (
            {"llama__block_count": 4},
            r"tensor blk\.3\.attn_norm\.weight is missing; the metadata says num_hidden_layers 4",
        ),
        (
            {"llama__feed_forward_length": 96},
            r"blk\.0\.ffn_gate\.weight has shape \[112, 64\], and the metadata says",
        ),
    ],
)
def test_a_model_that_cannot_be_served_is_one_line(
    tmp_path: Path, entries: dict[str, Any], said: str
) -> None:
    path = write_gguf(make_checkpoint("llama", tmp_path), tmp_path / "model.gguf", **entries)
    with pytest.raises(CheckpointError, match=said) as caught:
        check_tensors(read_config(path), open_files(path))
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_factors_of_the_frequencies_are_finite_and_as_many_as_there_are(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path, num_hidden_layers=1)
    path = write_gguf(folder, tmp_path / "model.gguf")
    content = bytearray(path.read_bytes())
    tensor = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "rope_freqs.weight")
    content[tensor.data_offset : tensor.data_offset + 4] = np.float32("nan").tobytes()
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight has a factor that is not finite"):
        read_config(path)
    wide = write_gguf(
        folder, tmp_path / "model.gguf", llama__attention__key_length=32, llama__rope__dimension_count=32
    )
    with pytest.raises(
        CheckpointError, match=r"rope_freqs\.weight is F32 of shape \[8\], and it must be F32 of shape \[16\]"
    ):
        read_config(wide)


@pytest.mark.parametrize("type", ["IQ1_S", "IQ2_XXS", "IQ3_S", "TQ1_0", "NVFP4", "Q1_0"])
def test_a_type_that_is_not_supported_is_named_with_its_tensor(type: str, tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path, **WIDE)
    path = write_gguf(folder, tmp_path / "model.gguf", lambda name: type if "0.ffn_up" in name else "Q8_0")
    said = rf"blk\.0\.ffn_up\.weight is {type}, which is not supported; supported are F32"
    with pytest.raises(CheckpointError, match=said):
        read_config(path)


def test_a_type_that_nobody_knows_is_named_by_its_number(tmp_path: Path) -> None:
    path = write_gguf(make_checkpoint("llama", tmp_path, **WIDE), tmp_path / "model.gguf", same("Q8_0"))
    content, name = bytearray(path.read_bytes()), b"blk.0.ffn_up.weight"
    at = content.index(name) + len(name) + 4 + 2 * 8  # behind the number of dimensions and both of them
    assert content[at] == gguf.GGMLQuantizationType.Q8_0
    content[at] = 77
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_up\.weight is type 77, which is not supported"):
        read_config(path)


def test_a_scale_that_is_not_finite_is_named_with_its_tensor(tmp_path: Path) -> None:
    path = write_gguf(
        make_checkpoint("qwen2", tmp_path, intermediate_size=128), tmp_path / "model.gguf", same("Q8_0")
    )
    content = bytearray(path.read_bytes())
    tensor = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "blk.0.attn_v.weight")
    content[tensor.data_offset : tensor.data_offset + 2] = np.float16("inf").tobytes()
    path.write_bytes(content)
    said = rf"^{path}: blk\.0\.attn_v\.weight has scales that are not finite$"
    with pytest.raises(CheckpointError, match=said):
        load_model(path, LoadOptions(device="cpu", num_blocks=8), lambda _: None, lambda *_: None)


def test_what_is_quantized_is_not_quantized_again(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path, intermediate_size=128)
    options = LoadOptions(quantize="int8")
    quantized = read_config(write_gguf(folder, tmp_path / "model.gguf", same("Q8_0")))
    with pytest.raises(
        CheckpointError, match="--quantize int8: the checkpoint is quantized already, quant_method gguf"
    ):
        make_recipe(quantized, options)
    assert make_recipe(read_config(write_gguf(folder, tmp_path / "model.gguf")), options).quantization


# Weights


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("num_parts", [1, 3])
def test_tensors_are_those_of_the_directory(variant: str, num_parts: int, tmp_path: Path) -> None:
    family, overrides = VARIANTS[variant]
    folder = make_checkpoint(family, tmp_path, **overrides)
    expected, found = (
        open_files(folder),
        open_files(write_gguf(folder, tmp_path / "model.gguf", num_parts=num_parts)),
    )
    assert found.entries.keys() == expected.entries.keys()
    for name in expected.entries:
        tensor = found.read(name)
        if family in ("llama", "mistral") and (".q_proj." in name or ".k_proj." in name):
            head_dim = read_config(folder).head_dim
            tensor = tensor[row_order(Rows(name, (len(tensor),), HeadOrder(head_dim, head_dim, True)))]
        assert torch.equal(tensor, expected.read(name)), name
        assert found.own_name(name) == ggml_name(name)


@pytest.mark.parametrize(
    ("family", "types"),
    [
        ("llama", same("Q8_0")), ("mistral", like_q4_k_m), ("qwen2", like_q4_k_m), ("qwen3", same("Q5_K")),
        ("llama", same("Q4_0")), ("qwen2", same("Q6_K")), ("qwen3", same("Q5_1")), ("mistral", same("BF16")),
        ("llama", like_iq4_xs), ("qwen3", like_q2_k), ("qwen2", same("MXFP4")), ("mistral", all_types),
        ("llama", beside_floats), ("qwen2", beside_floats),
    ],
)  # fmt: skip
def test_logits_are_those_of_transformers_on_the_dequantised_weights(
    family: str, types: Any, tmp_path: Path
) -> None:
    folder = make_checkpoint(family, tmp_path, **WIDE)
    path = write_gguf(folder, tmp_path / "model.gguf", types)
    dequantised = {tensor.name: _dequantise(tensor) for tensor in gguf.GGUFReader(path).tensors}
    config = json.loads((folder / "config.json").read_text())
    names = list(open_files(folder).entries)
    save_tensors(folder, {name: _as_torch(name, dequantised[ggml_name(name)], config) for name in names})
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.randint(3, 300, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = oracle(ids).logits[0]
    found = _logits(path, ids[0], make_kernels(unpacked=True))
    assert torch.allclose(found, expected, atol=2e-4 * float(expected.abs().max()))
    if read_config(path).quantization is not None:
        rounded = _logits(path, ids[0], make_kernels(unpacked=False))  # activations have 8 bits
        assert float((rounded - expected).norm() / expected.norm()) < 0.05
        native = _logits(path, ids[0], native_kernels(load_library(print).start_team(1), torch.float32))
        assert float((native - rounded).norm() / expected.norm()) < 0.02


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_floats_beside_integers_stay_as_they_are_unless_a_type_is_asked_for(
    dtype: str, tmp_path: Path
) -> None:
    folder, floats = make_checkpoint("llama", tmp_path, **WIDE), {"attn_output": "F32", "ffn_down": "F16"}
    path = write_gguf(
        folder,
        tmp_path / "model.gguf",
        lambda name: next((type for part, type in floats.items() if part in name), "Q8_0"),
    )
    options = LoadOptions(device="cpu", dtype=dtype, num_blocks=8, num_threads=1)
    model = load_model(path, options, lambda _: None, lambda *_: None)
    assert isinstance(model.decoder, NativeDecoder)
    for field, name in (("o", "self_attn.o_proj"), ("down", "mlp.down_proj")):
        stored = open_files(path).read(f"model.layers.1.{name}.weight")
        expected = stored if dtype == "auto" else stored.bfloat16()
        assert torch.equal(model.decoder.linears[1][field].dense(), expected.float())


OF_GGUF: dict[str, dict[str, Any]] = {
    **{family: {} for family in TINY},
    "Gemma 2": {"query_pre_attn_scalar": 24},
    "Gemma 3": {"query_pre_attn_scalar": 24, "num_hidden_layers": 6, "layer_types": None},
    "Gemma 4 E": {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 512},
    "Granite 4, dense": {"position_embedding_type": "rope", "shared_intermediate_size": 128},
}
"""What the converter has no key for is as in the models that people know."""


@pytest.mark.parametrize("type", ["F32", "Q8_0"])
@pytest.mark.parametrize("family", OF_GGUF)
def test_logits_of_a_family_are_those_of_transformers(family: str, type: str, tmp_path: Path) -> None:
    folder = TINY[family].make(tmp_path, intermediate_size=128, **OF_GGUF[family])
    file = folder / "model.safetensors"
    save_file(
        {name: _rounded(tensor, type) for name, tensor in load_file(file).items()}, file, {"format": "pt"}
    )
    path = write_family(folder, tmp_path / "model.gguf", same(type))
    ids = [7 * i % 390 + 3 for i in range(90)]
    expected = oracle_logits(folder, ids)
    found = _logits(path, torch.tensor(ids), make_kernels(unpacked=True))
    assert float((found - expected).abs().max()) <= 1e-4 * max(1.0, float(expected.abs().max()))
    if type == "Q8_0":
        assert read_config(path).quantization is not None
        # Activations have 8 bits, in both; a last bit may round some of them to the next integer.
        rounded = _logits(path, torch.tensor(ids), make_kernels(unpacked=False))
        team = load_library(print).start_team(1)
        native = _logits(path, torch.tensor(ids), native_kernels(team, torch.float32))
        assert float((native - rounded).norm() / expected.norm()) < 0.03


@pytest.mark.parametrize(("family", "kind"), [("Qwen 2", "qwen2vl"), ("Qwen 3", "qwen3vl")])
def test_the_text_part_of_a_model_that_sees_images(family: str, kind: str, tmp_path: Path) -> None:
    folder = TINY[family].make(tmp_path)
    sections: dict[str, Any] = {f"{kind}__rope__dimension_sections": [8, 2, 2, 0]}
    path = write_family(folder, tmp_path / "model.gguf", kind=kind, **sections)
    ids = [7 * i % 390 + 3 for i in range(90)]
    expected = oracle_logits(folder, ids)
    found = _logits(path, torch.tensor(ids), make_kernels(unpacked=True))
    assert float((found - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


def test_what_the_metadata_leave_out_is_as_llama_cpp_has_it(tmp_path: Path) -> None:
    def attentions(family: str, **metadata: Any) -> tuple[Attention | LatentAttention, ...]:
        folder = TINY[family].make(tmp_path / family)
        return read_config(write_family(folder, tmp_path / "model.gguf", **metadata)).attentions

    def windows(family: str, **metadata: Any) -> list[int]:
        return [attention.window for attention in attentions(family, **metadata)]

    unsaid: dict[str, Any] = {"gemma2__attention__sliding_window": None, "gemma2__context_length": 8192}
    assert windows("Gemma 2", **unsaid) == [4096, 0, 4096, 0]
    assert windows("Gemma 3", gemma3__attention__sliding_window_pattern=2) == [24, 0, 24]
    assert windows("Gemma 3", gemma3__attention__sliding_window_pattern=[True, False, True]) == [24, 0, 24]
    assert windows("Gemma 3", gemma3__attention__sliding_window=None) == [0, 0, 0]
    full = attentions(
        "EXAONE 4",
        exaone4__attention__sliding_window=None,
        exaone4__attention__sliding_window_pattern=None,
    )
    assert {(attention.window, attention.rope) for attention in full} == {(0, 0)}
    for depth, size in ((4, 24), (46, 64 // 4)):
        assert attentions("Gemma 2", gemma2__block_count=depth)[0].scale == size**-0.5
    with pytest.raises(CheckpointError, match="granite without positions is not supported"):
        attentions("Granite 3", granite__rope__scaling__finetuned=False)
    with pytest.raises(CheckpointError, match=r"glm4\.nextn_predict_layers is not supported"):
        attentions("GLM-4-0414", glm4__nextn_predict_layers=1)


def _rounded(tensor: Tensor, type: str) -> Tensor:
    """A matrix with weights that the type has."""
    if tensor.dim() == 1:
        return tensor
    kind = gguf.GGMLQuantizationType[type]
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), kind), kind))


def test_a_tied_head_multiplies_with_the_integers_of_the_embedding(tmp_path: Path) -> None:
    path = write_gguf(make_checkpoint("qwen2", tmp_path, **WIDE), tmp_path / "model.gguf", like_q4_k_m)
    config, files = read_config(path), open_files(path)
    recipe = make_recipe(config, LoadOptions())
    weights = load_weights(config, files, make_kernels(unpacked=False), lambda *_: None, recipe)
    assert isinstance(weights.lm_head, IntegerLinear)
    assert not weights.is_tied
    dequantised = next(t for t in gguf.GGUFReader(path).tensors if t.name == "token_embd.weight")
    assert isinstance(weights.embedding, Tensor)
    assert torch.equal(weights.embedding, _dequantise(dequantised))
    unpacked = load_weights(config, files, make_kernels(unpacked=True), lambda *_: None, recipe).lm_head
    assert isinstance(unpacked, DenseLinear)
    assert torch.equal(unpacked.weight, weights.embedding)


def test_parts_of_different_types_are_fused_in_their_common_format(tmp_path: Path) -> None:
    path = write_gguf(make_checkpoint("qwen2", tmp_path, **WIDE), tmp_path / "model.gguf", like_q4_k_m)
    config, files = read_config(path), open_files(path)
    formats: list[Any] = []
    kernels = make_kernels(unpacked=True)

    def linear(tensors: Any, format: Any, bias: Tensor | None, *, gated: bool = False) -> Linear:
        formats.append(format)
        return kernels.linear(tensors, format, bias, gated=gated)

    recipe = make_recipe(config, LoadOptions())
    weights = load_weights(config, files, replace(kernels, linear=linear), lambda *_: None, recipe)
    head, qkv, o, gate_up, down = formats[:5]
    assert qkv == Integers(6, 16, has_offset=True, factors=Factors.COUNTS)
    assert head == o == gate_up == Integers(4, 32, has_offset=True, factors=Factors.COUNTS)
    assert down == Integers(6, 16, factors=Factors.COUNTS)
    mixer = weights.layers[0].mixer
    assert isinstance(mixer, AttentionWeights)
    found = mixer.qkv
    assert isinstance(found, DenseLinear)
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    expected = torch.cat([_dequantise(read[f"blk.0.attn_{part}.weight"]) for part in "qkv"])
    assert torch.allclose(found.weight, expected, rtol=1e-6)
    feed_forward = weights.layers[0].feed_forward
    assert isinstance(feed_forward, MlpWeights)


def _dequantise(tensor: gguf.ReaderTensor) -> Tensor:
    return torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type)))


def _as_torch(name: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    """The tensor of a directory: row 2i of a head of llama's queries and keys becomes row i, row 2i + 1 the i-th after
    half of them."""
    kind = name.split(".")[-2]
    if config["model_type"] not in ("llama", "mistral") or kind not in ("q_proj", "k_proj"):
        return tensor
    heads = torch.arange(len(tensor)).view(-1, config["head_dim"])
    return tensor[torch.cat([heads[:, 0::2], heads[:, 1::2]], 1).flatten()]


def _logits(path: Path, ids: Tensor, kernels: Kernels) -> Tensor:
    config = read_config(path)
    recipe = make_recipe(config, LoadOptions())
    weights = load_weights(config, open_files(path), kernels, lambda *_: None, recipe)
    kv = KVCache(KVLayout.of(config, 16), 64, torch.float32, CPU)
    with torch.inference_mode():
        return weights.lm_head(
            make_decoder(config, weights, kernels, kv, 128)(spread(_whole(ids), kv.layout))
        )


def _whole(ids: Tensor) -> Batch:
    """A step that computes a whole sequence and wants the hidden states of all its tokens."""
    blocks = torch.arange(1, 2 + len(ids) // 16, dtype=torch.int32)
    batch = blank_batch([len(ids)], [len(ids)], blocks.unsqueeze(0))
    batch.token_ids = ids.int()
    batch.sample_rows = torch.arange(len(ids), dtype=torch.int32)
    return batch


def test_fields_have_lists_of_numbers() -> None:
    fields = Fields("x", {"good": [1, 0.5], "bad": [1, "2"], "worse": [float("nan")], "bool": [True]})
    assert fields.numbers("good") == [1, 0.5]
    assert fields.numbers("none") == []
    for name in ("bad", "worse", "bool"):
        with pytest.raises(CheckpointError, match=f"x: {name} must be a list of numbers"):
            fields.numbers(name)
