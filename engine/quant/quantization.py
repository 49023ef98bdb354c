"""The formats that `--quantize` gives the linear maps of a model as it is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.engine.errors import CheckpointError
from penstock.engine.quant.codebook import NF4, Codebook
from penstock.engine.quant.float8 import Float8
from penstock.engine.quant.formats import Rounding
from penstock.engine.quant.integers import Factors, Inputs, Integers
from penstock.engine.quant.rotation import block_size

_GROUPED = ("int4", "nf4")
"""The quantizations of 4 bits: their rows are cut into groups, and layers that matter most have 8 bits."""

_LAYERS_OF_8_BITS = 1
"""So many layers at the start have 8 bits where 4 are asked for: all later layers read their outputs."""
_LAYERS_OF_WIDE_GROUPS = 6
"""So many layers after them have wide groups in int4: half a bit less a weight, which makes up for the first layer."""

_WIDE_GROUPS, _NARROW_GROUPS = (64, 32), (32,)
"""The default group sizes for 4 bits; the first that divides the inputs is taken."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantization of the linear maps of a model.

    The output head and the first layer have 8 bits in any case: rounding them shows most in the logits. int4 has 5 bits
    a weight on the mean of seven layers or more, scales and offsets included.
    """

    name: str
    """int8, int4, fp8 (numbers in e4m3, a scale for each row) or nf4."""
    group_size: int | None = None
    """None stands for a default: a whole row for 8 bits, and a size that divides the row for 4 bits."""

    def layer_format(self, layer: int, in_features: int) -> Rounding:
        """The format of a linear map of a layer.

        Raises:
            CheckpointError: no group size that is allowed divides the inputs.
        """
        if self.name in _GROUPED and layer < _LAYERS_OF_8_BITS:
            return self.head_format(in_features)
        match self.name:
            case "int8":
                return self._bytes(in_features, self._group(in_features, (in_features,)))
            case "int4":
                has_wide_groups = layer < _LAYERS_OF_8_BITS + _LAYERS_OF_WIDE_GROUPS
                size = self._group(in_features, _WIDE_GROUPS if has_wide_groups else _NARROW_GROUPS)
                return Integers(4, size, has_offset=True, factors=Factors.HALF)
            case "nf4":
                return Codebook("nf4", NF4, self._group(in_features, _WIDE_GROUPS))
        return self.head_format(in_features)

    def head_format(self, in_features: int) -> Rounding:
        """The format of the output head."""
        return Float8() if self.name == "fp8" else self._bytes(in_features, in_features)

    def _bytes(self, in_features: int, group_size: int) -> Integers:
        """Integers of 8 bits, with rotated inputs: a scale for a whole row does not bear channels that stand out."""
        if group_size < in_features:
            return Integers(8, group_size)
        return Integers(8, group_size, inputs=Inputs.ROW, rotation=block_size(in_features))

    def _group(self, in_features: int, default: tuple[int, ...]) -> int:
        allowed = default if self.group_size is None else (self.group_size,)
        group_size = next((size for size in allowed if in_features % size == 0), None)
        if group_size is None:
            tried = " or ".join(str(size) for size in sorted(allowed))
            raise CheckpointError(
                f"--quantize {self.name}: groups of {tried} do not divide a linear map's {in_features} inputs"
            )
        return group_size
