"""Reads config.json and generation_config.json, as transformers 4 and 5 write them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine.errors import CheckpointError
from engine.fields import Fields
from engine.model.architectures import ARCHITECTURES
from engine.model.config import QUANT_METHODS, GenerationDefaults, ModelConfig, RopeConfig

_ROPE_SCALINGS = ("default", "linear", "llama3")
_DTYPES = ("float32", "bfloat16", "float16")

MAX_LAYERS = 4096
"""No model has more layers. Lists with an entry for each layer are made before the tensors prove that the layers are
there."""
MAX_POSITIONS = 1 << 24
"""More than any model has: no tensor backs this number, and the tables of the rotary embedding have a row for each."""


def read_config(folder: Path) -> ModelConfig:
    """Reads a checkpoint's config.json, and the end-of-sequence ids of its generation_config.json.

    Raises:
        CheckpointError: naming what is missing, malformed or not supported.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a directory")
    config = parse_config(Fields.read(folder / "config.json"))
    return _with_eos(config, _generation_fields(folder).integers("eos_token_id"))


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
        architecture: of ARCHITECTURES; without it, the entries name one.

    Raises:
        CheckpointError: naming what is missing, malformed or not supported.
    """
    architecture = architecture or _architecture(fields)
    _refuse_the_unsupported(fields)
    hidden_size, num_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    num_kv_heads = fields.size("num_key_value_heads", num_heads)
    max_position = fields.size("max_position_embeddings", most=MAX_POSITIONS)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden_size,
        num_layers=fields.size("num_hidden_layers", most=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=fields.size("head_dim", max(1, hidden_size // num_heads)),
        intermediate_size=fields.size("intermediate_size"),
        rms_norm_eps=fields.positive("rms_norm_eps", 1e-6),
        max_position=max_position,
        rope=_rope(fields, max_position),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        bos_token_id=next(iter(fields.integers("bos_token_id")), None),
        eos_token_ids=fields.integers("eos_token_id"),
        dtype=_dtype(fields),
        quantization=_quantization(fields),
    )
    config = ARCHITECTURES[architecture](fields, config)
    check_heads(fields.source, num_heads, num_kv_heads, config.head_dim)
    return config


def check_heads(source: str, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Checks that attention can have such heads.

    Raises:
        CheckpointError: naming the source, and the sizes that do not go together.
    """
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"{source}: {num_heads} heads cannot share {num_kv_heads} key-value heads "
            "(num_attention_heads, num_key_value_heads)"
        )
    if head_dim % 2:
        raise CheckpointError(
            f"{source}: head_dim (hidden_size / num_attention_heads if it is left out) is {head_dim}, "
            "and the rotary embedding needs an even one"
        )


def _architecture(fields: Fields) -> str:
    named = fields.strings("architectures")
    for name in named:
        if name in ARCHITECTURES:
            return name
    found = (
        f"architecture {' '.join(named[0].split())} is not supported" if named else "architectures is missing"
    )
    raise CheckpointError(f"{fields.source}: {found}; supported are {', '.join(ARCHITECTURES)}")


def _refuse_the_unsupported(fields: Fields) -> None:
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"{fields.source}: hidden_act {activation} is not supported; only silu is")


def _quantization(fields: Fields) -> Fields | None:
    """The entries of quantization_config, whose method is one that is supported."""
    if not fields.has("quantization_config"):
        return None
    quantization = fields.nested("quantization_config")
    method = quantization.text("quant_method")
    if method not in QUANT_METHODS:
        raise CheckpointError(
            f"{quantization.source}: quant_method {method} is not supported; supported are {', '.join(QUANT_METHODS)}"
        )
    return quantization


def _rope(fields: Fields, max_position: int) -> RopeConfig:
    """Reads the `rope_theta` and `rope_scaling` of transformers 4, or the `rope_parameters` of transformers 5."""
    rope = fields.nested("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")
    scaling = rope.text("rope_type", rope.text("type", "default"))
    if scaling not in _ROPE_SCALINGS:
        raise CheckpointError(
            f"{rope.source}: rope_type {scaling} is not supported; supported are {', '.join(_ROPE_SCALINGS)}"
        )
    if rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0)) != 1.0:
        raise CheckpointError(f"{rope.source}: a partial_rotary_factor other than 1 is not supported")
    theta = rope.positive("rope_theta", fields.positive("rope_theta", 10_000.0))
    if scaling == "default":
        return RopeConfig(theta=theta)
    if scaling == "linear":
        return RopeConfig(theta=theta, scaling=scaling, factor=rope.positive("factor"))
    return RopeConfig(
        theta=theta,
        scaling=scaling,
        factor=rope.positive("factor"),
        low_freq_factor=rope.positive("low_freq_factor"),
        high_freq_factor=rope.positive("high_freq_factor"),
        original_max_position=rope.size("original_max_position_embeddings", max_position),
    )


def _dtype(fields: Fields) -> str:
    name = fields.text("dtype", fields.text("torch_dtype", "float32")).removeprefix("torch.")
    if name not in _DTYPES:
        raise CheckpointError(
            f"{fields.source}: dtype {name} is not supported; supported are {', '.join(_DTYPES)}"
        )
    return name


def _generation_fields(folder: Path) -> Fields:
    path = folder / "generation_config.json"
    return Fields.read(path) if path.exists() else Fields(str(path), {})


def _with_eos(config: ModelConfig, more: tuple[int, ...]) -> ModelConfig:
    """Adds the end-of-sequence ids of another file. Those of either file end a sequence."""
    return replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *more))))
