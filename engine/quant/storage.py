"""The ways in which checkpoints store the weights of linear maps, and their repacking for the kernels.

A storage is a parser, a format is a kernel: each of the many storages is repacked at load into one of few formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from penstock.engine.quant.formats import DENSE, Format, NamedTensors

FLOATS = ("F32", "BF16", "F16")
"""The floating-point types of weights, as safetensors names them."""


Shape = tuple[int | None, ...]
"""A shape; None stands for a length that only the file knows."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One of the tensors that a linear map has in a checkpoint."""

    suffix: str
    """The suffix after the name of the linear map and a dot: "weight", "qweight", ..."""
    shape: Shape
    dtypes: tuple[str, ...] = FLOATS
    """The types that it may have, as safetensors names them."""
    optional: bool = False
    """Whether a checkpoint may lack it."""
    loose: bool = False
    """Whether axes of length 1 may be missing or added, as in scales: [8], [8, 1]."""

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Returns whether the tensor may have this shape."""
        wanted = tuple(size for size in self.shape if size != 1) if self.loose else self.shape
        found = tuple(size for size in shape if size != 1) if self.loose else shape
        return len(wanted) == len(found) and all(
            size in (None, length) for size, length in zip(wanted, found, strict=True)
        )

    @property
    def known_shape(self) -> tuple[int, ...]:
        """The shape of a tensor with no length that only the file knows."""
        return tuple(size for size in self.shape if size is not None)

    @property
    def shape_text(self) -> str:
        """The shape for an operator: "[any, 16]", say."""
        return f"[{', '.join('any' if size is None else str(size) for size in self.shape)}]"


class BadTensor(ValueError):
    """A stored tensor has values that it cannot have."""

    def __init__(self, suffix: str, fault: str) -> None:
        super().__init__(f"{suffix} {fault}")
        self.suffix = suffix
        self.fault = fault
        """The text that follows the tensor's name in a sentence: "is not finite", say."""


class Storage(Protocol):
    """One way in which a checkpoint stores the weight of a linear map."""

    @property
    def name(self) -> str:
        """The name that an operator reads: "GPTQ, 4 bits", say."""

    def format(self, out_features: int, in_features: int) -> Format:
        """The format that the weight is repacked into.

        Raises:
            CheckpointError: a weight of this size cannot be stored so.
        """

    def tensors(self, out_features: int, in_features: int) -> Iterator[StoredTensor]:
        """Yields the tensors that the checkpoint must have of this linear map, its bias aside."""

    def repack(self, tensors: NamedTensors) -> NamedTensors:
        """Returns the stored tensors, as `tensors` describes them, in the format; unchanged ones are not copied.

        Optional ones that the checkpoint lacks are not among them.

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
