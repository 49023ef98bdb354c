"""Mixers with a state as the native decoder runs them."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_void_p
from dataclasses import dataclass

from torch import Tensor

from penstock.engine.kernels.cpu.library import expect_shape, fields, float32
from penstock.engine.kernels.recurrent import StateVectors
from penstock.engine.kernels.state_cache import StateCache
from penstock.engine.spec import GatedDelta, Mamba2, ShortConv, StateMixer

KINDS: tuple[type[StateMixer], ...] = (GatedDelta, Mamba2, ShortConv)
"""program.h has the same order."""
VECTORS = ("conv_bias", "decay", "step_bias", "skip", "gated_norm")
"""After the taps of the convolution, in the order that they have in Mixer of program.h."""


class MixerFields(ctypes.Structure):
    """A Mixer of program.h."""

    _fields_ = [
        *fields(c_int32, "kind key_heads heads keys values is_tiled kernel channels"),
        *fields(c_float, "eps least_step most_step"),
        *fields(c_void_p, "conv"),
        *fields(c_void_p, " ".join(VECTORS)),
        *fields(c_void_p, "state history pending"),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeMixer:
    """A mixer with a state, as an operation of a decoder's program; see `recurrent`."""

    spec: StateMixer
    vectors: StateVectors

    @property
    def row_width(self) -> int:
        """The numbers of a row that it reads, but for gates from a map of their own."""
        return self._outputs("into")

    @property
    def gates_width(self) -> int:
        """The numbers of a row of gates; 0 where they have no map of their own."""
        return self._outputs("gates") if "gates" in self.spec.maps() else 0

    @property
    def width(self) -> int:
        """The numbers that it makes of a row."""
        return self.spec.maps()["out"].in_features

    def _outputs(self, name: str) -> int:
        return sum(rows.count for rows in self.spec.maps()[name].rows)

    def made(self, eps: float, states: StateCache | None, layer: int, kept: list[object]) -> MixerFields:
        """Returns the fields that the kernels read; objects that they point to join `kept`.

        Args:
            eps: of its norm.
            layer: the layer whose part of the slots it has.

        Raises:
            ValueError: a vector has another shape than the description says.
        """
        spec = self.spec
        heads, keys, values = spec.state_shape
        made = MixerFields(
            kind=KINDS.index(type(spec)),
            heads=heads,
            keys=keys,
            values=values,
            kernel=spec.kernel,
            channels=spec.history_channels,
            eps=eps,
        )
        if isinstance(spec, GatedDelta):
            made.key_heads, made.is_tiled = spec.num_key_heads, spec.is_tiled
        elif isinstance(spec, Mamba2):
            made.key_heads = spec.num_groups
            made.least_step, made.most_step = spec.step_limits
        shapes = {field: vector.shape for field, vector in spec.vectors().items()}
        shapes |= {field: (norm.size,) for field, norm in spec.norms().items()}
        for field, shape in shapes.items():
            vector = getattr(self.vectors, field)
            expect_shape(field, vector, shape)
            setattr(made, field, _address(vector.T if field == "conv" else vector, kept))
        if states is not None:
            place, start = states.layout.places[layer], states.data.data_ptr()
            for part in ("state", "history", "pending"):
                setattr(made, part, start + states.data.itemsize * getattr(place, part))
        return made


def _address(vector: Tensor, kept: list[object]) -> int:
    vector = float32(vector)
    kept.append(vector)
    return vector.data_ptr()
