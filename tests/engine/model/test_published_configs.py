"""What config.json files say as they are published: sparser, older and spelt otherwise than those of transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from penstock.engine.config import LoadOptions, ModelConfig
from penstock.engine.errors import CheckpointError
from penstock.engine.fields import Fields
from penstock.engine.model.families import FAMILIES, NOT_YET
from penstock.engine.model.parse import parse_config, read_config, read_generation_defaults
from penstock.engine.model.prediction import prediction_tensors
from penstock.engine.model.tensors import AS_IT_IS, expected_shapes, make_recipe
from penstock.engine.spec import Experts, Mamba2

WORLD = Path(__file__).parents[3].parent / "shared" / "world"
"""Metadata of published models, where somebody has collected them beside the repository."""

Entries = dict[str, Any]

SMALL: Entries = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}
LLAMA: Entries = {"architectures": ["LlamaForCausalLM"], **SMALL}
NEMOTRON: Entries = {
    **SMALL,
    "architectures": ["NemotronHForCausalLM"],
    "hybrid_override_pattern": "M*-",
    "time_step_min": 0.001,
    "time_step_max": 0.1,
    "time_step_floor": 1e-4,
}
GEMMA3: Entries = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}
DEEPSEEK: Entries = {
    **SMALL,
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
}
LFM2: Entries = {
    **{name: value for name, value in SMALL.items() if name != "intermediate_size"},
    "architectures": ["Lfm2ForCausalLM"],
    "layer_types": ["conv", "full_attention"],
}


def inside(architecture: str, kind: str, **outer: Any) -> Entries:
    return {"architectures": [architecture], "text_config": {**SMALL, "model_type": kind}, **outer}


def parse(entries: Entries) -> ModelConfig:
    return parse_config(Fields("config.json", entries))


def scaled(kind: str, factor: float, **more: Any) -> Entries:
    return {**LLAMA, "rope_scaling": {"type": kind, "factor": factor, **more}}


def steps(config: ModelConfig) -> set[tuple[float, float]]:
    return {mixer.step_limits for mixer in config.spec.states.values() if isinstance(mixer, Mamba2)}


def windows(config: ModelConfig) -> list[int]:
    return [attention.window for attention in config.attentions]


def heads(config: ModelConfig) -> tuple[int, int, int]:
    return config.num_heads, config.num_kv_heads, config.head_dim


QWEN2: Entries = {
    **LLAMA,
    "architectures": ["Qwen2ForCausalLM"],
    "use_sliding_window": True,
    "max_window_layers": 1,
}
GEMMA4 = inside("Gemma4ForConditionalGeneration", "gemma4_text", eos_token_id=[1, 106])

FACTS: list[tuple[Entries, Any, Any]] = [
    (NEMOTRON, steps, {(0.0, math.inf)}),
    ({**NEMOTRON, "time_step_limit": [0.0, math.inf]}, steps, {(0.0, math.inf)}),
    ({**NEMOTRON, "time_step_limit": [0.1, 2.0]}, steps, {(0.1, 2.0)}),
    (GEMMA3, lambda it: it.max_position, 131_072),
    (GEMMA3, lambda it: it.vocab_size, 262_208),
    (GEMMA3, heads, (8, 4, 256)),
    (GEMMA3, lambda it: it.eos_token_ids, (1, 106)),
    (GEMMA3, lambda it: it.spec.ties_embeddings, True),
    ({**LFM2, "block_ff_dim": 12_288}, lambda it: it.intermediate_size, 8192),
    ({**LFM2, "block_ff_dim": 512, "intermediate_size": 96}, lambda it: it.intermediate_size, 512),
    (LFM2, lambda it: it.intermediate_size, 8192),
    ({**LLAMA, "architectures": ["Ernie4_5_ForCausalLM"]}, lambda it: it.architecture, "Ernie4_5ForCausalLM"),
    ({**LLAMA, "architectures": ["LLaMAForCausalLM"]}, lambda it: it.architecture, "LlamaForCausalLM"),
    (
        {**GEMMA4, "text_config": {**GEMMA4["text_config"], "eos_token_id": 1}},
        lambda it: it.eos_token_ids,
        (1, 106),
    ),
    (GEMMA4, lambda it: it.eos_token_ids, (1, 106)),
    (
        inside("Mistral3ForConditionalGeneration", "mistral"),
        lambda it: it.architecture,
        "Mistral3ForConditionalGeneration",
    ),
    (inside("Mistral3ForConditionalGeneration", "ministral3"), heads, (4, 4, 128)),
    (inside("Mistral3ForConditionalGeneration", "mistral"), heads, (4, 4, 16)),
    (inside("Lfm2VlForConditionalGeneration", "lfm2"), lambda it: it.intermediate_size, 256),
    # Latents
    (DEEPSEEK, lambda it: it.attentions[0].scale, pytest.approx(40**-0.5 * (1 + 0.1 * math.log(40)) ** 2)),
    (DEEPSEEK, lambda it: it.spec.ropes[0].magnitude, 1.0),
    (DEEPSEEK, lambda it: it.max_position, 163_840),
    (
        {**DEEPSEEK, "rope_scaling": {**DEEPSEEK["rope_scaling"], "mscale": 0.5}},
        lambda it: it.spec.ropes[0].magnitude,
        pytest.approx((1 + 0.05 * math.log(40)) / (1 + 0.1 * math.log(40))),
    ),
    ({**DEEPSEEK, "rope_scaling": None}, lambda it: it.attentions[0].scale, 40**-0.5),
    ({**DEEPSEEK, "num_nextn_predict_layers": 0}, lambda it: it.spec.prediction, None),
    ({**DEEPSEEK, "num_nextn_predict_layers": 1}, lambda it: it.spec.prediction.is_told, True),
    # Lengths
    (scaled("yarn", 4, original_max_position_embeddings=4096), lambda it: it.max_position, 16_384),
    (scaled("yarn", 4.0, original_max_position_embeddings=1024), lambda it: it.max_position, 4096),
    (scaled("yarn", 4), lambda it: it.max_position, 16_384),
    (scaled("linear", 4), lambda it: it.max_position, 16_384),
    (scaled("linear", 4, original_max_position_embeddings=1024), lambda it: it.max_position, 4096),
    (scaled("dynamic", 2.5), lambda it: it.max_position, 10_240),
    (scaled("dynamic", 1.0, alpha=1000.0), lambda it: it.max_position, 4096),
    (scaled("llama3", 8, low_freq_factor=1, high_freq_factor=4), lambda it: it.max_position, 4096),
    # Windows
    ({**QWEN2, "sliding_window": 1024}, windows, [0, 1024]),
    ({**QWEN2, "sliding_window": 4095}, windows, [0, 4095]),
    ({**QWEN2, "sliding_window": 4096}, windows, [0, 0]),
    ({**LLAMA, "architectures": ["Phi3ForCausalLM"], "sliding_window": 262_144}, windows, [0, 0]),
    (
        {**scaled("yarn", 4), "architectures": ["MistralForCausalLM"], "sliding_window": 4096},
        windows,
        [4096, 4096],
    ),
]


@pytest.mark.parametrize(("entries", "fact", "value"), FACTS)
def test_entries_mean_what_they_mean_to_transformers(entries: Entries, fact: Any, value: object) -> None:
    assert fact(parse(entries)) == value


MODELOPT: Entries = {"quant_algo": "FP8", "producer": {"name": "modelopt", "version": "0.31.0"}}

REFUSED: list[tuple[Entries, str]] = [
    (
        inside("KimiK25ForConditionalGeneration", "deepseek_v32"),
        "text_config: model_type 'deepseek_v32' in KimiK25ForConditionalGeneration is known but not served yet: "
        "latent and sparse attention",
    ),
    (
        {**DEEPSEEK, "architectures": ["DeepseekV32ForCausalLM"]},
        "DeepseekV32ForCausalLM is known but not served yet: latent and sparse attention",
    ),
    ({**DEEPSEEK, "kv_lora_rank": 100}, "kv_lora_rank is 100, and not a multiple of qk_rope_head_dim, 16"),
    ({**DEEPSEEK, "moe_layer_freq": 2}, "moe_layer_freq 2 is not supported in this family"),
    (
        inside("Gemma3ForConditionalGeneration", "foo"),
        "text_config: model_type 'foo' in Gemma3ForConditionalGeneration is not supported",
    ),
    (
        inside("Qwen3_5MoeForConditionalGeneration", "glm_moe_dsa"),
        "known but not served yet: latent and sparse attention",
    ),
    (
        inside("Gemma4ForConditionalGeneration", "x").__or__({"text_config": {"model_type": 3}}),
        "model_type must be",
    ),
    ({"d_model": 64, "ssm_cfg": {"layer": "Mamba2"}}, "this is the layout of state-spaces' own code"),
    ({**LLAMA, "quantization_config": {"bits": 4}}, "quantization_config: quant_method is missing"),
    (scaled("yarn", 1e9), "rope_scaling: factor 1e\\+09 makes more than"),
    (scaled("dynamic", 0.0), "rope_scaling: factor must be greater than 0"),
    (
        {**GEMMA3, "text_config": {**GEMMA3["text_config"], "use_bidirectional_attention": True}},
        "use_bidirectional_attention True is not supported",
    ),
]


@pytest.mark.parametrize(("entries", "said"), REFUSED, ids=[said[:40] for _, said in REFUSED])
def test_what_is_not_served_is_named(entries: Entries, said: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^config\.json: .*{said}"):
        parse(entries)


# Files beside config.json


def write(folder: Path, **files: object) -> Path:
    """Writes files by their names, in which __ stands for the dot before json."""
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


ADDED = {"7": {"content": "<|im_end|>", "special": True}}
TOKENIZER: Entries = {
    "model": {"type": "BPE", "vocab": {"a": 0, "</s>": 3}, "merges": []},
    "added_tokens": [],
}

ENDS: list[tuple[Entries, tuple[int, ...]]] = [
    ({}, ()),
    ({"generation_config": {"eos_token_id": [5, 6]}}, (5, 6)),
    ({"tokenizer_config": {"eos_token": "<|im_end|>", "added_tokens_decoder": ADDED}}, (7,)),
    (
        {"tokenizer_config": {"eos_token": {"content": "<|im_end|>"}, "added_tokens_decoder": ADDED}},
        (7,),
    ),
    ({"tokenizer_config": {"eos_token": "</s>"}, "tokenizer": TOKENIZER}, (3,)),
    (
        {"tokenizer_config": {}, "special_tokens_map": {"eos_token": "</s>"}, "tokenizer": TOKENIZER},
        (3,),
    ),
    ({"tokenizer_config": {"eos_token": "<gone>"}, "tokenizer": TOKENIZER}, ()),
    ({"tokenizer_config": {"eos_token": None, "added_tokens_decoder": ADDED}}, ()),
    (
        {
            "generation_config": {"eos_token_id": 5},
            "tokenizer_config": {"eos_token": "<|im_end|>", "added_tokens_decoder": ADDED},
        },
        (5,),
    ),
]


@pytest.mark.parametrize(("files", "ends"), ENDS)
def test_a_text_ends_by_the_first_file_that_says_how(
    tmp_path: Path, files: Entries, ends: tuple[int, ...]
) -> None:
    assert read_config(write(tmp_path, config=LLAMA, **files)).eos_token_ids == ends


def test_modelopt_is_known_by_a_file_of_its_own_or_by_its_entry(tmp_path: Path) -> None:
    for quantization in ({**MODELOPT, "quant_method": "modelopt"}, MODELOPT):
        config = parse({**LLAMA, "quantization_config": quantization})
        assert config.quantization is not None
        assert config.quantization.text("quant_method") == "modelopt"
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    found = read_config(write(tmp_path, config=LLAMA, hf_quant_config=beside)).quantization
    assert found is not None
    assert (found.text("quant_method"), found.text("quant_algo")) == ("modelopt", "NVFP4")
    beside["quantization"] = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    assert read_config(write(tmp_path, config=LLAMA, hf_quant_config=beside)).quantization is None
    beside["quantization"] = {"quant_algo": "W4A8_AWQ"}
    config = read_config(write(tmp_path, config=LLAMA, hf_quant_config=beside))
    with pytest.raises(
        CheckpointError, match=r"hf_quant_config\.json: quantization: quant_algo w4a8_awq is not"
    ):
        make_recipe(config, LoadOptions(device="cpu"))


# All that was collected

UNSERVED = {
    "moe_latent_size": "Nemotron 3 Super and Ultra",
}
"""What may be refused of a family that is served, by what the line says."""


def folders() -> list[Path]:
    found = [*WORLD.glob("configs/*"), *WORLD.glob("configs-condensed/*")]
    return sorted(folder for folder in found if (folder / "config.json").is_file())


needs_world = pytest.mark.skipif(not WORLD.is_dir(), reason="no published configs lie beside the repository")


@needs_world
def test_every_published_config_is_read_or_refused_by_name() -> None:
    accepted = 0
    for folder in folders():
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        try:
            config = read_config(folder)
            make_recipe(config, LoadOptions(device="cpu"))
            read_generation_defaults(folder)
        except CheckpointError as error:
            said = str(error)
            assert "\n" not in said
            names = content.get("architectures") or ["ssm_cfg"]
            is_known = names[0] in NOT_YET or not content.get("architectures")
            assert is_known or any(name in said for name in [*NOT_YET.values(), *UNSERVED]), (
                folder.name,
                said,
            )
            continue
        accepted += 1
        assert config.architecture in FAMILIES
        assert steps(config) <= {(0.0, math.inf)}, folder.name
        assert all(window < config.max_position for window in windows(config)), folder.name
    assert accepted > 170


BILLIONS = {
    "deepseek-ai--DeepSeek-V2-Lite-Chat": (15.7, 0.0),
    "deepseek-ai--DeepSeek-V3": (671.0, 11.6),
    "moonshotai--Kimi-K2-Instruct": (1026.4, 0.0),
    "moonshotai--Kimi-K2.5": (1026.4, 0.0),
    "mistralai--Mistral-Small-4-119B-2603": (119.0, 0.0),
}
"""The parameters of the text models, and those of their own layers for multi-token prediction, without the embedding
and the head that are in these once more."""


@needs_world
@pytest.mark.parametrize("name", BILLIONS)
def test_models_with_latents_are_as_large_as_they_are_published(name: str) -> None:
    config = read_config(next(WORLD.glob(f"configs*/{name}")))
    own, drafting = BILLIONS[name]
    assert sum(map(math.prod, expected_shapes(config).values())) / 1e9 == pytest.approx(own, abs=0.05)
    tensors = (tensor for _, tensor in prediction_tensors(config, AS_IT_IS))
    assert sum(math.prod(one.known_shape) for one in tensors) / 1e9 == pytest.approx(drafting, abs=0.05)


def test_what_glm_flash_leaves_out_makes_it_as_large_as_it_is() -> None:
    """Its sizes are the defaults of transformers."""
    entries = transformers.Glm4MoeLiteConfig(architectures=["Glm4MoeLiteForCausalLM"]).to_dict()
    config = parse(entries)
    assert sum(map(math.prod, expected_shapes(config).values())) / 1e9 == pytest.approx(29.9, abs=0.1)
    assert config.num_heads == 20
    assert [isinstance(layer.feed_forward, Experts) for layer in config.layers] == [False, *[True] * 46]


# Entries that are wrong

DOZEN = (
    "HuggingFaceTB--SmolLM3-3B",
    "Qwen--Qwen3-32B-FP8-Static-PerTensor",
    "google--gemma-3-4b-it",
    "google--gemma-4-26B-A4B-it",
    "LiquidAI--LFM2-8B-A1B",
    "deepseek-ai--DeepSeek-V2-Lite-Chat",
    "deepseek-ai--DeepSeek-V3",
    "mistralai--Mistral-Small-4-119B-2603",
    "microsoft--Phi-3.5-mini-instruct",
    "mistralai--Ministral-3-3B-Instruct-2512",
    "nvidia--Nemotron-H-8B-Base-8K",
    "nvidia--Qwen3.6-27B-NVFP4",
    "openai--gpt-oss-20b",
    "tencent--Hunyuan-A13B-Instruct",
    "zai-org--GLM-4.5-Air",
)
OWN: dict[str, Entries] = {
    "Nemotron H": NEMOTRON,
    "Gemma 3": GEMMA3,
    "LFM2": {**LFM2, "block_ff_dim": 512},
    "DeepSeek V3": DEEPSEEK,
    "Qwen 2": {**QWEN2, "rope_scaling": {"type": "yarn", "factor": 4.0}},
    "modelopt": {**LLAMA, "quantization_config": {**MODELOPT, "ignore": ["lm_head"]}},
}
LEFT_OUT = object()
SPOILT: tuple[object, ...] = (LEFT_OUT, None, "unknown", [], {}, -1, True, [["x"]])
ALIASES = {
    "text_config": " is missing",
    "architectures": "architecture",
    "quantization_config": "quant_method",
}
"""What a line names in place of an entry that it is in, or follows from."""


def published(name: str) -> Entries:
    """The entries of a published config, of no more layers than tell."""
    path = next(WORLD.glob(f"configs*/{name}/config.json"))
    content: Entries = json.loads(path.read_text(encoding="utf-8"))
    content.pop("vision_config", None)
    quantization = content.get("quantization_config", {})
    quantization |= {name: own[:6] for name, own in quantization.items() if isinstance(own, list)}
    return shortened(content)


def shortened(entries: Entries) -> Entries:
    depth = entries.get("num_hidden_layers")
    if not isinstance(depth, int):
        return {name: shortened(own) if name == "text_config" else own for name, own in entries.items()}
    cut = {
        name: own[:6] if isinstance(own, list) and len(own) == depth else own for name, own in entries.items()
    }
    return {**cut, "num_hidden_layers": 6}


def spoilt(entries: Entries) -> Iterator[tuple[str, Entries]]:
    """Yields the config with each entry of each object in it left out, null, of a wrong type or unknown."""
    for name, own in entries.items():
        for value in SPOILT:
            rest = {other: kept for other, kept in entries.items() if other != name}
            yield name, rest if value is LEFT_OUT else {**rest, name: value}
        if isinstance(own, dict) and len(own) < 100:
            yield from ((inner, {**entries, name: changed}) for inner, changed in spoilt(own))


def check_spoilt(entries: Entries) -> None:
    for name, changed in spoilt(entries):
        try:
            make_recipe(parse(changed), LoadOptions(device="cpu"))
        except CheckpointError as error:
            said = str(error)
            assert "\n" not in said
            assert name in said or ALIASES.get(name, name) in said, (name, said)


@pytest.mark.parametrize("name", OWN)
def test_an_entry_that_is_wrong_is_named(name: str) -> None:
    check_spoilt(OWN[name])


@needs_world
@pytest.mark.parametrize("name", DOZEN)
def test_an_entry_that_is_wrong_in_a_published_config_is_named(name: str) -> None:
    check_spoilt(published(name))
