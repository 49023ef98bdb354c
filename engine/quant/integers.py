"""Weights as small integers: their rounding from float weights, and their meaning."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from penstock.engine.ahead import in_order
from penstock.engine.errors import CheckpointError
from penstock.engine.quant.formats import NamedTensors
from penstock.engine.quant.rotation import rotated_back
from penstock.engine.quant.rounding import (
    Floats,
    RoundGroups,
    column_squares,
    column_units,
    importance,
    round_groups,
)

_Made = TypeVar("_Made")

_LEAST_GROUP, _MOST_OF_NARROW = 16, 1024
"""The kernels take so many inputs of a group at least, and so many at most with fewer than 8 bits, or with scales other
than in float32; or else a whole row."""

_UNIT_SIZE = 256
"""So many inputs share a unit."""

_MOST_INPUTS = 1 << 17
"""The sum of so many products of 8-bit integers fits 32 bits."""

_ELEMENTS_AT_A_TIME = 1 << 17
"""Rounding works on so many weights at a time: temporaries stay in the cache, and threads seldom wait for the GIL."""


class Factors(StrEnum):
    """The representation of the scales and offsets of integers."""

    FLOAT32 = "float32"
    """In float32."""
    HALF = "16 bits"
    """As a checkpoint has them: in float16 or bfloat16."""
    ZEROS = "zeros"
    """Scales likewise; an offset is -zero * scale, and the zero is an integer."""
    COUNTS = "counts"
    """As integers, which count a unit that 256 inputs of a row share; offsets have units of their own."""


class Inputs(StrEnum):
    """The rounding of activations before they are multiplied with integers, where they are."""

    GROUPS = "groups"
    """To 8 bits, with a scale for each group of the weight."""
    ROW = "row"
    """To 8 bits, with a scale for each row."""
    FINE = "fine"
    """To 15 bits, with a scale for each group of the weight: the rest beyond 8 bits is rounded to 8 bits once more. For
    checkpoints that say that activations have 16 bits."""


@dataclass(frozen=True, slots=True)
class Integers:
    """A weight of integers with `bits` bits; each group of `group_size` inputs of a row has a scale of its own.

    The weight stands for integer * scale, or for integer * scale + offset where groups have offsets, too. A group is a
    whole row, or a multiple of 16 inputs that divides the row (see `check`). The tensors are:
        weight: [out, in] int8, from -2^(bits - 1) on; with fewer than 8 bits and offsets, from 0 on
        scale: [out, in / group_size], float32, float16, bfloat16, or int8 if they are counts
        offset: likewise, if has_offset; or instead
        zero: [out, in / group_size] int8, if there are zeros
        scale_unit, offset_unit: [out, in / 256] float16, if there are counts
        permutation: [in] int32, if is_permuted: column i of the weight multiplies input permutation[i].
    """

    bits: int
    group_size: int
    has_offset: bool = False
    is_permuted: bool = False
    factors: Factors = Factors.FLOAT32
    table: tuple[int, ...] = ()
    """16 numbers of 8 bits that all integers are among, if there are no more: a kernel can keep their places."""
    inputs: Inputs = Inputs.GROUPS
    rotation: int = 0
    """The size of the blocks in which inputs are rotated before they are rounded, and the weight is, too (see
    `rotation.py`); 0 if they are not."""

    @property
    def name(self) -> str:
        return f"int{self.bits}"

    @property
    def lowest(self) -> int:
        """The least integer; there are 2^bits of them."""
        return 0 if self.bits < 8 and self.has_offset else -(1 << (self.bits - 1))

    @property
    def groups_per_unit(self) -> int:
        return _UNIT_SIZE // self.group_size if self.factors is Factors.COUNTS else 1

    @property
    def widened(self) -> Integers:
        """The format that holds the same weights with scales and offsets in float32, in 4 or 8 bits."""
        bits = 4 if self.bits <= 4 else 8
        return replace(self, bits=bits, factors=Factors.FLOAT32, table=())

    def check(self, in_features: int) -> None:
        """Checks that rows of so many inputs can be in this format.

        Raises:
            CheckpointError: the message says what is wrong with the groups or the inputs.
        """
        size = self.group_size
        if self.bits not in (2, 3, 4, 5, 6, 8):
            raise CheckpointError(
                f"integers of {self.bits} bits: there are kernels for 2, 3, 4, 5, 6 and 8 only"
            )
        if in_features > _MOST_INPUTS:
            raise CheckpointError(
                f"{in_features} inputs are more than the {_MOST_INPUTS} that integers can have"
            )
        if size < 1 or in_features % size:
            raise CheckpointError(f"groups of {size} do not divide {in_features} inputs")
        if self.factors is Factors.COUNTS and (in_features % _UNIT_SIZE or _UNIT_SIZE % size):
            raise CheckpointError(
                f"units of {_UNIT_SIZE} inputs do not divide {in_features}, or groups of {size} them"
            )
        if size == in_features and self.bits in (4, 8):
            return
        if size % _LEAST_GROUP:
            raise CheckpointError(
                f"groups of {size} inputs: a whole row or a multiple of {_LEAST_GROUP} is needed"
            )
        if size == in_features:
            raise CheckpointError(
                f"integers of {self.bits} bits: rows of more than one group of {size} are needed"
            )
        if size > _MOST_OF_NARROW and (self.bits < 8 or self.factors is not Factors.FLOAT32):
            raise CheckpointError(
                f"groups of {size} inputs: with {self.bits} bits, a whole row or at most {_MOST_OF_NARROW} is needed"
            )

    def shapes(self, out_features: int, in_features: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        num_groups = in_features // self.group_size
        yield "weight", (out_features, in_features)
        yield "scale", (out_features, num_groups)
        if self.has_offset:
            yield "zero" if self.factors is Factors.ZEROS else "offset", (out_features, num_groups)
        if self.factors is Factors.COUNTS:
            for name in ("scale_unit", "offset_unit")[: 1 + self.has_offset]:
                yield name, (out_features, in_features // _UNIT_SIZE)
        if self.is_permuted:
            yield "permutation", (in_features,)

    def join(self, parts: Sequence[NamedTensors]) -> NamedTensors:
        """A copy of the linear map with the output features of all parts, one part after another.

        Raises:
            CheckpointError: the parts have their inputs in different orders.
        """
        names = [name for name in parts[0] if name != "permutation"]
        joined = {name: torch.cat([part[name] for part in parts]) for name in names}
        if self.is_permuted:
            joined["permutation"] = _common_permutation(parts)
        return joined

    def rows(self, tensors: NamedTensors, rows: slice) -> NamedTensors:
        """The tensors of some output features, which share the memory of all."""
        return {name: tensor if name == "permutation" else tensor[rows] for name, tensor in tensors.items()}

    def unpack(self, tensors: NamedTensors) -> Tensor:
        """The weight [out, in] that the integers stand for, in float32, in the order of the inputs."""
        grouped = self.grouped(tensors) * self.scale(tensors).unsqueeze(-1)
        if (offset := self.offset(tensors)) is not None:
            grouped += offset.unsqueeze(-1)
        weight = grouped.flatten(1)
        if self.rotation:
            return rotated_back(weight, self.rotation)
        if not self.is_permuted:
            return weight
        return torch.empty_like(weight).index_copy_(1, tensors["permutation"].long(), weight)

    def grouped(self, tensors: NamedTensors) -> Tensor:
        """The integers, [out, groups, group_size] in float32."""
        return torch.unflatten(tensors["weight"], 1, (-1, self.group_size)).float()

    def scale(self, tensors: NamedTensors) -> Tensor:
        """The scales, [out, groups] in float32."""
        return self._in_units(tensors, "scale")

    def offset(self, tensors: NamedTensors) -> Tensor | None:
        """The offsets, [out, groups] in float32, if there are any."""
        if not self.has_offset:
            return None
        if self.factors is Factors.ZEROS:
            return -tensors["zero"].float() * self.scale(tensors)
        return self._in_units(tensors, "offset")

    def with_float32(self, tensors: NamedTensors) -> NamedTensors:
        """The tensors of the same weight with scales and offsets in float32."""
        kept = {name: tensors[name] for name in ("weight", "permutation") if name in tensors}
        offset = self.offset(tensors)
        return kept | {"scale": self.scale(tensors)} | ({} if offset is None else {"offset": offset})

    def _in_units(self, tensors: NamedTensors, name: str) -> Tensor:
        factor = tensors[name].float()
        if self.factors is not Factors.COUNTS:
            return factor
        return factor * tensors[f"{name}_unit"].float().repeat_interleave(self.groups_per_unit, 1)

    def num_bytes(self, out_features: int, in_features: int, dtype: torch.dtype = torch.float32) -> int:  # noqa: ARG002
        """The bytes of a packed weight: the integers, and the scales and offsets as they are kept."""
        num_groups, is_row = out_features * (in_features // self.group_size), self.group_size == in_features
        match Factors.FLOAT32 if is_row else self.factors:
            case Factors.FLOAT32:
                factors = 4 * num_groups * (1 + self.has_offset)
            case Factors.HALF:
                factors = 2 * num_groups * (1 + self.has_offset)
            case Factors.ZEROS:
                factors = num_groups * (2 + self.has_offset)
            case Factors.COUNTS:
                factors = (num_groups + 2 * num_groups // self.groups_per_unit) * (1 + self.has_offset)
        bits = 4 if self.table and not is_row else self.bits
        return out_features * in_features * bits // 8 + factors + 4 * in_features * self.is_permuted

    def quantize(self, weight: Tensor, round_groups: RoundGroups = round_groups) -> NamedTensors:
        """The tensors of a float weight [out, in], whose inputs the group size divides.

        Weights are rounded to 8 bits without offsets, and to fewer with them: factors then have bfloat16's numbers.

        Args:
            round_groups: has the results of `rounding.round_groups`.
        """
        assert self.has_offset == (self.bits < 8)
        assert self.factors is Factors.FLOAT32 or (self.has_offset and self.factors is Factors.HALF)
        assert not self.is_permuted

        def rounded(part: Floats) -> dict[str, np.ndarray]:
            groups = part.reshape(len(part), -1, self.group_size)
            return round_groups(groups, self.bits, counted, self.rotation)

        counted = self._importance(weight) if self.has_offset else None
        chunks = list(_in_parts(rounded, weight))
        made = {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}
        tensors = {name: _as_tensor(array) for name, array in made.items()}
        return self.with_float32(tensors) if self.factors is Factors.FLOAT32 else tensors

    def _importance(self, weight: Tensor) -> Floats:
        peaks = list(_in_parts(lambda part: np.abs(part).max(0), weight))
        units = column_units(np.max(peaks, 0))
        squares = list(_in_parts(lambda part: column_squares(part, units), weight))
        return importance(np.sum(squares, 0)).reshape(-1, self.group_size)


def _in_parts(make: Callable[[Floats], _Made], weight: Tensor) -> Iterator[_Made]:
    """Yields the results of `make` for some rows at a time, in threads."""

    def made(rows: Tensor) -> _Made:
        return make(rows.float().contiguous().numpy())

    step = max(1, _ELEMENTS_AT_A_TIME // weight.shape[1])
    return in_order(partial(made, rows) for rows in torch.split(weight.detach().cpu(), step))


def _as_tensor(array: np.ndarray) -> Tensor:
    """Returns a tensor of the same bits; 16-bit ones are bfloat16."""
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def common_format(formats: Sequence[Integers]) -> Integers:
    """The format that linear maps of the same inputs can all be widened to: the finest groups, the most bits.

    Raises:
        CheckpointError: some have their inputs permuted or rotated, and some do not.
    """
    for what, has in (
        ("permuted", [f.is_permuted for f in formats]),
        ("rotated", [f.rotation for f in formats]),
    ):
        if len(set(has)) > 1:
            raise CheckpointError(f"only some of the weights that are multiplied together have {what} inputs")
    rounded = {format.inputs for format in formats}
    return Integers(
        bits=max(format.bits for format in formats),
        group_size=math.gcd(*(format.group_size for format in formats)),
        has_offset=any(format.has_offset for format in formats),
        is_permuted=formats[0].is_permuted,
        factors=_common_factors(formats),
        table=formats[0].table if len({format.table for format in formats}) == 1 else (),
        inputs=next(inputs for inputs in (Inputs.FINE, Inputs.GROUPS, Inputs.ROW) if inputs in rounded),
        rotation=formats[0].rotation,
    )


def _common_factors(formats: Sequence[Integers]) -> Factors:
    """The factors that all have, or float32. With zeros, scales that are alone get the zero of their lowest integer."""
    kinds = {format.factors for format in formats}
    if kinds == {Factors.HALF, Factors.ZEROS} and all(
        format.bits == 4 and format.has_offset == (format.factors is Factors.ZEROS) for format in formats
    ):
        return Factors.ZEROS
    return kinds.pop() if len(kinds) == 1 else Factors.FLOAT32


def widen(tensors: NamedTensors, format: Integers, to: Integers) -> NamedTensors:
    """Returns the tensors of `format` in `to`, a common format of it and others. They stand for the same numbers."""
    if format == to:
        return tensors
    if format.factors != to.factors and to.factors is not Factors.ZEROS:
        tensors = format.with_float32(tensors)
    weight, scale = tensors["weight"], tensors["scale"]
    by_group = {name: tensors[name] for name in ("scale", "offset", "zero") if name in tensors}
    widened = {
        name: tensors[name] for name in ("scale_unit", "offset_unit", "permutation") if name in tensors
    }
    raised = max(to.lowest - format.lowest, 0)  # few bits that get offsets
    if to.has_offset and not format.has_offset:
        match to.factors:
            case Factors.ZEROS:
                by_group["zero"] = torch.full_like(scale, raised, dtype=torch.int8)
            case Factors.COUNTS:
                by_group["offset"], widened["offset_unit"] = scale, -raised * tensors["scale_unit"].float()
            case _:
                by_group["offset"] = -raised * scale.float()
    parts = format.group_size // to.group_size
    widened |= {name: tensor.repeat_interleave(parts, 1) for name, tensor in by_group.items()}
    return widened | {"weight": weight + raised if raised else weight}


def _common_permutation(parts: Sequence[NamedTensors]) -> Tensor:
    first = parts[0]["permutation"]
    if not all(torch.equal(part["permutation"], first) for part in parts):
        raise CheckpointError(
            "weights that are multiplied together have their inputs permuted in different ways"
        )
    return first
