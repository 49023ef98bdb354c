"""Reads config.json and generation_config.json, as transformers 4 and 5 write them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine.config import QUANT_METHODS, GenerationDefaults, ModelConfig
from engine.errors import CheckpointError
from engine.fields import Fields
from engine.model.families import FAMILIES, NOT_YET
from engine.model.families.common import CHUNKED, FULL, MAX_POSITIONS, SLIDING

_DTYPES = ("float32", "bfloat16", "float16")


def read_config(folder: Path) -> ModelConfig:
    """Reads a checkpoint's config.json, and the end-of-sequence ids of its generation_config.json.

    Raises:
        CheckpointError: naming what is missing, malformed or not supported.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a directory")
    config = parse_config(Fields.read(folder / "config.json"))
    return _with_eos(config, _generation_fields(folder).integers("eos_token_id"))


def check_family(folder: Path) -> None:
    """Checks that the config.json of a checkpoint names a family that is served.

    Raises:
        CheckpointError: it names none, or cannot be read.
    """
    _architecture(Fields.read(folder / "config.json"))


def read_generation_defaults(folder: Path) -> GenerationDefaults:
    """Reads generation_config.json; all defaults are None if there is no such file.

    Raises:
        CheckpointError: the file is malformed.
    """
    fields = _generation_fields(folder)
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
        architecture: of FAMILIES; without it, the entries name one.

    Raises:
        CheckpointError: naming what is missing, malformed or not supported.
    """
    architecture = architecture or _architecture(fields)
    family = FAMILIES[architecture]
    if fields.has("text_config"):
        fields = fields.flattened("text_config")
    fields = fields.with_defaults(family.defaults)
    spec = family.describe(fields)
    chunked = [CHUNKED] if any(own.is_chunked for own in spec.attentions.values()) else []
    if not spec.states:  # those families know kinds of their own; others may not have read the entry
        fields.strings("layer_types", FULL, SLIDING, *chunked, "attention")
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.size("vocab_size"),
        max_position=fields.size("max_position_embeddings", most=MAX_POSITIONS),
        spec=spec,
        bos_token_id=next(iter(fields.integers("bos_token_id")), None),
        eos_token_ids=fields.integers("eos_token_id"),
        dtype=_dtype(fields),
        quantization=_quantization(fields),
    )


def _architecture(fields: Fields) -> str:
    named = fields.strings("architectures")
    for name in named:
        if name in FAMILIES:
            return name
    for name in named:
        if name in NOT_YET:
            raise fields.error(f"{name} is known but not served yet: {NOT_YET[name]}")
    found = (
        f"architecture {' '.join(named[0].split())} is not supported" if named else "architectures is missing"
    )
    raise fields.error(f"{found}; supported are {', '.join(FAMILIES)}")


def _quantization(fields: Fields) -> Fields | None:
    """The entries of quantization_config, whose method is one that is supported."""
    if not fields.has("quantization_config"):
        return None
    quantization = fields.nested("quantization_config")
    quantization.one_of("quant_method", *QUANT_METHODS)
    return quantization


def _dtype(fields: Fields) -> str:
    name = fields.text("dtype", fields.text("torch_dtype", "float32")).removeprefix("torch.")
    return Fields(fields.source, {"dtype": name}).one_of("dtype", *_DTYPES)


def _generation_fields(folder: Path) -> Fields:
    path = folder / "generation_config.json"
    return Fields.read(path) if path.exists() else Fields(str(path), {})


def _with_eos(config: ModelConfig, more: tuple[int, ...]) -> ModelConfig:
    """Adds the end-of-sequence ids of another file. Those of either file end a sequence."""
    return replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *more))))
