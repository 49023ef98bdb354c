"""Reads the header of a GGUF file: its metadata, and where its tensors lie. Nothing of the tensors is read.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. No number in a file is believed before it is compared
with the size of the file, so that a broken file costs no more time and memory than a whole one.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path

from penstock.engine.errors import CheckpointError
from penstock.engine.fields import Fields

SUFFIX = ".gguf"

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_MAX_NAME_BYTES = 1 << 16
_MAX_TEXT_BYTES = 1 << 24
_MAX_ITEMS = 1 << 22
"""More entries, tensors, or items of an array than any file has: a vocabulary has some hundred thousand."""

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The types of metadata that have a fixed size, as the struct module names them."""
_STRING, _ARRAY = 8, 9

_SHARD = re.compile(r"(?P<stem>.+)-00001-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class TensorType:
    """A ggml type: so many elements of a row share so many bytes."""

    name: str
    block: int = 1
    num_bytes: int = 0
    """0 if the type is not supported."""


TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    20: TensorType("IQ4_NL", 32, 18),
    23: TensorType("IQ4_XS", 256, 136),
    30: TensorType("BF16", 1, 2),
    39: TensorType("MXFP4", 32, 17),
} | {
    number: TensorType(name)
    for number, name in {
        9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S",
        24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4",
        41: "Q1_0",
    }.items()
}  # fmt: skip
"""By their number in a file; the names are ggml's."""

SUPPORTED = tuple(type.name for type in TYPES.values() if type.num_bytes)


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """The place of a tensor."""

    name: str
    file: Path
    type: TensorType
    shape: tuple[int, ...]
    """In torch's order: the last dimension is contiguous."""
    start: int
    """The offset of the first byte in the file."""

    @property
    def num_bytes(self) -> int:
        """0 if the type is not supported."""
        return prod(self.shape) // self.type.block * self.type.num_bytes


@dataclass(frozen=True, slots=True)
class Header:
    """The part of a GGUF file before its tensors' data."""

    path: Path
    metadata: dict[str, object]
    tensors: dict[str, GgufTensor]
    num_bytes: int
    """The bytes of the header itself; of the first part's, if there are several."""

    @property
    def fields(self) -> Fields:
        return Fields(str(self.path), self.metadata)


def is_gguf(path: Path) -> bool:
    return path.suffix.lower() == SUFFIX


def read_header(path: Path) -> Header:
    """Reads the header of a file; of a model in several parts, whose first one is named, the tensors of all parts.

    Raises:
        CheckpointError: a file is missing, truncated or malformed.
    """
    first = _read_one(path)
    count = first.fields.integer("split.count", 1)
    tensors = dict(first.tensors)
    for part in _other_parts(path, count) if count > 1 else ():
        for name, tensor in _read_one(part).tensors.items():
            if name in tensors:
                raise CheckpointError(f"{part}: tensor {name} is in another part of the model, too")
            tensors[name] = tensor
    return Header(path, first.metadata, tensors, first.num_bytes)


def read_bytes(tensor: GgufTensor) -> bytes:
    """The bytes of a tensor; for small ones."""
    with tensor.file.open("rb") as opened:
        opened.seek(tensor.start)
        return opened.read(tensor.num_bytes)


def _other_parts(path: Path, count: int) -> Iterator[Path]:
    found = _SHARD.fullmatch(path.name)
    if found is None or int(found["count"]) != count:
        raise CheckpointError(
            f"{path} is one of {count} parts of a model; name the first, which ends in -00001-of-{count:05}{SUFFIX}"
        )
    for number in range(2, count + 1):
        yield path.with_name(f"{found['stem']}-{number:05}-of-{count:05}{SUFFIX}")


def forget_headers() -> None:
    """Frees the headers that are kept for the next reader: their vocabularies are large."""
    _read_known.cache_clear()


def _read_one(path: Path) -> Header:
    try:
        found = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    return _read_known(path, found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=4)
def _read_known(path: Path, num_bytes: int, modified_ns: int) -> Header:  # noqa: ARG001
    """Reads a file of this length and time."""
    try:
        with path.open("rb") as opened:
            if opened.read(len(_MAGIC)) != _MAGIC:
                raise CheckpointError(f"{path} is no GGUF file")
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, _Cursor(path, data))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None


