"""The tensors of a checkpoint as one of several ranks sees them: its part of each, which alone is read."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engine.config import ModelConfig
from penstock.engine.kernels.ranks import Ranks
from penstock.engine.model.safetensors import TensorEntry, TensorFiles
from penstock.engine.model.tensors import expected_shapes, layer_specs


class SplitFiles(TensorFiles):
    """The files of a checkpoint in floating point, whose tensors have the shapes of `part`, a split of its config.

    An axis that is shorter in `part` is cut, and each kind of rows of a fused linear map by itself. Where all pieces
    together are fewer than the ranks, several ranks have the same one, and where they are longer than the axis, zeros
    follow. The biases that all ranks would add, rank 0 adds.
    """

    def __init__(self, files: TensorFiles, whole: ModelConfig, part: ModelConfig, ranks: Ranks) -> None:
        shapes = expected_shapes(part).items()
        entries = {name: _part_of(files.entries[name], shape) for name, shape in shapes}
        super().__init__(files.path, entries, files.own_name)
        self._files = files
        self._ranks = ranks
        self._summed = {
            f"{p.name}.bias" for spec in layer_specs(part) if spec.sums and spec.bias for p in spec.parts
        }
        self._sections = {
            f"model.layers.{number}.{rows.name}": (rows.sections, own_rows.sections)
            for number, (layer, own) in enumerate(zip(whole.layers, part.layers, strict=True))
            for maps in (layer.maps(),)
            for field, map in own.maps().items()
            for rows, own_rows in zip(maps[field].rows, map.rows, strict=True)
        } | {
            f"model.layers.{number}.{vector.name.rpartition('.')[0]}": (vector.sections, own_vector.sections)
            for number, (layer, own) in enumerate(zip(whole.layers, part.layers, strict=True))
            for vector, own_vector in zip(layer.vectors().values(), own.vectors().values(), strict=True)
            if vector.sections
        }

    def give_back(self) -> None:
        self._files.give_back()

    def read(self, name: str) -> Tensor:
        tensor = self._files.read(name)
        if name in self._summed and self._ranks.rank:
            return tensor.new_zeros(tensor.shape)
        module, sizes = name.rpartition(".")[0], self.entries[name].shape
        if tensor.dim() > len(sizes):  # see `StoredTensor.loose`
            tensor = tensor.squeeze()
        if module in self._sections:
            lengths, own = self._sections[module]
            pieces = zip(torch.split(tensor, list(lengths)), own, strict=True)
            tensor = torch.cat([self._cut(piece, 0, size) for piece, size in pieces])
        for axis, size in enumerate(sizes):
            tensor = self._cut(tensor, axis, size)
        return tensor

    def _cut(self, tensor: Tensor, axis: int, size: int) -> Tensor:
        """The rank's piece of an axis; a view of the tensor, but for padding."""
        length = tensor.shape[axis]
        num_pieces = -(-length // size)
        start = self._ranks.rank * num_pieces // self._ranks.size * size
        piece = tensor.narrow(axis, start, min(size, length - start))
        missing = size - piece.shape[axis]
        return piece if not missing else F.pad(piece, (0, 0) * (tensor.dim() - 1 - axis) + (0, missing))


def _part_of(entry: TensorEntry, shape: tuple[int, ...]) -> TensorEntry:
    """The entry with another shape."""
    item = entry.num_bytes // max(1, prod(entry.shape))
    return replace(entry, shape=shape, num_bytes=prod(shape) * item)
