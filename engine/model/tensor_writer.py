"""Writes a safetensors file one tensor after another, so that no more than one is held."""

from __future__ import annotations

import json
import os
from math import prod
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from penstock.engine.model.safetensors import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, which is copied only if its elements do not lie side by side on the CPU."""
    return tensor.contiguous().cpu().view(-1).view(torch.uint8).numpy().data


class TensorWriter:
    """A file whose tensors are announced first, with their shapes and types, and then written in any order.

    Left without an exception, all are on disk.
    """

    def __init__(self, path: Path, tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        self._tensors = tensors
        self._starts: dict[str, int] = {}
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, (shape, dtype) in tensors.items():
            self._starts[name], end = end, end + prod(shape) * dtype.itemsize
            header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [self._starts[name], end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._missing = set(tensors)
        self._first = 8 + len(text)
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if kind is None:
                assert not self._missing, f"never written: {sorted(self._missing)}"
                self._file.flush()
                os.fsync(self._file.fileno())

    def start(self, name: str) -> int:
        """Returns where in the file a tensor begins. Announced tensors follow each other without gaps."""
        return self._first + self._starts[name]

    def flush(self) -> None:
        """Makes the written tensors readable from the file by its name."""
        self._file.flush()

    def write(self, name: str, tensor: Tensor) -> None:
        shape, dtype = self._tensors[name]
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype), f"{name} was announced otherwise"
        self._missing.remove(name)
        self._file.seek(self.start(name))
        self._file.write(bytes_of(tensor))
