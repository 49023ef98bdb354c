"""Reads a model's config from the metadata of a GGUF file.

The keys are those of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and the value of a missing one is
llama.cpp's.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from penstock.engine.config import GenerationDefaults, ModelConfig
from penstock.engine.errors import CheckpointError
from penstock.engine.fields import Fields
from penstock.engine.model.families.common import (
    FINAL_NORM,
    FULL,
    MAX_LAYERS,
    MAX_POSITIONS,
    SLIDING,
    names_behind,
)
from penstock.engine.model.gguf.container import SUPPORTED, GgufTensor, Header, read_bytes, read_header
from penstock.engine.model.gguf.kinds import GgufKind
from penstock.engine.model.gguf.names import Names
from penstock.engine.model.gguf.stored_experts import expert_entries, stacked_maps, stored_feed_forward
from penstock.engine.model.gguf.stored_latents import latent_entries, stored_latent
from penstock.engine.model.gguf.stored_states import state_entries, stored_state
from penstock.engine.model.parse import parse_config
from penstock.engine.spec import Attention, LatentAttention, Layer, Mixer, ModelSpec, Prediction

_UNSUPPORTED = (
    "attention.scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "logit_scale",
    "nextn_predict_layers",
)

_SCALINGS = {"none": "default", "linear": "linear", "yarn": "yarn"}
"""Values of rope.scaling.type, and of a config.json's rope_type."""

_ROPE_NUMBERS = {
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "attention_factor": "rope.scaling.attn_factor",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
    "mscale": "rope.scaling.yarn_log_multiplier",
    "mscale_all_dim": "rope.scaling.yarn_log_multiplier",
    "llama_4_scaling_beta": "attention.temperature_scale",
}
"""The entries of a config.json's rope_parameters, and their keys."""

_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

_ROPE_FACTORS = "rope_freqs.weight"

_RETURN = "<|return|>"
"""The token that ends an answer of gpt-oss, where "<|end|>" ends each message of an answer."""
_ENDS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<end_of_turn>",
    "<|END_OF_TURN_TOKEN|>",
    "[|endofturn|]",
    "<|eot|>",
    "<|eom|>",
    "<turn|>",
    "<|tool_response>",
    "<|observation|>",
    "<|call|>",
    _RETURN,
)
"""Tokens that end an answer even where no key says so: files have one key for a model's several ends."""

_NORMAL = 1
"""The type of an ordinary token."""


def read_config(path: Path) -> ModelConfig:
    """Reads the config of the model in a file.

    Raises:
        CheckpointError: names the entry that is missing, malformed or not supported.
    """
    header = read_header(path)
    fields, kind = header.fields, GgufKind.of(header)
    entries, tokens = _entries(header, kind), fields.strings("tokenizer.ggml.tokens")
    is_sparse = kind.sparse and "num_experts" in entries
    architecture = kind.windowed if kind.windowed and entries["sliding_window"] else kind.architecture
    architecture = kind.sparse if is_sparse else architecture
    if not tokens:
        raise fields.error("tokenizer.ggml.tokens is missing")
    config = parse_config(Fields(fields.source, {**entries, "vocab_size": len(tokens)}), architecture)
    return replace(
        config,
        architecture=kind.sparse if is_sparse else kind.architecture,
        spec=_as_stored(config.spec, header, kind),
        bos_token_id=token_id(fields, "bos"),
        eos_token_ids=_ends(fields, tokens),
        dtype=_dtype(header),
        quantization=_quantization(header, Names(kind)),
    )


def read_generation_defaults(path: Path) -> GenerationDefaults:
    """Reads the file's recommendation for sampling.

    Raises:
        CheckpointError: the file is malformed.
    """
    fields = read_header(path).fields
    return GenerationDefaults(
        temperature=fields.within("general.sampling.temp", 0, 100),
        top_p=fields.within("general.sampling.top_p", 0, 1),
        top_k=fields.optional_integer("general.sampling.top_k"),
        min_p=fields.within("general.sampling.min_p", 0, 1),
        repetition_penalty=fields.within("general.sampling.penalty_repeat", 0.01, 100),
    )


def token_id(fields: Fields, name: str) -> int | None:
    """The id that the metadata give for "bos", "eos", ...; None if they give none that the vocabulary has."""
    found = fields.optional_integer(f"tokenizer.ggml.{name}_token_id")
    return found if found is not None and 0 <= found < len(fields.strings("tokenizer.ggml.tokens")) else None


