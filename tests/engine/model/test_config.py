from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.engine.config import GenerationDefaults, LoadOptions, ModelConfig
from penstock.engine.errors import CheckpointError
from penstock.engine.fields import Fields
from penstock.engine.model.parse import parse_config, read_config, read_generation_defaults
from penstock.engine.spec import Rope
from tests.engine.checkpoints import make_config


def parse(**overrides: object) -> ModelConfig:
    return parse_family("llama", **overrides)


def parse_family(family: str, **overrides: object) -> ModelConfig:
    return parse_config(Fields("config.json", make_config(family, **overrides)))


def write(folder: Path, config: object, generation: object = None) -> Path:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA3_ROPE = Rope(
    theta=500_000.0,
    scaling="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position=8192,
)


@pytest.mark.parametrize(
    ("written", "rope"),
    [
        ({"rope_theta": 5e5, "rope_scaling": None}, Rope(theta=5e5)),
        ({"rope_theta": 500000, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}, LLAMA3_ROPE),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}}, LLAMA3_ROPE),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}, LLAMA3_ROPE),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, Rope(theta=5e5)),
        ({"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 1.0}, Rope(theta=5e5)),
        ({"rope_theta": None}, Rope(theta=1e4)),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
            Rope(theta=1e4, scaling="linear", factor=2.0, original_max_position=512),
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            Rope(theta=1e4, scaling="dynamic", factor=2.0, original_max_position=512),
        ),
    ],
)
def test_rotary_embedding_as_transformers_4_and_5_write_it(written: dict[str, object], rope: Rope) -> None:
    assert parse(**{"rope_scaling": None, "rope_theta": None, **written}).spec.ropes == (rope,)


def test_sizes() -> None:
    config = parse_family("qwen3", num_hidden_layers=5, head_dim=48)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (5, 4, 2, 48)
    assert (config.q_size, config.kv_size) == (192, 96)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (64, 112, 512)
    assert config.max_position == 512


def test_a_missing_head_dim_follows_from_the_hidden_size() -> None:
    assert parse().head_dim == 16
    assert parse(head_dim=None).head_dim == 16
    assert parse_family("qwen3", head_dim=None).head_dim == 128


def test_missing_key_value_heads_are_as_many_as_heads() -> None:
    assert parse(num_key_value_heads=None).num_kv_heads == 4


@pytest.mark.parametrize(
    ("written", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": None, "torch_dtype": "float16"}, "float16"),
        ({"dtype": "torch.float16"}, "float16"),
        ({"dtype": None}, "float32"),
    ],
)
def test_dtype(written: dict[str, object], dtype: str) -> None:
    assert parse(**written).dtype == dtype


@pytest.mark.parametrize(
    ("eos", "generation", "found"),
    [
        (1, None, (1,)),
        ([1, 5], None, (1, 5)),
        (None, None, ()),
        (1, {"eos_token_id": [7, 1]}, (1, 7)),
        (None, {"eos_token_id": 9}, (9,)),
    ],
)
def test_end_of_sequence_ids_of_both_files(
    tmp_path: Path, eos: object, generation: object, found: tuple[int, ...]
) -> None:
    assert (
        read_config(write(tmp_path, make_config("llama", eos_token_id=eos), generation)).eos_token_ids
        == found
    )


def test_generation_defaults(tmp_path: Path) -> None:
    assert read_generation_defaults(tmp_path) == GenerationDefaults()
    write(
        tmp_path,
        {},
        {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_new_tokens": 512, "do_sample": True},
    )
    assert read_generation_defaults(tmp_path) == GenerationDefaults(
        temperature=0.6, top_p=0.9, top_k=20, max_new_tokens=512
    )


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            r"architecture GPT2LMHeadModel is not supported; .*Qwen3ForCausalLM",
        ),
        ({"architectures": None}, "architectures is missing"),
        (
            {"rope_scaling": {"rope_type": "ntk", "factor": 4.0}},
            "rope_type ntk is not supported; .*llama3",
        ),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters: factor is missing"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling: factor is missing"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"quantization_config": "gptq"}, "quantization_config must be an object"),
        ({"hidden_act": "gelu_fast"}, "hidden_act gelu_fast is not supported"),
        (
            {"layer_types": ["full_attention", "linear_attention"]},
            "layer_types linear_attention is not supported",
        ),
        ({"dtype": "float8_e4m3fn"}, "dtype float8_e4m3fn is not supported"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"hidden_size": "64"}, "hidden_size must be a whole number, not '64'"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps must be a number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
        ({"eos_token_id": "1"}, "eos_token_id must be a whole number or a list of them"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3 key-value heads"),
        ({"num_attention_heads": 0}, "num_attention_heads must be between 1 and"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list of strings"),
        ({"hidden_act": 3}, "hidden_act must be a string"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(written: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        parse(**written)
    assert "\n" not in str(caught.value)


def test_a_missing_directory_file_or_object_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere is not a directory"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        read_config(tmp_path)
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        read_config(write(tmp_path, "{"))
    with pytest.raises(CheckpointError, match=r"config\.json holds no JSON object"):
        read_config(write(tmp_path, "[]"))


@pytest.mark.parametrize("num_threads", [-1, 0, 1025, 1_000_000])
def test_a_number_of_threads_that_cannot_be_meant_is_refused(num_threads: int) -> None:
    with pytest.raises(ValueError, match=f"num_threads must be between 1 and 1024, not {num_threads}"):
        LoadOptions(num_threads=num_threads)
