"""The tensors of a GGUF file, by the engine's names and in the engine's order of rows."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
from torch import Tensor

from engine.model.gguf.config import config_of
from engine.model.gguf.container import GgufTensor, read_header
from engine.model.gguf.names import engine_name, ggml_name
from engine.model.safetensors import DTYPES, TensorEntry


class GgufTensors:
    """The tensors of a model by name. Their bytes are read from disk when what `read` returned is used."""

    config = "the metadata"

    def __init__(self, path: Path) -> None:
        """Reads the header of the file, and of the model's other parts if it has several.

        Raises:
            CheckpointError: a file is missing, truncated, malformed or not supported.
        """
        header = read_header(path)
        config = config_of(header)
        self.path = path
        self.entries = {
            name: _entry(tensor)
            for tensor in header.tensors.values()
            if (name := engine_name(tensor.name)) is not None
        }
        self._maps: dict[Path, mmap.mmap] = {}
        self._heads: dict[str, int] = {}
        if config.architecture == "LlamaForCausalLM":
            self._heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}

    def own_name(self, name: str) -> str:
        """What the file calls a tensor."""
        return ggml_name(name)

    def read(self, name: str) -> Tensor:
        """A tensor in floating point, or the blocks of one that is quantized: [rows, bytes of a row] uint8.

        Its memory is that of the mapped file, except for the queries and keys of llama models. ggml rotates dimension
        2i of a head with 2i + 1, and the files of these models have their rows in that order; here they come in the
        order of transformers, where dimension i is rotated with i + head_dim / 2.
        """
        entry = self.entries[name]
        data = self._map(entry.file)
        if entry.dtype in DTYPES:
            dtype = DTYPES[entry.dtype]
            count = entry.num_bytes // dtype.itemsize
            shape = entry.shape
        else:
            dtype, count, shape = torch.uint8, entry.num_bytes, (*entry.shape[:-1], -1)
        tensor = torch.frombuffer(data, dtype=dtype, count=count, offset=entry.start).view(shape)
        num_heads = self._heads.get(name.split(".")[-2])
        return tensor if num_heads is None else _halves_apart(tensor, num_heads)

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            with file.open("rb") as opened:
                self._maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._maps[file]


def _entry(tensor: GgufTensor) -> TensorEntry:
    return TensorEntry(tensor.file, tensor.type.name, tensor.shape, tensor.start, tensor.num_bytes)


def _halves_apart(tensor: Tensor, num_heads: int) -> Tensor:
    """A copy, whose rows 2i and 2i + 1 of each head have become rows i and i + head_dim / 2."""
    return torch.unflatten(tensor, 0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)
