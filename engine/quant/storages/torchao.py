"""Checkpoints that transformers writes of models quantized by torchao, in safetensors.

A tensor subclass is stored as its inner tensors: the `qdata` of `q_proj.weight` is `q_proj._weight_qdata`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from penstock.engine.fields import Fields
from penstock.engine.quant.float8 import Scaling
from penstock.engine.quant.formats import NamedTensors
from penstock.engine.quant.integers import Integers
from penstock.engine.quant.storage import PLAIN, BadTensor, Storage, Storages, StoredTensor
from penstock.engine.quant.storages.float8 import StoredFloat8, check_block
from penstock.engine.quant.storages.names import EMBEDDING, LM_HEAD, all_but, excluded, regular_expression
from penstock.engine.quant.storages.packing import Codes, StoredIntegers, finite, inputs_of, unpack_nibbles

_WEIGHT, _SCALE, _ZERO, _INPUT_SCALE = (
    f"_weight_{name}" for name in ("qdata", "scale", "zero_point", "act_pre_scale")
)


def _integers(
    bits: int,
    group_size: int | None,
    symmetric: bool = True,
    one_scale: bool = False,
    rounds_inputs: bool = False,
) -> StoredIntegers:
    """The storage of integers with a sign, one in a byte (Int8Tensor, IntxUnpackedToInt8Tensor).

    qdata: [out, in] int8
    scale: [out, groups], or [1, 1] for the whole weight
    zero_point: as scale, int8
    """
    return StoredIntegers(
        name=f"torchao, int{bits}",
        bits=bits,
        group_size=group_size,
        weight=Codes(_WEIGHT, bits, "I8"),
        zeros=Codes(_ZERO, 8, "I8", optional=symmetric),
        scale=_SCALE,
        symmetric=symmetric,
        lowest=-(1 << (bits - 1)),
        one_scale=one_scale,
        inputs=inputs_of(group_size, rounds=rounds_inputs),
    )


@dataclass(frozen=True, slots=True)
class AoInt4:
    """Signed integers of 4 bits, two in a byte, the lower bits first (Int4Tensor): the weight is q * scale + zero.

    qdata: [out, in / 2] bytes
    scale, zero_point: [groups, out]
    """

    group_size: int
    name = "torchao, int4"

    def format(self, out_features: int, in_features: int) -> Integers:
        return _integers(4, self.group_size, symmetric=False).format(out_features, in_features)

    def tensors(self, out_features: int, in_features: int) -> Iterator[StoredTensor]:
        num_groups = in_features // self.format(out_features, in_features).group_size
        yield StoredTensor(_WEIGHT, (out_features, in_features // 2), ("I8", "U8"))
        yield StoredTensor(_SCALE, (num_groups, out_features))
        yield StoredTensor(_ZERO, (num_groups, out_features))
        yield StoredTensor(_INPUT_SCALE, (None,), optional=True)

    def repack(self, tensors: NamedTensors) -> NamedTensors:
        if _INPUT_SCALE in tensors:
            raise BadTensor(_INPUT_SCALE, "scales activations, which is not supported")
        scale, zero = finite(tensors, _SCALE).T, finite(tensors, _ZERO).T
        codes = unpack_nibbles(tensors[_WEIGHT].view(torch.uint8)) ^ 8  # from 0 on
        return {"weight": codes.view(torch.int8), "scale": scale.contiguous(), "offset": zero - 8 * scale}


def torchao_storages(fields: Fields) -> Storages:
    """The storages of `quant_method` torchao.

    Raises:
        CheckpointError: naming the field that is missing, malformed or not supported.
    """
    config = fields.nested("quant_type").nested("default")
    has_many = config.text("_type") in ("FqnToConfig", "ModuleFqnToConfig")
    storages = _by_name(config.nested("_data")) if has_many else all_but(_storage(config), lambda _: False)
    is_excluded = excluded(fields, "modules_to_not_convert")
    included = _included(fields, has_many)
    return lambda name: PLAIN if is_excluded(name) and name not in included else storages(name)


def _included(fields: Fields, has_many: bool) -> tuple[str, ...]:
    """Returns the quantized modules that are no linear maps of a layer.

    `include_input_output_embeddings` takes in the embedding only if configs have names; without them, one that is
    untied keeps the head as it is.
    """
    if not fields.flag("include_input_output_embeddings"):
        return ()
    if has_many:
        return (EMBEDDING, LM_HEAD)
    return () if fields.flag("untie_embedding_weights") else (LM_HEAD,)


def _by_name(data: Fields) -> Storages:
    """Returns a storage for each name, for each pattern, and for all other maps."""
    configs = data.nested("fqn_to_config" if data.has("fqn_to_config") else "module_fqn_to_config")
    storages = {
        name: _storage(configs.nested(name)) if configs.has(name) else PLAIN for name in configs.names()
    }
    patterns = [
        (regular_expression(name.removeprefix("re:"), configs.source).fullmatch, storage)
        for name, storage in storages.items()
        if name.startswith("re:")
    ]

    def storage(name: str) -> Storage:
        own = storages.get(name) or storages.get(f"{name}.weight")
        by_pattern = (storage for matches, storage in patterns if matches(name) or matches(f"{name}.weight"))
        return own or next(by_pattern, None) or storages.get("_default", PLAIN)

    return storage


def _storage(config: Fields) -> Storage:
    """The storage that a config object of torchao stands for."""
    kind, data = config.text("_type"), config.nested("_data")
    match kind:
        case "Int8WeightOnlyConfig" | "Int8DynamicActivationInt8WeightConfig":
            size, one_scale = _groups(data.last_nested("granularity"))
            return _integers(8, size, one_scale=one_scale, rounds_inputs="Dynamic" in kind)
        case "IntxWeightOnlyConfig":
            return _unpacked(data, "")
        case "Int8DynamicActivationIntxWeightConfig":
            return _unpacked(data, "weight_")
        case "Int4WeightOnlyConfig":
            data.nested("int4_packing_format").one_of("_data", "plain", default="plain")
            return AoInt4(data.size("group_size", 128))
        case "Float8WeightOnlyConfig" | "Float8DynamicActivationFloat8WeightConfig":
            data.nested("weight_dtype").one_of("_data", "float8_e4m3fn", default="float8_e4m3fn")
            return StoredFloat8(_scaling(data.last_nested("granularity")), _WEIGHT, _SCALE)
    raise config.error(f"{kind} is not supported")


def _unpacked(data: Fields, prefix: str) -> StoredIntegers:
    """Integers of few bits, one in a byte."""
    data.nested("intx_packing_format").one_of("_data", "unpacked_to_int8", default="unpacked_to_int8")
    dtype = data.nested("weight_dtype").one_of("_data", "int4", "int8")
    mapping = data.nested(f"{prefix}mapping_type").text("_data", "SYMMETRIC")
    size, one_scale = _groups(data.nested(f"{prefix}granularity"))
    bits, symmetric = 4 if dtype == "int4" else 8, mapping == "SYMMETRIC"
    return _integers(bits, size, symmetric, one_scale, rounds_inputs=bool(prefix))


def _groups(granularity: Fields) -> tuple[int | None, bool]:
    """The inputs that share a scale, None standing for a row, and whether all rows share one."""
    kind = _kind(granularity, "PerRow", "PerAxis", "PerGroup", "PerTensor")
    size = granularity.nested("_data").size("group_size") if kind == "PerGroup" else None
    return size, kind == "PerTensor"


def _scaling(granularity: Fields) -> Scaling:
    kind = _kind(granularity, "PerRow", "PerTensor", "PerBlock")
    if kind == "PerBlock":
        check_block(granularity.nested("_data"), "block_size")
    return {"PerRow": Scaling.ROW, "PerTensor": Scaling.TENSOR, "PerBlock": Scaling.BLOCK}[kind]


def _kind(granularity: Fields, *allowed: str) -> str:
    kind = granularity.text("_type", "PerRow")
    if kind not in allowed:
        raise granularity.error(f"{kind} is not supported; only {', '.join(allowed)} are")
    return kind
