"""Reads safetensors checkpoints by memory map: one file, or the shards that an index names.

Format: https://huggingface.co/docs/safetensors (8 bytes length, a JSON header, then the tensors' bytes).
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from penstock.engine.errors import CheckpointError
from penstock.engine.fields import Fields

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The types that tensors may have, by their names in a safetensors header."""

_MODEL, _NESTED = "model.", "language_model."
_BACKBONE = "backbone."
_PREFIXES = ("model.language_model.", "language_model.model.", "", _BACKBONE)
"""The prefixes of a text model's tensors where they are not "model."."""
_EMBEDDINGS = {f"{_MODEL}embeddings.weight": f"{_MODEL}embed_tokens.weight"}
"""Names of Mamba-2 and Nemotron."""
_INTERN = {"model.tok_embeddings.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight"}
"""Names of InternLM."""
_OUTSIDE = ("embed_tokens", "norm", "norm_f")
"""Tensors by which a prefix is known."""
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The place of a tensor in a file. The tensor itself has not been read."""

    file: Path
    dtype: str
    """The type by its name in the header: F32, BF16, ..."""
    shape: tuple[int, ...]
    start: int
    """The offset of the first byte in the file."""
    num_bytes: int


class TensorFiles:
    """The tensors of a checkpoint by name. Their bytes are read from disk when a tensor that was read is used."""

    def __init__(
        self,
        path: Path,
        entries: Mapping[str, TensorEntry] | None = None,
        own_name: Callable[[str], str] = str,
        config: str = "config.json",
        names: tuple[str, str] = (SINGLE, INDEX),
    ) -> None:
        """Reads the headers of all files in a folder, and checks that each file is as long as its header says.

        Args:
            path: the checkpoint's folder or file.
            entries: of the tensors, if it is known where they are: no file is looked into then.
            own_name: returns the files' name for a tensor.
            config: the file that gives the sizes of tensors, for messages.
            names: the names of the file with all tensors, and of the index of several files.

        Raises:
            CheckpointError: a file is missing, truncated or malformed.
        """
        self.path = path
        self.config = config
        self._own_name = own_name
        self._maps: dict[Path, mmap.mmap] = {}
        if entries is None:
            entries = {
                name: entry for file in _files(path, *names) for name, entry in read_header(file).items()
            }
        self.entries = dict(entries)

    def own_name(self, name: str) -> str:
        """The name of a tensor in the files."""
        return self._own_name(name)

    def read(self, name: str) -> Tensor:
        """Maps a tensor; of a type outside DTYPES, the bytes of its rows, [..., bytes] uint8.

        It lies in the mapped file: nothing is copied.
        """
        entry = self.entries[name]
        dtype, shape = torch.uint8, (*entry.shape[:-1], -1)
        if entry.dtype in DTYPES:
            dtype, shape = DTYPES[entry.dtype], entry.shape
        if not entry.num_bytes:
            return torch.empty(shape, dtype=dtype)
        count = entry.num_bytes // dtype.itemsize
        return torch.frombuffer(self._map(entry.file), dtype=dtype, count=count, offset=entry.start).view(
            shape
        )

    def give_back(self) -> None:
        """Frees the memory of tensors that were read; a tensor that is used again is read again, as it is on disk."""
        for mapped in self._maps.values():
            if hasattr(mmap, "MADV_DONTNEED"):
                mapped.madvise(mmap.MADV_DONTNEED)

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            with file.open("rb") as opened:
                self._maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._maps[file]


def renamed(files: TensorFiles) -> TensorFiles:
    """The files with the names of a model that is nothing but text, and has an output head."""
    prefix = next(
        (p for p in _PREFIXES if {f"{p}{name}.weight" for name in _OUTSIDE} & files.entries.keys()), None
    )
    if prefix is None:
        return named(files, lambda own_name: _INTERN.get(own_name, own_name))
    return named(files, partial(_renamed, prefix=prefix), partial(_missing_name, prefix=prefix))


def named(
    files: TensorFiles,
    name_of: Callable[[str], str],
    missing: Callable[[str], str] = str,
    config: str = "config.json",
) -> TensorFiles:
    """The files with other names of their tensors.

    Args:
        name_of: returns the name of a tensor, given the files' name.
        missing: returns the files' name for a tensor that they lack.
        config: the file that gives the sizes of tensors, for messages.
    """
    own_names = {name_of(own_name): own_name for own_name in files.entries}
    entries = {name: files.entries[own_name] for name, own_name in own_names.items()}
    return TensorFiles(files.path, entries, lambda name: own_names.get(name) or missing(name), config)


def _missing_name(name: str, prefix: str) -> str:
    known = {name: own_name for own_name, name in _EMBEDDINGS.items()} if prefix == _BACKBONE else {}
    return prefix + known.get(name, name).removeprefix(_MODEL) if name.startswith(_MODEL) else name


def _renamed(own_name: str, prefix: str) -> str:
    if own_name.startswith(prefix):
        name = _MODEL + own_name.removeprefix(prefix)
        return _EMBEDDINGS.get(name, name)
    return own_name.removeprefix(_NESTED)


def _files(folder: Path, single: str, index: str) -> list[Path]:
    if (folder / index).exists():
        shards = Fields.read(folder / index).nested("weight_map").string_values()
        files = [folder / name for name in sorted(set(shards))]
    else:
        files = [folder / single]
    for file in files:
        if not file.is_file():
            raise CheckpointError(_missing(folder, file, single, index))
    return files


def _missing(folder: Path, file: Path, single: str, index: str) -> str:
    if file.name != single:
        return f"{file} is missing; {index} names it"
    other = next(
        (path.name for pattern in ("*.bin", "*.pth", "*.gguf") for path in folder.glob(pattern)), None
    )
    hint = f"; {other} is there, but only safetensors can be read" if other else ""
    return f"{folder} holds neither {single} nor {index}{hint}"


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of one file.

    Raises:
        CheckpointError: it is truncated or malformed.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
        if not 0 < length <= min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
            raise CheckpointError(f"{file} is truncated or is no safetensors file")
        text = opened.read(length)
    first = _LENGTH_BYTES + length
    try:
        header = cast("dict[str, object]", json.loads(text))
        entries = {
            name: _entry(file, first, Fields(f"{file}: {name}", cast("dict[str, object]", values)))
            for name, values in header.items()
            if name != "__metadata__"
        }
    except (ValueError, AttributeError, TypeError, RecursionError):
        raise CheckpointError(f"{file} is no safetensors file: its header is malformed") from None
    end = max((entry.start + entry.num_bytes for entry in entries.values()), default=first)
    if end > size:
        raise CheckpointError(f"{file} is truncated: it has {size} bytes and should have {end}")
    return entries


def _entry(file: Path, first: int, fields: Fields) -> TensorEntry:
    start, end = fields.integers("data_offsets")
    dtype, shape = fields.text("dtype"), fields.integers("shape")
    num_bytes = end - start
    if start < 0 or num_bytes < 0 or any(size < 0 for size in shape):
        raise fields.error("data_offsets or shape is negative")
    if dtype in DTYPES and num_bytes != prod(shape) * DTYPES[dtype].itemsize:
        raise fields.error(f"{num_bytes} bytes cannot hold {dtype} of shape {shape}")
    return TensorEntry(file, dtype, shape, first + start, num_bytes)
