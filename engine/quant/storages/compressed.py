"""Checkpoints of the compressed-tensors library, which llm-compressor writes, too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.fields import Fields
from penstock.engine.quant.codebook import Codebook
from penstock.engine.quant.float8 import Scaling
from penstock.engine.quant.formats import DENSE, Dense, NamedTensors
from penstock.engine.quant.storage import FLOATS, PLAIN, BadTensor, Storage, Storages, StoredTensor
from penstock.engine.quant.storages.float8 import StoredFloat8, check_block
from penstock.engine.quant.storages.mxfp4 import NO_SCALE
from penstock.engine.quant.storages.names import EMBEDDING, IsMeant, called, regular_expression
from penstock.engine.quant.storages.packing import (
    Codes,
    StoredIntegers,
    check_groups,
    finite,
    inputs_of,
    unpack_nibbles,
)

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The floats of 4 bits, in the order of their bits (Open Compute Project, Microscaling Formats Specification, 2023)."""


def packed_integers(
    bits: int,
    group_size: int | None,
    *,
    is_packed: bool = True,
    symmetric: bool = True,
    act_order: bool = False,
    one_scale: bool = False,
    rounds_inputs: bool = False,
) -> StoredIntegers:
    """The storage of integers with a sign.

    weight_packed, if is_packed: [out, ceil(in * bits / 32)] words, a word holds inputs side by side
    weight, if not: [out, in] int8
    weight_scale: [out, groups], or [1] for the whole weight
    weight_zero_point, if not symmetric: int8 as weight_scale, or words [ceil(out * bits / 32), groups] if is_packed
    weight_g_idx, if act_order: [in], the group of each input
    """
    half = 1 << (bits - 1)
    zeros = Codes("weight_zero_point", 8, "I8")
    if is_packed and not one_scale:
        zeros = Codes("weight_zero_point", bits, bias=half, down=True)
    return StoredIntegers(
        name=f"compressed-tensors, {bits}-bit integers",
        bits=bits,
        group_size=group_size,
        weight=Codes("weight_packed", bits, bias=half) if is_packed else Codes("weight", bits, "I8"),
        zeros=None if symmetric else zeros,
        scale="weight_scale",
        symmetric=symmetric,
        lowest=-half,
        one_scale=one_scale,
        groups="weight_g_idx" if act_order else "",
        act_order=act_order,
        shape="weight_shape" if is_packed else "",
        inputs=inputs_of(group_size, rounds=rounds_inputs),
    )


