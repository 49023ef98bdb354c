"""The common parts of storages: integers in words, scales that must be finite, and groups that must divide."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.errors import CheckpointError
from penstock.engine.fields import Fields
from penstock.engine.quant.formats import NamedTensors
from penstock.engine.quant.integers import Factors, Inputs, Integers
from penstock.engine.quant.storage import FLOATS, BadTensor, StoredTensor

_SMALLEST_GROUP = 16
"""The kernels for integers multiply so many at least under one scale; larger groups are multiples of it."""

_WORDS = {"I32": torch.int32, "U8": torch.uint8, "I8": torch.int8}


@dataclass(frozen=True, slots=True)
class Codes:
    """The way in which one tensor of a checkpoint has a matrix of integers [rows, columns]."""

    suffix: str
    bits: int
    word: str = "I32"
    """The type of the words that the integers fill, lowest bits first. I8: each integer is a byte with a sign."""
    bias: int = 0
    """Is added to every integer as it is stored."""
    down: bool = False
    """Whether a word has integers of one column, from its lowest row on; otherwise it has integers of one row."""
    order: tuple[int, ...] = ()
    """The place in a word of each of its integers, where they are not in order."""
    optional: bool = False
    """Whether a checkpoint may lack the tensor."""

    @property
    def per_word(self) -> int:
        return 1 if self.word == "I8" else 8 * _WORDS[self.word].itemsize // self.bits

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """The shape of the tensor; the last words may have room left."""
        return (-(-rows // self.per_word), columns) if self.down else (rows, -(-columns // self.per_word))

    def size(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """The rows and columns of a tensor of this shape whose words are all full."""
        rows, columns = shape
        return (rows * self.per_word, columns) if self.down else (rows, columns * self.per_word)

    def unpack(self, words: Tensor, rows: int, columns: int) -> Tensor:
        """Returns the integers [rows, columns] as they are stored: uint8, or int8 if they have a sign."""
        if self.word == "I8":
            return words
        lines = words.T if self.down else words
        codes = lines.flatten().view(torch.uint8).view(len(lines), -1)
        codes = codes if self.bits == 8 else unpack_nibbles(codes)
        if self.order:
            codes = torch.unflatten(codes, 1, (-1, len(self.order)))[:, :, list(self.order)].flatten(1)
        return codes[:, :rows].T.contiguous() if self.down else codes[:, :columns]

    def pack(self, integers: Tensor) -> Tensor:
        """The words of integers [rows, columns] in int8 that are in order."""
        codes = (integers.T if self.down else integers).view(torch.uint8) + self.bias % 256
        codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % self.per_word))
        codes = codes if self.bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4
        words = codes.flatten().view(_WORDS[self.word]).view(len(codes), -1)
        return words.T.contiguous() if self.down else words


def inputs_of(group_size: int | None, *, rounds: bool) -> Inputs:
    """Returns the rounding of activations, by whether the checkpoint rounds them to 8 bits."""
    if not rounds:
        return Inputs.FINE
    return Inputs.ROW if group_size is None else Inputs.GROUPS


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredIntegers:
    """Integers in groups of the inputs of a row: the weight is (integer - zero) * scale.

    All tensors of more than one dimension are [out, ...], or transposed.
    """

    name: str
    bits: int
    group_size: int | None
    """None stands for a whole row."""
    weight: Codes
    """[out, in]"""
    scale: str
    """The suffix of the scales, [out, groups]."""
    zeros: Codes | None = None
    """[out, groups], where a checkpoint may have zero points."""
    symmetric: bool = True
    """Whether the zero point of all groups is the middle integer."""
    lowest: int = 0
    """The least integer."""
    one_scale: bool = False
    """Whether all rows share a scale, and a zero point."""
    groups: str = ""
    """The suffix of the group of each input, [in], where a checkpoint may have it."""
    act_order: bool = False
    """Whether the inputs of a group may lie apart."""
    shape: str = ""
    """The suffix of [out, in], where a checkpoint has it."""
    is_transposed: bool = False
    """Whether tensors are transposed; their words are all full."""
    inputs: Inputs = Inputs.FINE
    """The rounding of activations."""

    def format(self, out_features: int, in_features: int) -> Integers:
        if self.is_transposed:
            for codes in (self.weight, self.zeros):
                if codes is not None:
                    down = codes.down
                    check_words(self.bits, *((out_features, "outputs") if down else (in_features, "inputs")))
        size = check_groups(self.group_size, in_features)
        if size % _SMALLEST_GROUP and size != in_features:
            raise CheckpointError(
                f"quantization_config: groups of {size} are not served, only multiples of 16 are"
            )
        return Integers(
            self.bits,
            size,
            not self.symmetric,
            self.act_order and size < in_features,
            self._factors(size),
            inputs=self.inputs,
        )

    def _factors(self, size: int) -> Factors:
        """Returns the scales that keep a weight near its size in the file, whose scales usually have 16 bits.

        Scales and offsets in float32 are multiplied where they lie; they are few in large groups, or for 8 bits.
        """
        if self.bits == 8:
            return Factors.FLOAT32
        if self.symmetric:
            return Factors.HALF if size < 64 else Factors.FLOAT32
        has_packed_zeros = self.zeros is not None and self.zeros.word != "I8"
        return Factors.ZEROS if has_packed_zeros and size < 128 else Factors.FLOAT32

    def tensors(self, out_features: int, in_features: int) -> Iterator[StoredTensor]:
        scales = self._scales(out_features, in_features)
        yield self._stored(self.weight, out_features, in_features)
        yield StoredTensor(self.scale, self._turned(scales), FLOATS, loose=not self.is_transposed)
        if self.zeros is not None:
            yield self._stored(self.zeros, *scales)
        if self.groups:
            yield StoredTensor(self.groups, (in_features,), ("I32", "I64"), optional=not self.act_order)
        if self.shape:
            yield StoredTensor(self.shape, (2,), ("I64", "I32"))

    def repack(self, tensors: NamedTensors) -> NamedTensors:
        tensors = {
            name: tensor.T if self.is_transposed and tensor.dim() == 2 else tensor
            for name, tensor in tensors.items()
        }
        rows, columns = self._size(tensors)
        format, scales = self.format(rows, columns), self._scales(rows, columns)
        shift = format.lowest - self.lowest
        codes = self.weight.unpack(tensors[self.weight.suffix], rows, columns)
        if self.weight.word == "I8" and self.bits == 4 and bool((codes.clamp(-8, 7) != codes).any()):
            raise BadTensor(self.weight.suffix, "has numbers that are no 4-bit integers")
        scale = finite_as_stored(tensors, self.scale).reshape(scales).expand(rows, -1)
        scale = scale.float() if format.factors is Factors.FLOAT32 else scale
        found = {
            "weight": (codes.view(torch.uint8) + (shift - self.weight.bias) % 256).view(torch.int8),
            "scale": scale.contiguous(),
        }
        zeros = self._zeros(tensors, scales)
        if zeros is not None and format.factors is Factors.FLOAT32:
            found["offset"] = -(zeros + shift).float() * scale
        elif zeros is not None:
            found["zero"] = (zeros + shift).expand(rows, -1).to(torch.int8)
        if self.groups in tensors:
            found |= self._permutation(found["weight"], tensors[self.groups], format)
        return found

    def _scales(self, out_features: int, in_features: int) -> tuple[int, int]:
        num_groups = in_features // self.format(out_features, in_features).group_size
        return 1 if self.one_scale else out_features, num_groups

    def _stored(self, codes: Codes, rows: int, columns: int) -> StoredTensor:
        shape = self._turned(codes.shape(rows, columns))
        is_loose = codes is self.zeros and not self.is_transposed
        return StoredTensor(codes.suffix, shape, (codes.word,), optional=codes.optional, loose=is_loose)

    def _turned(self, shape: tuple[int, int]) -> tuple[int, int]:
        return (shape[1], shape[0]) if self.is_transposed else shape

    def _size(self, tensors: NamedTensors) -> tuple[int, int]:
        """The outputs and inputs of the weight.

        Raises:
            BadTensor: the checkpoint says others than the weight has.
        """
        found = tuple(tensors[self.weight.suffix].shape)
        if not self.shape:
            return self.weight.size(found)
        rows, columns = (int(size) for size in tensors[self.shape])
        is_whole = self.group_size is None or columns % self.group_size == 0
        if self.weight.shape(rows, columns) != found or not is_whole:
            raise BadTensor(self.shape, f"says [{rows}, {columns}], unlike {self.weight.suffix}")
        return rows, columns

    def _zeros(self, tensors: NamedTensors, scales: tuple[int, int]) -> Tensor | None:
        """The zero points as int32, [out, groups] or of all rows [1, groups]; None if they are the middle integer.

        Raises:
            BadTensor: one is another, and the config says that the weight is symmetric.
        """
        codes = self.zeros
        if codes is None or codes.suffix not in tensors:
            return None
        words = tensors[codes.suffix].reshape(codes.shape(*scales))
        zeros, middle = codes.unpack(words, *scales).int() - codes.bias, self.lowest + (1 << (self.bits - 1))
        if not self.symmetric:
            return zeros
        if not bool((zeros == middle).all()):
            said = "and config.json says that it is symmetric"
            raise BadTensor(codes.suffix, f"has zero points other than {middle}, {said}")
        return None

    def _permutation(self, weight: Tensor, groups: Tensor, format: Integers) -> dict[str, Tensor]:
        """The weight with the inputs of each group side by side, and their order, if that is not the checkpoint's.

        Raises:
            BadTensor: the groups do not have as many inputs each as the config says.
        """
        order = torch.argsort(groups, stable=True) if format.is_permuted else torch.arange(len(groups))
        if not torch.equal(groups[order].long(), torch.arange(len(groups)) // format.group_size):
            size = format.group_size
            raise BadTensor(
                self.groups, f"does not divide the inputs into groups of {size} as config.json says"
            )
        if not format.is_permuted:
            return {}
        return {"weight": weight.index_select(1, order), "permutation": order.int()}


def group_size(fields: Fields, default: int | None = None) -> int | None:
    """The entry `group_size`; None stands for a whole row, which is -1 in the file.

    Raises:
        CheckpointError: it is no size.
    """
    return None if fields.integer("group_size", default) == -1 else fields.size("group_size", default)


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


def check_words(bits: int, num_features: int, which: str) -> None:
    """Checks that so many integers fill 32-bit words.

    Raises:
        CheckpointError: the last word is not full.
    """
    if num_features * bits % 32:
        raise CheckpointError(
            f"quantization_config: a linear map's {num_features} {which} do not fill 32-bit words with {bits} bits each"
        )


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
