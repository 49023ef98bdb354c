"""How checkpoints store the weights of linear maps, and what their tensors become for the kernels.

A storage is a parser, a format is a kernel: each of the many storages is repacked at load into one of few formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from engine.quant.formats import DENSE, Format, NamedTensors

FLOATS = ("F32", "BF16", "F16")
"""The floating-point types of weights, as safetensors names them."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One of the tensors that a linear map has in a checkpoint."""

    suffix: str
    """What follows the name of the linear map and a dot: "weight", "qweight", ..."""
    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS
    """The types that it may have, as safetensors names them."""


class BadTensor(ValueError):
    """A stored tensor has values that it cannot have."""

    def __init__(self, suffix: str, fault: str) -> None:
        super().__init__(f"{suffix} {fault}")
        self.suffix = suffix
        self.fault = fault
        """What follows the tensor's name in a sentence: "is not finite", say."""


class Storage(Protocol):
    """One way in which a checkpoint stores the weight of a linear map."""

    @property
    def name(self) -> str:
        """For the operator: "GPTQ, 4 bits", say."""

    def format(self, out_features: int, in_features: int) -> Format:
        """The format that the weight is repacked into.

        Raises:
            CheckpointError: a weight of this size cannot be stored so.
        """

    def tensors(self, out_features: int, in_features: int) -> Iterator[StoredTensor]:
        """What the checkpoint must have of this linear map, its bias aside."""

    def repack(self, tensors: NamedTensors) -> NamedTensors:
        """The stored tensors, as `tensors` describes them, in the format; those that stay as they are, uncopied.

        Raises:
            BadTensor: one has values that it cannot have.
        """


Storages = Callable[[str], Storage]
"""The storage of a linear map by its full name: "model.layers.0.self_attn.q_proj"."""


class Plain:
    """The weight itself, in floating point."""

    name = "dense"

    def format(self, out_features: int, in_features: int) -> Format:  # noqa: ARG002
        return DENSE

    def tensors(self, out_features: int, in_features: int) -> Iterator[StoredTensor]:
        yield StoredTensor("weight", (out_features, in_features))

    def repack(self, tensors: NamedTensors) -> NamedTensors:
        return tensors


PLAIN = Plain()
