"""What the storages have in common: integers in words, scales that must be finite, and groups that must divide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.fields import Fields
from engine.quant.formats import NamedTensors
from engine.quant.integers import Factors, Integers
from engine.quant.storage import BadTensor

T = TypeVar("T")

_SMALLEST_GROUP = 16
"""The kernels for integers multiply so many at least under one scale; larger groups are multiples of it."""


def text_among(fields: Fields, name: str, *allowed: str, default: str | None = None) -> str:
    """The entry, which must be one of the allowed texts, in lower case.

    Raises:
        CheckpointError: it is another one.
    """
    return _among(fields, name, fields.text(name, default).lower(), allowed)


def integer_among(fields: Fields, name: str, *allowed: int, default: int | None = None) -> int:
    """The entry, which must be one of the allowed numbers.

    Raises:
        CheckpointError: it is another one.
    """
    return _among(fields, name, fields.integer(name, default), allowed)


def _among(fields: Fields, name: str, value: T, allowed: Sequence[T]) -> T:
    if value not in allowed:
        raise CheckpointError(f"{fields.source}: {name} {value} is not supported; {_only(allowed)}")
    return value


def _only(allowed: Sequence[object]) -> str:
    """As in "only 4 and 8 are"."""
    *most, last = [str(one) for one in allowed]
    return f"only {', '.join(most)} and {last} are" if most else f"only {last} is"


def group_size(fields: Fields, default: int | None = None) -> int | None:
    """The entry `group_size`; None stands for a whole row, which is -1 in the file.

    Raises:
        CheckpointError: it is no size.
    """
    return None if fields.integer("group_size", default) == -1 else fields.size("group_size", default)


def integers_format(
    bits: int,
    group_size: int | None,
    in_features: int,
    *,
    has_offset: bool = False,
    has_zeros: bool = False,
    is_permuted: bool = False,
) -> Integers:
    """The format of a weight whose groups have this size; None stands for a whole row.

    Args:
        has_zeros: the offset of a group is a zero point, from 0 to 2^bits, times its scale.

    Raises:
        CheckpointError: the groups do not divide the inputs, or no kernel multiplies groups of this size.
    """
    size = check_groups(group_size, in_features)
    if size % _SMALLEST_GROUP and size != in_features:
        raise CheckpointError(
            f"quantization_config: groups of {size} are not served, only multiples of 16 are"
        )
    return Integers(
        bits,
        size,
        has_offset or has_zeros,
        is_permuted and size < in_features,
        _factors(bits, size, has_offset, has_zeros),
    )


def _factors(bits: int, size: int, has_offset: bool, has_zeros: bool) -> Factors:
    """What keeps a weight near its size in the file, whose scales have 16 bits as a rule.

    Scales and offsets in float32 are multiplied where they lie; they are few in large groups, or beside 8 bits.
    """
    if bits == 8 or has_offset:
        return Factors.FLOAT32
    if has_zeros:
        return Factors.ZEROS if size < 128 else Factors.FLOAT32
    return Factors.HALF if size < 64 else Factors.FLOAT32


def check_groups(group_size: int | None, in_features: int) -> int:
    """The size of a group of a row with so many inputs; None stands for the whole row.

    Raises:
        CheckpointError: the groups do not divide the inputs.
    """
    size = in_features if group_size is None else group_size
    if in_features % size:
        raise CheckpointError(
            f"quantization_config: groups of {size} do not divide a linear map's {in_features} inputs"
        )
    return size


def check_words(bits: int, num_features: int, which: str) -> int:
    """The 32-bit words that so many integers fill.

    Raises:
        CheckpointError: the last word is not full.
    """
    if num_features * bits % 32:
        raise CheckpointError(
            f"quantization_config: a linear map's {num_features} {which} do not fill 32-bit words with {bits} bits each"
        )
    return num_features * bits // 32


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """The unsigned integers of 4 or 8 bits in int32 words [..., n], lowest bits first: uint8 [..., n * 32 / bits]."""
    numbers = words.contiguous().view(torch.uint8)
    return numbers if bits == 8 else unpack_nibbles(numbers)


def unpack_nibbles(numbers: Tensor) -> Tensor:
    """The unsigned integers of 4 bits in bytes [..., n], lowest bits first: uint8 [..., 2 * n]."""
    # The low byte of a pair is the first: memory is little-endian, as it is in the files.
    pairs = numbers.short()
    return pairs.bitwise_or_(pairs << 4).bitwise_and_(0x0F0F).view(torch.uint8)


def finite(tensors: NamedTensors, suffix: str) -> Tensor:
    """The stored tensor in float32.

    Raises:
        BadTensor: it is not finite.
    """
    return finite_as_stored(tensors, suffix).float()


def finite_as_stored(tensors: NamedTensors, suffix: str) -> Tensor:
    """The stored tensor in its own type.

    Raises:
        BadTensor: it is not finite.
    """
    values = tensors[suffix]
    if not bool(values.float().isfinite().all()):
        raise BadTensor(suffix, "has values that are not finite")
    return values


def check_zeros(zeros: Tensor, zero: int, suffix: str) -> None:
    """Checks the zero points of a weight that the config calls symmetric.

    Raises:
        BadTensor: one is not `zero`.
    """
    if not bool((zeros == zero).all()):
        raise BadTensor(
            suffix, f"has zero points other than {zero}, and config.json says that it is symmetric"
        )


def to_integers(
    format: Integers, codes: Tensor, scale: Tensor, zeros: Tensor | None = None, *, lowest: int = 0
) -> dict[str, Tensor]:
    """The tensors of a format for the weight (code - zero) * scale.

    Args:
        codes: [out, in] integers of 8 bits, which stand for numbers from `lowest` on.
        scale: [out, groups] or, if rows share it, [1, groups]; as it is stored.
        zeros: [out, groups] or [1, groups]; for a format with offsets only. Without, zero is the middle number.
    """
    shift = format.lowest - lowest
    scale = scale.expand(codes.shape[0], -1)
    shifted = codes.view(torch.uint8) + shift % 256
    tensors = {"weight": shifted.view(torch.int8)}
    if zeros is not None:
        assert format.has_offset
        zeros = zeros.int() + shift
    if format.factors is Factors.FLOAT32:
        scale = scale.float()
        if zeros is not None:
            tensors["offset"] = -zeros.float() * scale
    elif zeros is not None:
        tensors["zero"] = zeros.expand(codes.shape[0], -1).to(torch.int8)
    return tensors | {"scale": scale.contiguous()}


def permuted(tensors: dict[str, Tensor], format: Integers, groups: Tensor, suffix: str) -> dict[str, Tensor]:
    """Tensors whose inputs were in the order of the checkpoint, with the inputs of each group side by side.

    Args:
        groups: [in], the group of each input.
        suffix: the name of `groups` in the checkpoint.

    Raises:
        BadTensor: the groups do not have as many inputs each as the config says.
    """
    permutation = torch.argsort(groups, stable=True)
    check_order(groups[permutation], format.group_size, suffix)
    columns = tensors["weight"].index_select(1, permutation)
    return tensors | {"weight": columns, "permutation": permutation.int()}


def check_order(groups: Tensor, group_size: int, suffix: str) -> None:
    """Checks that the group of each input, [in], is that of groups side by side.

    Raises:
        BadTensor: it is not.
    """
    if not torch.equal(groups.long(), torch.arange(len(groups)) // group_size):
        raise BadTensor(suffix, f"does not divide the inputs into groups of {group_size} as config.json says")
