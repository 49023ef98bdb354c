"""Opens the files of a checkpoint in any format."""

from __future__ import annotations

from math import prod
from pathlib import Path

from penstock.engine.model import consolidated
from penstock.engine.model.consolidated import is_consolidated
from penstock.engine.model.gguf.container import GgufTensor, is_gguf, read_header
from penstock.engine.model.gguf.kinds import GgufKind
from penstock.engine.model.gguf.names import Names
from penstock.engine.model.gguf.stored_latents import OF_HEADS
from penstock.engine.model.safetensors import TensorEntry, TensorFiles, named, renamed


def open_files(path: Path) -> TensorFiles:
    """The tensors of the checkpoint in a directory or a file by the names of transformers.

    Raises:
        CheckpointError: a file is missing, truncated, malformed or not supported.
    """
    if is_gguf(path):
        return _open_gguf(path)
    if is_consolidated(path):
        files = TensorFiles(path, names=(consolidated.WEIGHTS, consolidated.INDEX))
        return named(files, consolidated.transformers_name, config=consolidated.PARAMS)
    return renamed(TensorFiles(path))


def _open_gguf(path: Path) -> TensorFiles:
    """The tensors of a GGUF file, and of the model's other parts if it has several."""
    header = read_header(path)
    names = Names(GgufKind.of(header))
    own_names = {name: tensor for tensor in header.tensors if (name := names.engine_name(tensor)) is not None}
    found = {name: header.tensors[own_name] for name, own_name in own_names.items()}
    entries = {
        name: TensorEntry(tensor.file, tensor.type.name, _shape(name, tensor), tensor.start, tensor.num_bytes)
        for name, tensor in found.items()
    }
    return TensorFiles(
        path, entries, lambda name: own_names.get(name) or names.ggml_name(name), config="the metadata"
    )


def _shape(name: str, tensor: GgufTensor) -> tuple[int, ...]:
    """The shape of a tensor; a norm that lies by groups of heads is one row, and rows of heads follow one another."""
    if name.endswith(OF_HEADS):
        return (prod(tensor.shape[:-1]), tensor.shape[-1])
    return (prod(tensor.shape),) if name.endswith("norm.weight") else tensor.shape