@dataclass(frozen=True, slots=True)
class GroupedFloats:
    """Floats in groups of the inputs of a row: the weight is number * scale.

    packed: [out, in / 2], two floats of 4 bits in a byte, the lower bits first; or
    weight: [out, in] e4m3, which no kernel multiplies in groups
    weight_scale: [out, groups]. NVFP4: e4m3, divided or multiplied by global_scale [1]. Others: E8M0, as bytes.
    """

    name: str
    """NVFP4, MXFP4 or MXFP8."""
    packed: str = "weight_packed"
    global_scale: str = "weight_global_scale"
    divides: bool = True

    @property
    def _is_nv(self) -> bool:
        return self.name == "NVFP4"

    @property
    def _has_4_bits(self) -> bool:
        return self.name != "MXFP8"

    def format(self, out_features: int, in_features: int) -> Codebook | Dense:  # noqa: ARG002
        size = check_groups(16 if self._is_nv else 32, in_features)
        return Codebook("fp4", E2M1, size) if self._has_4_bits else DENSE

    def tensors(self, out_features: int, in_features: int) -> Iterator[StoredTensor]:
        if self._has_4_bits:
            yield StoredTensor(self.packed, (out_features, in_features // 2), ("U8",))
        else:
            yield StoredTensor("weight", (out_features, in_features), ("F8_E4M3",))
        num_groups = in_features // (16 if self._is_nv else 32)
        yield StoredTensor("weight_scale", (out_features, num_groups), ("F8_E4M3" if self._is_nv else "U8",))
        if self._is_nv:
            yield StoredTensor(self.global_scale, (1,), FLOATS, loose=True)

    def repack(self, tensors: NamedTensors) -> NamedTensors:
        if self._is_nv:
            factor = finite(tensors, self.global_scale).reshape(1, 1)
            if self.divides and not bool(factor.all()):
                raise BadTensor(self.global_scale, "is 0")
            scale = finite(tensors, "weight_scale")
            scale = scale / factor if self.divides else scale * factor
        else:
            scale = powers_of_two(tensors, "weight_scale")
        if self._has_4_bits:
            return {"weight": unpack_nibbles(tensors[self.packed]), "scale": scale}
        groups = torch.unflatten(finite(tensors, "weight"), 1, (-1, 32))
        return {"weight": (groups * scale.unsqueeze(-1)).flatten(1)}


def powers_of_two(tensors: NamedTensors, suffix: str) -> Tensor:
    """The float32 numbers of bytes in E8M0.

    Raises:
        BadTensor: one is not a number.
    """
    exponents = tensors[suffix]
    if bool((exponents == NO_SCALE).any()):
        raise BadTensor(suffix, "has values that are not finite")
    # The byte is the exponent of a float32, too, except that 2^-127 is denormal there.
    return torch.where(exponents == 0, 1 << 22, exponents.int() << 23).view(torch.float32)


def compressed_storages(fields: Fields) -> Storages:
    """The storages of `quant_method` compressed-tensors: the groups of `config_groups` have names as targets.

    Activations are quantized row by row as they come, so that scales stored for them are not read.

    Raises:
        CheckpointError: naming the field that is missing, malformed or not supported.
    """
    _refuse_the_unsupported(fields)
    groups = fields.nested("config_groups")
    if not groups.names():
        raise fields.error("config_groups is missing")
    default = fields.text("format", "")
    schemes = {
        target: storage
        for group in (groups.nested(name) for name in groups.names())
        for storage in [_storage(group, default)]
        for target in group.strings("targets")
    }
    # As the library has it: a name goes before a pattern, which goes before a class.
    by_name = [(_named(target, fields), schemes[target]) for target in sorted(schemes, key=_precedence)]
    ignored = [_named(entry, fields) for entry in fields.strings("ignore")]
    ignored_classes = fields.strings("ignore")

    def storage(name: str) -> Storage:
        kind = "Embedding" if name == EMBEDDING else "Linear"
        if kind in ignored_classes or any(is_meant(name) for is_meant in ignored):
            return PLAIN
        named = next((storage for is_meant, storage in by_name if is_meant(name)), None)
        return named or schemes.get(kind, PLAIN)

    return storage


def _refuse_the_unsupported(fields: Fields) -> None:
    sparsity = fields.nested("sparsity_config")
    sparsity.one_of("format", "dense", default="dense")
    if fields.nested("transform_config").nested("config_groups").names():
        raise fields.error("transform_config is not supported")


def _precedence(target: str) -> tuple[bool, str]:
    return target.startswith("re:"), target


def _named(target: str, fields: Fields) -> IsMeant:
    """Returns whether a target means a linear map by its name."""
    if not target.startswith("re:"):
        return called(lambda name: name == target)
    pattern = regular_expression(target.removeprefix("re:"), fields.source)
    return called(lambda name: pattern.match(name) is not None)


def _storage(group: Fields, default_format: str) -> Storage:
    """The storage of one of config_groups."""
    format = group.text("format", default_format)
    if format == "dense" or not group.has("weights"):
        return PLAIN
    weights = group.nested("weights")
    kind, bits = weights.text("type", "int"), weights.integer("num_bits", 8)
    match kind, format:
        case "int", "pack-quantized" | "int-quantized" | "naive-quantized":
            inputs = group.nested("input_activations")
            rounds = inputs.text("type", "") == "int"
            return _integers(weights, is_packed=format == "pack-quantized", rounds_inputs=rounds)
        case "float", "float-quantized" | "naive-quantized" if bits == 8:
            return StoredFloat8(_scaling(weights))
        case "float", "nvfp4-pack-quantized" if bits == 4:
            return GroupedFloats("NVFP4")
        case "float", "mxfp4-pack-quantized" if bits == 4:
            return GroupedFloats("MXFP4")
        case "float", "mxfp8-quantized" if bits == 8:
            return GroupedFloats("MXFP8")
    raise group.error(f"format {format or 'null'} with weights of type {kind}, {bits} bits, is not supported")


def _integers(weights: Fields, is_packed: bool, rounds_inputs: bool) -> StoredIntegers:
    strategy = _strategy(weights, "tensor", "channel", "group")
    return packed_integers(
        weights.one_of("num_bits", 4, 8),
        weights.size("group_size") if strategy == "group" else None,
        is_packed=is_packed,
        symmetric=weights.flag("symmetric", True),
        act_order=weights.text("actorder", "") in ("group", "dynamic"),
        one_scale=strategy == "tensor",
        rounds_inputs=rounds_inputs,
    )


def _scaling(weights: Fields) -> Scaling:
    if not weights.flag("symmetric", True):
        raise weights.error("symmetric false is not supported with floats")
    strategy = _strategy(weights, "tensor", "channel", "block")
    if strategy == "block":
        check_block(weights, "block_structure")
    return {"tensor": Scaling.TENSOR, "channel": Scaling.ROW, "block": Scaling.BLOCK}[strategy]


def _strategy(weights: Fields, *allowed: str) -> str:
    """Returns the entry `strategy`, or the strategy that follows from the group size if it is missing."""
    size = weights.optional_integer("group_size")
    default = "tensor" if size is None else "channel" if size == -1 else "group"
    return weights.one_of("strategy", *allowed, default=default)
