"""Reads config.json and generation_config.json, as transformers 4 and 5 write them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from penstock.engine.config import QUANT_METHODS, GenerationDefaults, ModelConfig
from penstock.engine.errors import CheckpointError
from penstock.engine.fields import Fields
from penstock.engine.model.consolidated import is_consolidated, read_params
from penstock.engine.model.families import FAMILIES, NOT_YET, Family
from penstock.engine.model.families.common import CHUNKED, FULL, MAX_POSITIONS, SLIDING
from penstock.engine.spec import ModelSpec
from penstock.engine.text.tokenizer import eos_token_id

_DTYPES = ("float32", "bfloat16", "float16")
_MODELOPT = {"quant_method": "modelopt"}


def read_config(folder: Path) -> ModelConfig:
    """Reads a checkpoint's config.json, and other files for ends of sequence and for quantization.

    The ends in config.json and generation_config.json all end a sequence; without any, the tokenizer's does.

    Raises:
        CheckpointError: names the entry that is missing, malformed or not supported.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a directory")
    config = parse_config(_entries(folder))
    told = (*config.eos_token_ids, *_optional(folder / "generation_config.json").integers("eos_token_id"))
    if not told and (end := eos_token_id(folder)) is not None:
        told = (end,)
    quantization = config.quantization or _modelopt(folder / "hf_quant_config.json")
    return replace(config, eos_token_ids=tuple(dict.fromkeys(told)), quantization=quantization)


def _entries(folder: Path) -> Fields:
    """Returns the entries of config.json, or the equivalent entries of params.json."""
    return read_params(folder) if is_consolidated(folder) else Fields.read(folder / "config.json")


def check_family(folder: Path) -> None:
    """Checks that the config.json of a checkpoint names a family that is served.

    Raises:
        CheckpointError: it names none, or cannot be read.
    """
    fields = _entries(folder)
    _family(fields, _architecture(fields))


def read_generation_defaults(folder: Path) -> GenerationDefaults:
    """Reads generation_config.json; all defaults are None if there is no such file.

    Raises:
        CheckpointError: the file is malformed.
    """
    fields = _optional(folder / "generation_config.json")
    return GenerationDefaults(
        temperature=fields.within("temperature", 0, 100),
        top_p=fields.within("top_p", 0, 1),
        top_k=fields.optional_integer("top_k"),
        min_p=fields.within("min_p", 0, 1),
        repetition_penalty=fields.within("repetition_penalty", 0.01, 100),
        max_new_tokens=fields.optional_integer("max_new_tokens"),
    )


def parse_config(fields: Fields, architecture: str = "") -> ModelConfig:
    """Reads a config from the entries of a config.json.

    Args:
        architecture: one of FAMILIES; without it, the entries name one.

    Raises:
        CheckpointError: names the entry that is missing, malformed or not supported.
    """
    architecture = architecture or _architecture(fields)
    family, eos = _family(fields, architecture), fields.integers("eos_token_id")
    if fields.has("text_config"):
        fields = fields.flattened("text_config")
    fields = fields.with_defaults(family.defaults)
    spec = family.describe(fields)
    chunked = [CHUNKED] if any(own.is_chunked for own in spec.attentions.values()) else []
    if not spec.states:  # those families know kinds of their own; others may not have read the entry
        fields.strings("layer_types", FULL, SLIDING, *chunked, "attention")
    told = fields.size("max_position_embeddings", most=MAX_POSITIONS)
    max_position = max(told, *(rope.longest for rope in spec.ropes), 0)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.size("vocab_size"),
        max_position=max_position,
        spec=_without_idle_windows(spec, max_position),
        bos_token_id=next(iter(fields.integers("bos_token_id")), None),
        eos_token_ids=tuple(dict.fromkeys((*eos, *fields.integers("eos_token_id")))),
        dtype=_dtype(fields),
        quantization=_quantization(fields),
    )


def _architecture(fields: Fields) -> str:
    named = fields.strings("architectures")
    served = {_spelling(name): name for name in FAMILIES}  # Baidu's files say Ernie4_5_ForCausalLM
    for name in map(_spelling, named):
        if name in served:
            return served[name]
    for name in named:
        if name in NOT_YET:
            raise fields.error(f"{name} is known but not served yet: {NOT_YET[name]}")
    found = (
        f"architecture {' '.join(named[0].split())} is not supported" if named else "architectures is missing"
    )
    if not named and fields.has("ssm_cfg"):
        raise fields.error(
            f"{found}: this is the layout of state-spaces' own code; Mamba 2 is served as transformers writes it"
        )
    raise fields.error(f"{found}; supported are {', '.join(FAMILIES)}")


def _family(fields: Fields, architecture: str) -> Family:
    """Returns the family of an architecture; with more than text in it, the family of its text model's own kind.

    Raises:
        CheckpointError: that kind is not served.
    """
    text = fields.nested("text_config")
    if not text.has("model_type"):
        return FAMILIES[architecture]
    kind, known = text.text("model_type"), {_kind(name): name for name in (*FAMILIES, *NOT_YET, architecture)}
    name = known.get(_kind(kind), "")
    if name in FAMILIES:
        return FAMILIES[name]
    lack = f"known but not served yet: {NOT_YET[name]}" if name else "not supported"
    raise text.error(f"model_type {kind!r:.60} in {architecture} is {lack}")


def _kind(name: str) -> str:
    """Returns the part that Qwen3_5MoeForCausalLM and qwen3_5_moe_text have in common."""
    return _spelling(name.partition("For")[0]).removesuffix("text")


def _spelling(name: str) -> str:
    return name.replace("_", "").lower()


def _without_idle_windows(spec: ModelSpec, max_position: int) -> ModelSpec:
    """The model without windows that no sequence outgrows: they hide nothing."""
    layers = (
        layer.with_attention(window=0, is_chunked=False)
        if layer.attention is not None and layer.attention.window >= max_position
        else layer
        for layer in spec.layers
    )
    return replace(spec, layers=tuple(layers))


def _quantization(fields: Fields) -> Fields | None:
    """The entries of quantization_config, whose method is one that is supported."""
    if not fields.has("quantization_config"):
        return None
    quantization = fields.nested("quantization_config")
    if quantization.has("quant_algo") or quantization.nested("producer").text("name", "") == "modelopt":
        quantization = quantization.with_defaults(_MODELOPT)
    quantization.one_of("quant_method", *QUANT_METHODS)
    return quantization


def _modelopt(path: Path) -> Fields | None:
    """Returns the entries of modelopt's own file, which config.json may lack; None if it did not quantize."""
    fields = _optional(path).nested("quantization")
    return fields.with_defaults(_MODELOPT) if fields.has("quant_algo") else None


def _dtype(fields: Fields) -> str:
    name = "dtype" if fields.has("dtype") else "torch_dtype"
    value = fields.text(name, "float32").removeprefix("torch.")
    return Fields(fields.source, {name: value}).one_of(name, *_DTYPES)


def _optional(path: Path) -> Fields:
    """The entries of a file; none if it is not there."""
    return Fields.read(path) if path.exists() else Fields(str(path), {})
