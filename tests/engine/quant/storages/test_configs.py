"""The entries of quantization_config: which linear maps they mean, and which are refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torchao.quantization as ao
from compressed_tensors.utils.match import match_name
from transformers.quantizers.quantizers_utils import should_convert_module

from penstock.engine.config import QUANT_METHODS
from penstock.engine.errors import CheckpointError
from penstock.engine.quant.checkpoints import METHODS
from penstock.engine.quant.storage import PLAIN
from tests.engine.quant.storages.makers import (
    INT4,
    WAYS,
    Config,
    Way,
    awq,
    bnb4,
    compressed,
    fp8,
    gptq,
    modelopt,
    torchao,
)
from tests.engine.quant.storages.test_storages import storage_of

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
Q, K, UP, DOWN = (
    f"model.layers.1.{end}"
    for end in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "mlp.down_proj")
)
Q11 = Q.replace("1", "11", 1)
ALL = (EMBEDDING, HEAD, Q, Q11, K, UP, DOWN)


def test_every_method_that_config_json_may_name_is_read() -> None:
    assert set(METHODS) == {*QUANT_METHODS, "gguf"}, "and what a GGUF file says in its place"


INCLUDED: Config = {"include_input_output_embeddings": True}
GROUPS: Config = {"num_bits": 4, "strategy": "group", "group_size": 32}

PLAIN_ONES: list[tuple[Config, tuple[str, ...]]] = [
    (gptq().config, (EMBEDDING, HEAD)),
    (gptq(lm_head=True).config, (EMBEDDING,)),
    (
        gptq(modules_in_block_to_quantize=[["self_attn.q_proj"], ["mlp.up_proj"]]).config,
        (EMBEDDING, HEAD, K, DOWN),
    ),
    (gptq(modules_in_block_to_quantize=["mlp.up_proj"]).config, (EMBEDDING, HEAD, Q, Q11, K, DOWN)),
    (gptq(dynamic={r"-:.*\.11\.": {}, r"+:.*down": {"bits": 8}}).config, (EMBEDDING, HEAD, Q11)),
    (awq().config, (EMBEDDING, HEAD)),
    (awq(modules_to_not_convert=["mlp.down_proj"]).config, (EMBEDDING, HEAD, DOWN)),
    (awq(modules_to_not_convert=["self_attn"]).config, (EMBEDDING, HEAD, Q, Q11, K)),
    (awq(modules_to_not_convert=["model.layers.1"]).config, (EMBEDDING, HEAD, Q, K, UP, DOWN)),
    (fp8(block=True).config, (EMBEDDING, HEAD)),
    (fp8(block=False, ignored_layers=["lm_head", Q]).config, (EMBEDDING, HEAD, Q)),
    (fp8(block=True, modules_to_not_convert=[r"model.layers.\d+.mlp"]).config, (EMBEDDING, UP, DOWN)),
    (bnb4("nf4").config, (EMBEDDING, HEAD)),
    (bnb4("nf4", llm_int8_skip_modules=["lm_head", UP]).config, (EMBEDDING, HEAD, UP)),
    (compressed("pack-quantized", **GROUPS).config, (EMBEDDING, HEAD)),
    (
        compressed("pack-quantized", more={"ignore": [r"re:.*\.1\.mlp", Q]}, **GROUPS).config,
        (EMBEDDING, Q, UP, DOWN),
    ),
    (compressed("pack-quantized", more={"ignore": ["Linear"]}, **GROUPS).config, ALL),
    (compressed("dense", **GROUPS).config, ALL),
    (WAYS["ao-int8"].config, (EMBEDDING, HEAD)),
    ({**WAYS["ao-int8"].config, **INCLUDED}, (EMBEDDING,)),
    ({**WAYS["ao-int8"].config, **INCLUDED, "untie_embedding_weights": True}, (EMBEDDING, HEAD)),
    (
        {**torchao(ao.FqnToConfig({HEAD: ao.Int8WeightOnlyConfig()})).config, **INCLUDED},
        (EMBEDDING, Q, Q11, K, UP, DOWN),
    ),
    ({**WAYS["ao-int8"].config, "modules_to_not_convert": ["lm_head", K]}, (EMBEDDING, HEAD, K)),
    (modelopt("FP8", ignore=None).config, (EMBEDDING, HEAD)),
    (modelopt("FP8", ignore=[]).config, (EMBEDDING,)),
    (modelopt("FP8", ignore=["model.layers.lm_head"]).config, (EMBEDDING, HEAD)),
    (modelopt("FP8", ignore=["model.layers.1*"]).config, (EMBEDDING, Q, Q11, K, UP, DOWN)),
    (
        modelopt("FP8", ignore=["model.layers.1.mlp*", "model.layers.1.self_attn"]).config,
        (EMBEDDING, UP, DOWN),
    ),
    (
        modelopt("FP8", ignore=None, exclude_modules=["*.mlp.*", "lm_head"]).config,
        (EMBEDDING, HEAD, UP, DOWN),
    ),
    (modelopt("FP8", ignore=["model.language_model.layers.1.self_attn*"]).config, (EMBEDDING, Q, K)),
    (modelopt("FP8", ignore=["up_proj", "model.layers.?.mlp.down_proj"]).config, (EMBEDDING, DOWN)),
]


@pytest.mark.parametrize(("config", "plain"), PLAIN_ONES)
def test_linear_maps_that_are_not_quantized(config: Config, plain: tuple[str, ...]) -> None:
    assert tuple(name for name in ALL if storage_of(config, name) is PLAIN) == plain


FORMS = (
    "model.layers.1",
    "model.layers.1.",
    "model.layers.1.self_attn.",
    "model.layers.*.mlp",
    r"model.layers.\d+.mlp",
    r"model\.layers\.1\.mlp\.(up|down)_proj",
    "visual|lm_head",
    "self_attn.q_proj",
    "up_proj",
    "proj",
    "mlp.up",
    UP,
    "lm_head",
    "visual",
)
LISTS: dict[str, tuple[Callable[..., Way], str]] = {
    "awq": (awq, "modules_to_not_convert"),
    "fp8": (partial(fp8, block=True), "modules_to_not_convert"),
    "bitsandbytes": (partial(bnb4, "nf4"), "llm_int8_skip_modules"),
}


@pytest.mark.parametrize("method", LISTS)
def test_an_entry_excludes_what_it_does_in_transformers(method: str) -> None:
    make, field = LISTS[method]
    always = {EMBEDDING, HEAD} if method == "awq" else {EMBEDDING}
    for form in FORMS:
        config = make(**{field: [form]}).config
        plain = {name for name in ALL if storage_of(config, name) is PLAIN}
        assert plain == always | {name for name in ALL if not should_convert_module(name, [form])}, form


@pytest.mark.parametrize("form", ["layers.1.", "layers.1", ".1.", "1"])
def test_an_entry_may_be_some_of_a_name_as_the_programs_have_it_that_wrote_it(form: str) -> None:
    config = awq(modules_to_not_convert=[form]).config
    assert [storage_of(config, name) is PLAIN for name in (Q, Q11)] == [True, False]


def test_an_entry_is_ignored_as_compressed_tensors_does() -> None:
    for form in (*FORMS, *(f"re:{form}" for form in FORMS), r"re:.*mlp\.(up|down)_proj", "re:.*lm_head"):
        config = compressed("pack-quantized", more={"ignore": [form]}, **GROUPS).config
        plain = {name for name in ALL if storage_of(config, name) is PLAIN}
        assert plain == {EMBEDDING} | {name for name in ALL if match_name(name, form)}, form


def test_modelopt_may_have_an_algorithm_for_each_name() -> None:
    layers = {
        "model.language_model.layers.1.self_attn.q_proj": {"quant_algo": "FP8"},
        "model.language_model.layers.1.mlp": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        "lm_head": {"quant_algo": "NVFP4", "group_size": 16},
    }
    config = modelopt("MIXED_PRECISION", quantized_layers=layers, ignore=["mtp*"]).config
    kinds = [storage_of(config, name).name for name in (Q, K, UP, HEAD, Q11, EMBEDDING)]
    assert kinds == ["FP8, a scale for each tensor", "dense", "NVFP4", "NVFP4", "dense", "dense"]


def test_rules_of_gptq_change_what_they_name() -> None:
    config = gptq(dynamic={"+:.*down": {"bits": 8, "group_size": 64}, ".*mlp": {"sym": False}}).config
    assert storage_of(config, DOWN) == storage_of(gptq(8, 64).config)
    assert storage_of(config, UP) == storage_of(gptq(sym=False).config)
    assert storage_of(config, Q) == storage_of(gptq().config)


def test_a_name_goes_before_a_pattern_and_a_pattern_before_a_class() -> None:
    targets = {4: ["Linear"], 8: ["re:.*mlp"], 0: [UP]}
    groups = {}
    for bits, named in targets.items():
        group = {"targets": named, "weights": {**GROUPS, "num_bits": bits} if bits else None}
        groups[f"group_{bits}"] = group
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    assert storage_of(config, UP) is PLAIN
    formats = [storage_of(config, name).format(64, 64).name for name in (DOWN, Q, HEAD)]
    assert formats == ["int8", "int4", "int4"]


def test_an_embedding_can_be_a_target() -> None:
    config = compressed("pack-quantized", **GROUPS).config
    config["config_groups"]["group_0"]["targets"] = ["Embedding"]
    assert storage_of(config, EMBEDDING).format(512, 64).name == "int4"
    assert storage_of(config, Q) is PLAIN


def test_the_strategy_follows_from_the_group_size_where_it_is_missing() -> None:
    for size, strategy in ((None, "tensor"), (-1, "channel"), (32, "group")):
        config = compressed("int-quantized", num_bits=8, strategy="channel").config
        config["config_groups"]["group_0"]["weights"] = {"num_bits": 8, "group_size": size}
        known: Config = {"num_bits": 8, "strategy": strategy} | ({"group_size": 32} if size == 32 else {})
        assert storage_of(config, Q) == storage_of(compressed("int-quantized", **known).config, Q)


@pytest.mark.filterwarnings("ignore:Config Deprecation")
def test_torchao_has_a_config_for_each_name() -> None:
    four = ao.IntxWeightOnlyConfig(weight_dtype=INT4, granularity=ao.PerGroup(32))
    eight = ao.Int8WeightOnlyConfig()
    config = torchao(
        ao.FqnToConfig({UP: None, r"re:.*\.mlp\..*": four, f"{Q}.weight": four, "_default": eight})
    ).config
    assert storage_of(config, UP) is PLAIN
    assert [storage_of(config, name).name for name in (DOWN, Q, K)] == [
        "torchao, int4",
        "torchao, int4",
        "torchao, int8",
    ]
    only = torchao(ao.FqnToConfig({DOWN: four})).config
    assert storage_of(only, Q) is PLAIN


# What is refused


def ct(format: str, **weights: Any) -> Config:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}


def ao_config(kind: str, **data: Any) -> Config:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_data": data}}}


def kind(name: str, **data: Any) -> Config:
    return {"_type": name, "_data": data}


REFUSED: list[tuple[Config, str]] = [
    (gptq(3).config, "bits 3 is not supported; only 4 and 8 are"),
    ({**gptq().config, "bits": None}, "bits is missing"),
    ({**gptq().config, "group_size": 0}, "group_size must be between 1"),
    (
        {**gptq().config, "checkpoint_format": "marlin"},
        "checkpoint_format marlin is not supported; only gptq and gptq_v2",
    ),
    (gptq(dynamic={"(": {}}).config, r"dynamic has a malformed regular expression: '\('"),
    (gptq(dynamic={".*": {"bits": 2}}).config, r"dynamic: \.\*: bits 2 is not supported"),
    (
        gptq(modules_in_block_to_quantize=[[1]]).config,
        "modules_in_block_to_quantize must be a list of lists of strings",
    ),
    (gptq(4, 8).config, "groups of 8 are not served, only multiples of 16"),
    (gptq(4, 48).config, "groups of 48 do not divide a linear map's 64 inputs"),
    (awq(bits=8).config, "bits 8 is not supported; only 4 is"),
    (awq(version="gemv").config, "version gemv is not supported; only gemm is"),
    (awq(modules_to_not_convert=["["]).config, "modules_to_not_convert has a malformed regular expression"),
    (fp8(block=False, weight_block_size=[64, 128]).config, r"weight_block_size \[64, 128\] is not supported"),
    ({"quant_method": "bitsandbytes"}, "neither load_in_8bit nor load_in_4bit is true"),
    (
        bnb4("nf4", bnb_4bit_quant_type="int4").config,
        "bnb_4bit_quant_type int4 is not supported; only nf4 and fp4",
    ),
    (bnb4("nf4", bnb_4bit_quant_storage="int64").config, "bnb_4bit_quant_storage int64 is not supported"),
    ({"quant_method": "compressed-tensors"}, "config_groups is missing"),
    (
        ct("marlin-24", num_bits=4),
        "group_0: format marlin-24 with weights of type int, 4 bits, is not supported",
    ),
    (
        ct("pack-quantized", num_bits=3, strategy="channel"),
        "weights: num_bits 3 is not supported; only 4 and 8 are",
    ),
    (ct("pack-quantized", num_bits=4, strategy="block"), "strategy block is not supported"),
    (
        ct("float-quantized", type="float", num_bits=8, strategy="block", block_structure=[1, 128]),
        "block_structure",
    ),
    (ct("float-quantized", type="float", num_bits=8, symmetric=False), "symmetric false is not supported"),
    (ct("float-quantized", type="float", num_bits=6), "weights of type float, 6 bits, is not supported"),
    (
        {**ct("pack-quantized", num_bits=4), "sparsity_config": {"format": "sparse-24-bitmask"}},
        "only dense is",
    ),
    (
        {**ct("pack-quantized", num_bits=4), "transform_config": {"config_groups": {"R3": {}}}},
        "transform_config is not supported",
    ),
    ({**ct("pack-quantized", num_bits=4), "ignore": ["re:*"]}, "malformed regular expression"),
    (ct("nvfp4-pack-quantized", type="float", num_bits=4, group_size=16), "groups of 16 do not divide"),
    ({"quant_method": "modelopt"}, "quant_algo is missing"),
    (modelopt("W4A8_AWQ").config, "quant_algo w4a8_awq is not supported; only fp8, nvfp4"),
    (modelopt("FP8", ignore=[1]).config, "ignore must be a list of strings"),
    (modelopt("NVFP4", group_size=32).config, "group_size 32 is not supported; only 16 is"),
    (
        modelopt("MIXED_PRECISION", quantized_layers={Q: {"quant_algo": "MXFP8"}}).config,
        "quantized_layers: .*q_proj: quant_algo mxfp8 is not supported",
    ),
    (modelopt("MIXED_PRECISION", quantized_layers={Q: 8}).config, "q_proj must be an object"),
    (
        ao_config("Int4WeightOnlyConfig", int4_packing_format={"_data": "TILE_PACKED_TO_4D"}),
        "only plain is",
    ),
    (ao_config("UIntXWeightOnlyConfig"), "UIntXWeightOnlyConfig is not supported"),
    (ao_config("Int8WeightOnlyConfig", granularity=kind("PerBlock")), "PerBlock is not supported"),
    (ao_config("Int8WeightOnlyConfig", granularity=[]), "granularity must be an object or a list of them"),
    (
        ao_config("Float8WeightOnlyConfig", granularity=kind("PerBlock", block_size=[1, 128])),
        r"block_size \[1, 128\] is not supported",
    ),
]


JUNK: tuple[object, ...] = (None, True, -1, 7, 1e400, 10**20, "x", "[", [], [1], {}, {"a": 1})


def with_junk(config: Config) -> Iterator[Config]:
    """Copies of a config in which one entry, however deep, is something else."""
    for name, value in config.items():
        yield from ({**config, name: junk} for junk in JUNK)
        if isinstance(value, dict):
            yield from ({**config, name: changed} for changed in with_junk(value))


@pytest.mark.parametrize("label", WAYS)
def test_a_config_with_junk_is_read_or_refused(label: str) -> None:
    for config in with_junk(WAYS[label].config):
        with suppress(CheckpointError):
            storage = storage_of({**config, "quant_method": WAYS[label].config["quant_method"]}, Q)
            storage.format(64, 96)
            assert all(tensor.suffix for tensor in storage.tensors(64, 96))


@pytest.mark.parametrize(("config", "said"), REFUSED, ids=[re.sub(r"\W+", "-", said) for _, said in REFUSED])
def test_a_config_that_is_not_served_is_one_line_that_names_the_field(config: Config, said: str) -> None:
    in_features = 56 if "divide" in said and "16" in said else 64
    with pytest.raises(CheckpointError, match=f"quantization_config[^\n]*{said}"):
        storage_of(config, Q).format(64, in_features)


def test_outputs_that_do_not_fill_words_are_refused() -> None:
    for config in (gptq().config, awq().config):
        with pytest.raises(CheckpointError, match="60 outputs do not fill 32-bit words with 4 bits each"):
            storage_of(config, Q).format(60, 64)
