"""GGUF files byte by byte, for what the `gguf` library would refuse to write."""

from __future__ import annotations

import struct

Tensor = tuple[str, tuple[int, ...], int, int]
"""Name, dimensions as in the file, type, and offset."""


def U32(value: int) -> bytes:
    return struct.pack("<I", value)


def U64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: str) -> bytes:
    return U64(len(value.encode())) + value.encode()


class Raw:
    """A file of these entries, each a key and the bytes of its value; its counts may be wrong."""

    def __init__(
        self,
        *entries: list[str | bytes],
        version: int = 3,
        num_entries: int | None = None,
        num_tensors: int | None = None,
    ) -> None:
        self._entries = [[text(str(key)), *values] for key, *values in entries]
        self._version = version
        self._num_entries = len(entries) if num_entries is None else num_entries
        self._num_tensors = num_tensors or 0
        self._tensors: list[bytes] = []
        self._data = 0

    def with_tensors(self, *tensors: Tensor, data: int = 64) -> Raw:
        """Adds tensors, and so many bytes of data."""
        self._tensors += [
            text(name) + U32(len(shape)) + b"".join(map(U64, shape)) + U32(type) + U64(offset)
            for name, shape, type, offset in tensors
        ]
        self._num_tensors, self._data = len(self._tensors), data
        return self

    @property
    def bytes(self) -> bytes:
        header = b"GGUF" + U32(self._version) + U64(self._num_tensors) + U64(self._num_entries)
        header += b"".join(part for entry in self._entries for part in entry if isinstance(part, bytes))
        header += b"".join(self._tensors)
        return header + bytes(-len(header) % 32) + bytes(self._data)