def _entries(header: Header, kind: GgufKind) -> dict[str, object]:
    """The entries of the config.json that the model was converted from."""
    fields, name = header.fields, header.fields.text("general.architecture")
    _refuse_the_unsupported(fields, name, kind)
    depth, states = _depth(fields, name), {}
    if kind.has_states:
        states = state_entries(header, name, depth)
    hidden, heads = fields.size(f"{name}.embedding_length"), _heads(fields, name, kind)
    head_dim = fields.size(f"{name}.attention.key_length", max(1, hidden // heads))
    windowed_dim = fields.size(f"{name}.attention.key_length_swa", head_dim)
    inner = _inner_sizes(fields, name, kind, depth)
    window = max(0, fields.integer(f"{name}.attention.sliding_window", kind.window))
    kinds = _layer_types(header, name, depth) if window else [FULL] * depth
    eps, eps_entry = kind.eps
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        **_kv_heads(header, name, kind, heads, kinds or [FULL] * depth),
        "head_dim": windowed_dim,
        "global_head_dim": head_dim,
        "num_hidden_layers": depth,
        "intermediate_size": min(inner),
        "use_double_wide_mlp": max(inner) == 2 * min(inner),
        "max_position_embeddings": fields.size(f"{name}.context_length", most=MAX_POSITIONS),
        eps_entry: fields.positive(f"{name}.{eps}"),
        "query_pre_attn_scalar": hidden // heads if depth == kind.wide_depth else head_dim,
        "sliding_window": window or None,
        "layer_types": kinds,
        "attention_bias": False,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in header.tensors,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        **_rope(header, name, kind, head_dim, windowed_dim),
        **kind.entries,
        **latent_entries(header, name),
        **states,
        **expert_entries(header, name, kind, depth),
        **_numbers(fields, name, {entry: key for key, entry in kind.keys.items()}),
    }


def _depth(fields: Fields, name: str) -> int:
    """Returns the number of the model's layers, without the layers that draft, which follow them."""
    count = fields.size(f"{name}.block_count", most=MAX_LAYERS)
    return count - int(fields.within(f"{name}.nextn_predict_layers", 0, count - 1) or 0)


def _heads(fields: Fields, name: str, kind: GgufKind) -> int:
    """The query heads of layers with attention; files may have 0 where there are none, or a number for each layer."""
    key = f"{name}.attention.head_count"
    return max([*fields.integers(key), 1]) if kind.has_states else fields.size(key)


def _inner_sizes(fields: Fields, name: str, kind: GgufKind, depth: int) -> list[int]:
    """The widths of feed-forward parts; 0 stands for a layer without one."""
    sizes = _of_layers(fields, name, "feed_forward_length", depth, least=0 if kind.has_states else 1)
    return [size for size in sizes if size] or [1]


def _of_layers(
    fields: Fields, name: str, key: str, depth: int, default: int | None = None, *, least: int
) -> list[int]:
    """Returns a size of each layer of the model; a file that has it one by one has it of the layers that draft, too."""
    return fields.layer_sizes(f"{name}.{key}", fields.size(f"{name}.block_count"), default, least=least)[
        :depth
    ]


def _kv_heads(header: Header, name: str, kind: GgufKind, heads: int, kinds: list[str]) -> dict[str, object]:
    """Returns the key-value heads of layers with a window, and of the other layers, whose keys may be values, too."""
    least = 0 if kind.has_states else 1
    counts = _of_layers(header.fields, name, "attention.head_count_kv", len(kinds), heads, least=least)
    if kind.has_states:
        counts = [max(counts) or heads] * len(kinds)
    of_kinds = dict(zip(reversed(kinds), reversed(counts), strict=True))
    full = kinds.index(FULL) if FULL in kinds else 0
    return {
        "num_key_value_heads": of_kinds.get(SLIDING, counts[0]),
        "num_global_key_value_heads": of_kinds.get(FULL, counts[0]),
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in header.tensors,
    }


def _refuse_the_unsupported(fields: Fields, name: str, kind: GgufKind) -> None:
    for key in _UNSUPPORTED:
        if key not in kind.keys and fields.number(f"{name}.{key}", 0.0):
            raise fields.error(f"{name}.{key} is not supported")
    if not fields.flag(f"{name}.rope.scaling.finetuned", True) and name in ("granite", "granitemoe"):
        raise fields.error(f"{name} without positions is not supported")


def _layer_types(header: Header, name: str, depth: int) -> list[str] | None:
    """The kind of each layer by the metadata's pattern: a period, whose last layer is full, or a flag of each layer."""
    key = f"{name}.attention.sliding_window_pattern"
    flags = header.metadata.get(key)
    if not isinstance(flags, list):
        period = header.fields.optional_size(key)
        flags = None if period is None else [(layer + 1) % period != 0 for layer in range(depth)]
    return None if flags is None else [SLIDING if slides else FULL for slides in flags]


def _rope(header: Header, name: str, kind: GgufKind, head_dim: int, windowed_dim: int) -> dict[str, object]:
    fields = header.fields
    rotated = fields.size(f"{name}.rope.dimension_count", head_dim)
    if fields.size(f"{name}.rope.dimension_count_swa", windowed_dim) != windowed_dim:
        raise fields.error(
            f"{name}.rope.dimension_count_swa is not key_length_swa, {windowed_dim}: only heads that are rotated whole "
            "are supported"
        )
    if rotated != head_dim and not kind.rotates_in_part:
        raise fields.error(
            f"{name}.rope.dimension_count is {rotated}, and only heads that are rotated whole are "
            f"supported, all {head_dim} dimensions"
        )
    rope = {**kind.rope, **_scaling(header, name, kind, rotated // 2)}
    local = fields.within(f"{name}.rope.freq_base_swa", 1e-3, 1e12)
    return {
        "partial_rotary_factor": rotated / head_dim,
        "rope_theta": fields.positive(f"{name}.rope.freq_base", 10_000.0),
        "rope_parameters": {**rope, FULL: rope, SLIDING: {"rope_theta": local}},
    }


def _scaling(header: Header, name: str, kind: GgufKind, count: int) -> dict[str, object]:
    """The entries of a config.json's `rope_parameters`."""
    fields, known = header.fields, _numbers(header.fields, name, _ROPE_NUMBERS)
    if "mscale" in known:  # a sixth decimal is as exact as the float32 in the file
        multiplier = round(fields.number(f"{name}.rope.scaling.yarn_log_multiplier") / kind.log_unit, 6)
        known |= dict.fromkeys(("mscale", "mscale_all_dim"), multiplier)
    long, short = (header.tensors.get(f"rope_factors_{which}.weight") for which in ("long", "short"))
    if long is not None and short is not None:
        factors = {"long_factor": [*_factors(long, count)], "short_factor": [*_factors(short, count)]}
        return {**known, **factors, "rope_type": "longrope"}
    scaling = fields.text(f"{name}.rope.scaling.type", "none")
    if scaling not in _SCALINGS or (scaling != "none" and _ROPE_FACTORS in header.tensors):
        beside = f" beside {_ROPE_FACTORS}" if scaling in _SCALINGS else ""
        raise fields.error(
            f"{name}.rope.scaling.type {scaling!r:.40} is not supported{beside}; "
            f"supported are {', '.join(_SCALINGS)}"
        )
    return {**known, "rope_type": _SCALINGS[scaling]}


def _numbers(fields: Fields, name: str, keys: Mapping[str, str]) -> dict[str, object]:
    """The numbers that the metadata have, by their entries."""
    found = {entry: f"{name}.{key}" for entry, key in keys.items()}
    return {entry: fields.number(key) for entry, key in found.items() if fields.has(key)}


def _as_stored(spec: ModelSpec, header: Header, kind: GgufKind) -> ModelSpec:
    """Returns the model with the tensors of the file: ggml's norms have no offsets, and biases are as in the file."""
    factors, ropes = header.tensors.get(_ROPE_FACTORS), spec.ropes
    rotating = [own for own in spec.attentions.values() if own.rope is not None]
    if factors is not None and rotating:  # they belong to the layers without a window, if some of them rotate
        whole = next((own for own in rotating if not own.window), rotating[0])
        found = _factors(factors, whole.head_dim // 2)
        ropes = tuple(
            replace(rope, scaling="factors", factors=found) if number == whole.rope else rope
            for number, rope in enumerate(ropes)
        )
    return replace(
        spec,
        ropes=ropes,
        layers=tuple(_stored_layer(layer, number, header, kind) for number, layer in enumerate(spec.layers)),
        final_norm=replace(spec.final_norm, offset=0.0, name=FINAL_NORM),
        prediction=_stored_prediction(spec, header, kind),
    )


def _stored_layer(layer: Layer, number: int, header: Header, kind: GgufKind) -> Layer:
    norms = {name: replace(norm, offset=0.0) for name, norm in layer.outer_norms().items()}
    return replace(
        layer,
        mixer=_stored_mixer(layer.mixer, number, header, kind),
        feed_forward=stored_feed_forward(layer.feed_forward, number, header),
        **norms,  # type: ignore[arg-type]
    )


def _stored_prediction(spec: ModelSpec, header: Header, kind: GgufKind) -> Prediction | None:
    """Returns the layer that drafts, which follows the others in every kind of model; None if the file counts none."""
    own, number = spec.prediction, len(spec.layers)
    if own is None or not own.is_told:
        return None
    names = names_behind(number)
    return replace(
        own,
        layer=_stored_layer(own.layer, number, header, kind),
        prefix=names["prefix"],
        map=names["map"],
        token_norm=replace(own.token_norm, name=names["token_norm"], offset=0.0),
        features_norm=replace(own.features_norm, name=names["features_norm"], offset=0.0),
        final_norm=replace(own.final_norm, name=names["final_norm"], offset=0.0),
    )


def _stored_mixer(mixer: Mixer | None, layer: int, header: Header, kind: GgufKind) -> Mixer | None:
    if mixer is None:
        return None
    if isinstance(mixer, LatentAttention):
        return stored_latent(mixer, layer, header)
    if not isinstance(mixer, Attention):
        return stored_state(mixer, layer, header, header.fields.text("general.architecture"))
    norms = {name: replace(norm, offset=0.0) for name, norm in mixer.norms().items()}
    return replace(
        mixer,
        is_interleaved=kind.is_interleaved or mixer.is_interleaved,
        qkv_bias=mixer.qkv_bias or f"blk.{layer}.attn_q.bias" in header.tensors,
        o_bias=f"blk.{layer}.attn_output.bias" in header.tensors,
        **norms,  # type: ignore[arg-type]
    )


def _factors(tensor: GgufTensor, count: int) -> tuple[float, ...]:
    """Returns the divisors of the frequencies of Llama 3.1's rotary embedding, a small tensor of their own."""
    if tensor.shape != (count,) or tensor.type.name != "F32":
        raise CheckpointError(
            f"{tensor.file}: {tensor.name} is {tensor.type.name} of shape {list(tensor.shape)}, and it must be F32 of "
            f"shape {[count]}"
        )
    factors = struct.unpack(f"<{count}f", read_bytes(tensor))
    if not all(0 < factor < float("inf") for factor in factors):
        raise CheckpointError(
            f"{tensor.file}: {tensor.name} has a factor that is not finite and greater than 0"
        )
    return factors


def _ends(fields: Fields, tokens: list[str]) -> tuple[int, ...]:
    named = [token_id(fields, name) for name in ("eos", "eot", "eom")]
    types = fields.integers("tokenizer.ggml.token_type")
    known = [
        i
        for i, (token, type) in enumerate(zip(tokens, types, strict=False))
        if type != _NORMAL and token in _ENDS and not (token == "<|end|>" and _RETURN in tokens)
    ]
    return tuple(dict.fromkeys([*(end for end in named if end is not None), *known]))


def _dtype(header: Header) -> str:
    """The largest floating-point type of 16 bits that a linear map has; float32 stands for none of them."""
    types = {tensor.type.name for tensor in header.tensors.values() if len(tensor.shape) > 1}
    return _FLOATS[next((name for name in ("BF16", "F16") if name in types), "F32")]


def _quantization(header: Header, names: Names) -> Fields | None:
    """The types of the linear maps that are not in floating point, by the engine's names."""
    types: dict[str, object] = {}
    for tensor in header.tensors.values():
        name, type = names.engine_name(tensor.name), tensor.type.name
        if name is None or type in _FLOATS:
            continue
        if type not in SUPPORTED or not name.endswith(".weight"):
            raise CheckpointError(
                f"{tensor.file}: {tensor.name} is {type}, which is not supported; supported are {', '.join(SUPPORTED)}"
            )
        types |= dict.fromkeys(stacked_maps(name.removesuffix(".weight")), type)
    return Fields(str(header.path), {"quant_method": "gguf", "types": types}) if types else None
