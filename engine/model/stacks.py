"""The tensors of experts one by one, where a checkpoint has one tensor for all experts of a layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from torch import Tensor

from penstock.engine.config import ModelConfig
from penstock.engine.errors import CheckpointError
from penstock.engine.model.safetensors import TensorEntry, TensorFiles
from penstock.engine.quant.storages.names import LAYERS
from penstock.engine.spec import Experts, Stack


@dataclass(frozen=True, slots=True)
class _Slice:
    """The part of a stacked tensor that one linear map of one expert has."""

    stacked: str
    expert: int
    place: int
    """Among the maps of the stack."""
    stack: Stack
    is_transposed: bool

    @property
    def num_maps(self) -> int:
        return len(self.stack.maps)

    def of(self, expert: Tensor) -> Tensor:
        """A view of the tensor of its expert."""
        rows = expert.mT if self.is_transposed else expert
        if rows.numel() == 1:  # a scale, which all maps of an expert share
            return rows
        if self.stack.is_interleaved:
            return rows[self.place :: self.num_maps]
        return rows.chunk(self.num_maps)[self.place]


class _Unstacked(TensorFiles):
    """The tensors of other files, and each expert's tensors by its own name."""

    def __init__(
        self, files: TensorFiles, entries: dict[str, TensorEntry], slices: dict[str, _Slice]
    ) -> None:
        super().__init__(files.path, entries, files.own_name, files.config)
        self._files, self._slices = files, slices

    def own_name(self, name: str) -> str:
        found = self._slices.get(name)
        if found is None:
            return self._files.own_name(name)
        return f"{self._files.own_name(found.stacked)} of expert {found.expert}"

    def give_back(self) -> None:
        self._files.give_back()

    def read(self, name: str) -> Tensor:
        found = self._slices.get(name)
        if found is None:
            return self._files.read(name)
        return found.of(self._files.read(found.stacked)[found.expert])


def unstacked(files: TensorFiles, config: ModelConfig) -> TensorFiles:
    """The files with a tensor of its own for each expert of a stack, which is a view of the mapped file.

    Files without stacks are returned as they are.

    Raises:
        CheckpointError: a stack is not of as many experts as the model has, or of an odd number of rows.
    """
    slices: dict[str, _Slice] = {}
    entries = dict(files.entries)
    for number, layer in enumerate(config.layers):
        if isinstance(layer.feed_forward, Experts):
            for name, stack, suffix in _stacks(files, f"{LAYERS}{number}.", layer.feed_forward):
                found = _slices(files, name, stack, suffix, layer.feed_forward)
                prefix = f"{LAYERS}{number}.{layer.feed_forward.prefix}."
                slices |= {prefix + own: one for own, one in found.items()}
                del entries[name]
    if not slices:
        return files
    entries |= {name: _entry(files.entries[one.stacked], one) for name, one in slices.items()}
    return _Unstacked(files, entries, slices)


def _stacks(files: TensorFiles, layer: str, experts: Experts) -> Iterator[tuple[str, Stack, str]]:
    """Yields the stacked tensors of a layer: the full name, the stack, and which tensor of a linear map it is."""
    for stack in experts.stacks:
        for end, suffix in _ENDS.items():
            if (name := f"{layer}{stack.name}{end}") in files.entries:
                yield name, stack, suffix


_ENDS = {
    "": "weight",
    ".weight": "weight",
    "_bias": "bias",
    ".bias": "bias",
    "_blocks": "blocks",
    "_scales": "scales",
    ".weight_scale": "weight_scale",
    ".weight_scale_inv": "weight_scale_inv",
    "_scale_inv": "weight_scale_inv",
}
"""The suffix of a stack's name on disk, and the tensor of a linear map that the stack holds."""


def _slices(files: TensorFiles, name: str, stack: Stack, suffix: str, experts: Experts) -> dict[str, _Slice]:
    entry, num_experts, num_maps = files.entries[name], experts.router.num_experts, len(stack.maps)
    is_transposed = stack.is_transposed and suffix == "weight" and not _is_by_rows(entry, stack, experts)
    axis = 2 if is_transposed else 1
    is_shared = prod(entry.shape[1:]) == 1
    is_whole = is_shared or (len(entry.shape) > axis and entry.shape[axis] % num_maps == 0)
    if not entry.shape or entry.shape[0] != num_experts or not is_whole:
        raise CheckpointError(
            f"{entry.file}: {files.own_name(name)} has shape {list(entry.shape)}, and {files.config} says "
            f"{num_experts} experts of {num_maps} {'maps' if num_maps > 1 else 'map'} each"
        )
    return {
        f"{expert}.{map}.{suffix}": _Slice(name, expert, place, stack, is_transposed)
        for expert in range(num_experts)
        for place, map in enumerate(stack.maps)
    }


def _is_by_rows(entry: TensorEntry, stack: Stack, experts: Experts) -> bool:
    """Returns whether the shape alone says that weights are [experts, rows, in]: transformers 5 writes them so."""
    rows, inputs = len(stack.maps) * experts.inner_size, experts.hidden_size
    if experts.down in stack.maps:
        rows, inputs = inputs, experts.inner_size
    return rows != inputs and entry.shape[1:] == (rows, inputs)


def _entry(entry: TensorEntry, one: _Slice) -> TensorEntry:
    """Returns the entry of a slice. Where its numbers do not lie together, its start is its expert's."""
    num_experts, *shape = entry.shape
    if one.is_transposed:
        shape.reverse()
    if prod(shape) > 1:
        shape[0] //= one.num_maps
    num_bytes = entry.num_bytes // num_experts
    start = entry.start + one.expert * num_bytes
    return replace(entry, shape=tuple(shape), start=start, num_bytes=num_bytes // one.num_maps)