def _parse(path: Path, cursor: _Cursor) -> Header:
    version = cursor.number("I")
    if version not in _VERSIONS:
        order = "; its byte order is big-endian" if version & 0xFFFF == 0 else ""
        raise CheckpointError(f"{path}: GGUF version {version} is not supported; only 2 and 3 are{order}")
    num_tensors, num_entries = cursor.count(), cursor.count()
    metadata: dict[str, object] = {}
    for _ in range(num_entries):
        key = cursor.text(_MAX_NAME_BYTES)
        if key in metadata:
            raise cursor.malformed(f"{key!r:.80} is there twice")
        metadata[key] = cursor.value(key)
    found = [_read_tensor(path, cursor) for _ in range(num_tensors)]
    alignment = Fields(str(path), metadata).size("general.alignment", _ALIGNMENT, most=1 << 20)
    if alignment % 8:
        raise cursor.malformed(f"general.alignment is {alignment}, which is no multiple of 8")
    first = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for tensor in found:
        if tensor.name in tensors:
            raise cursor.malformed(f"tensor {tensor.name!r:.80} is there twice")
        if tensor.start % alignment:
            raise CheckpointError(
                f"{path}: {tensor.name} begins at {tensor.start}, which is no multiple of {alignment}"
            )
        tensors[tensor.name] = tensor = replace(tensor, start=first + tensor.start)
        end = tensor.start + tensor.num_bytes
        if end > cursor.size:
            raise CheckpointError(
                f"{path} is truncated: it has {cursor.size} bytes, and {tensor.name} ({tensor.type.name}) ends at {end}"
            )
    return Header(path, metadata, tensors, cursor.at)


def _read_tensor(path: Path, cursor: _Cursor) -> GgufTensor:
    """Reads a tensor's entry in the header; its offset counts from the start of the first tensor."""
    name = cursor.text(_MAX_NAME_BYTES)
    num_dimensions = cursor.number("I")
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise cursor.malformed(f"tensor {name!r:.80} has {num_dimensions} dimensions")
    shape = tuple(cursor.number("Q") for _ in range(num_dimensions))[::-1]
    if 0 in shape:
        raise cursor.malformed(f"tensor {name!r:.80} has shape {list(shape)}")
    number = cursor.number("I")
    type = TYPES.get(number, TensorType(f"type {number}"))
    if shape[-1] % type.block:
        raise CheckpointError(
            f"{path}: {name} has rows of {shape[-1]}, and {type.name} comes in blocks of {type.block}"
        )
    return GgufTensor(name, path, type, shape, cursor.number("Q"))


class _Cursor:
    """Reads one value after another, none of them past the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.at = len(_MAGIC)
        self.size = len(data)
        self._path, self._data = path, data

    def malformed(self, fault: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is malformed: {fault}")

    def number(self, kind: str) -> int:
        """One of the numbers of the struct module that are whole."""
        (value,) = self._numbers(kind, 1)
        return int(value)

    def count(self) -> int:
        """Reads the number of items that follow."""
        value = self.number("Q")
        if value > _MAX_ITEMS:
            raise self.malformed(f"it says that {value} items follow at byte {self.at}")
        if value > self.size - self.at:
            raise self._too_short(self.at)
        return value

    def text(self, most: int) -> str:
        (found,) = self._texts(1, most)
        return found

    def value(self, key: str) -> object:
        """The value of an entry of the metadata."""
        kind = self.number("I")
        if kind == _STRING:
            return self.text(_MAX_TEXT_BYTES)
        if kind == _ARRAY:
            return self._array(key)
        (value,) = self._numbers(self._kind(kind, key), 1)
        return value

    def _array(self, key: str) -> list[object]:
        kind, count = self.number("I"), self.count()
        if kind == _STRING:
            return list(self._texts(count, _MAX_TEXT_BYTES))
        return list(self._numbers(self._kind(kind, key), count))

    def _kind(self, number: int, key: str) -> str:
        if number not in _NUMBERS:
            raise self.malformed(f"{key!r:.80} has a value of type {number}")
        return _NUMBERS[number]

    def _numbers(self, kind: str, count: int) -> tuple[int | float, ...]:
        layout = struct.Struct(f"<{count}{kind}")
        start = self._pass(layout.size)
        return layout.unpack_from(self._data, start)

    def _texts(self, count: int, most: int) -> list[str]:
        """Strings of at most so many bytes; a loop of its own, because a vocabulary has hundreds of thousands."""
        found, data, at, size = [], self._data, self.at, self.size
        for _ in range(count):
            start = at + 8
            length = int.from_bytes(data[at:start], "little")
            at = start + length
            if at > size or length > most:
                raise (
                    self._too_short(start)
                    if length <= most
                    else self.malformed(f"it says that a string of {length} bytes follows at byte {start}")
                )
            try:
                found.append(data[start:at].decode())
            except UnicodeDecodeError:
                raise self.malformed(f"the string at byte {start} is not UTF-8") from None
        self.at = at
        return found

    def _pass(self, num_bytes: int) -> int:
        """Steps over so many bytes, and returns where they begin."""
        start, self.at = self.at, self.at + num_bytes
        if self.at > self.size:
            raise self._too_short(start)
        return start

    def _too_short(self, at: int) -> CheckpointError:
        return CheckpointError(f"{self._path} is truncated: its header goes on at byte {at} of {self.size}")
