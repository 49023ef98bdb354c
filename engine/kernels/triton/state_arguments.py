"""The arguments of the kernels of layers with a state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.engine.kernels.batch import Batch
from penstock.engine.kernels.recurrent import UNIT_EPS
from penstock.engine.kernels.state_cache import LayerStates
from penstock.engine.spec import GatedDelta, Mamba2


def constants(spec: GatedDelta | Mamba2) -> tuple[dict[str, float], dict[str, Any]]:
    """Returns the numbers of a layer that the kernel takes as arguments, and the constants that it is compiled for."""
    if isinstance(spec, GatedDelta):
        return {
            "least_step": 0.0,
            "most_step": 0.0,
            "query_scale": spec.key_dim**-0.5,
            "unit_eps": UNIT_EPS,
        }, {
            "IS_DELTA": True,
            "NUM_HEADS": spec.num_value_heads,
            "NUM_KEY_HEADS": spec.num_key_heads,
            "IS_TILED": spec.is_tiled,
            "KEY_DIM": spec.key_dim,
            "VALUE_DIM": spec.value_dim,
            "QUERIES": 0,
            "KEYS": spec.key_size,
            "VALUES": 2 * spec.key_size,
        }
    least_step, most_step = spec.step_limits
    return {
        "least_step": least_step,
        "most_step": most_step,
        "query_scale": 1.0,
        "unit_eps": 0.0,
    }, {
        "IS_DELTA": False,
        "NUM_HEADS": spec.num_heads,
        "NUM_KEY_HEADS": spec.num_groups,
        "IS_TILED": False,
        "KEY_DIM": spec.state_size,
        "VALUE_DIM": spec.head_dim,
        "QUERIES": spec.history_channels - spec.conv_sizes[2],
        "KEYS": spec.inner_size,
        "VALUES": 0,
    }


@dataclass(frozen=True, slots=True)
class KeptStates:
    """The tensors of a layer's slots that a step reads and writes; without slots, none."""

    state: Tensor | None
    history: Tensor | None
    pending: Tensor | None
    slot_stride: int
    slots: Tensor | None
    saves: Tensor
    num_saves: int

    @classmethod
    def of(cls, states: LayerStates | None, batch: Batch) -> KeptStates:
        slots, saves = batch.state_slots, batch.state_saves
        if states is None or slots is None:
            return cls(None, None, None, 0, None, batch.query_starts, 0)
        stride = states.history.stride(0)
        if saves is None:
            return cls(states.state, states.history, states.pending, stride, slots, slots, 0)
        return cls(states.state, states.history, states.pending, stride, slots, saves, len(saves))
