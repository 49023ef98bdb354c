"""The memory of layers with a state: slots, each of which has the states of all these layers for one sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.config import ModelConfig
from penstock.engine.kernels.kv_cache import zeros
from penstock.engine.spec import StateMixer, state_floats

_ALIGNMENT = 16
"""Each part of a slot starts at a multiple of so many numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePlace:
    """Where in a slot the state of a layer is, counted in numbers: three parts, one after another."""

    mixer: StateMixer
    state: int
    """[heads, keys, values]"""
    history: int
    """[kernel - 1, channels]"""
    pending: int
    """[pending rows, row]"""
    end: int

    @classmethod
    def at(cls, start: int, mixer: StateMixer, num_pending: int) -> StatePlace:
        history = _aligned(start + state_floats(mixer))
        pending = _aligned(history + (mixer.kernel - 1) * mixer.history_channels)
        end = _aligned(pending + num_pending * mixer.row_floats)
        return cls(mixer=mixer, state=start, history=history, pending=pending, end=end)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayout:
    """The layout of a slot."""

    places: Mapping[int, StatePlace]
    """By layer, of the layers that have a state."""
    num_pending: int
    """The rows that a slot keeps of each layer besides its state, see `LayerStates`."""
    slot_floats: int

    @classmethod
    def of(cls, model: ModelConfig, num_pending: int = 0) -> StateLayout:
        places, end = dict[int, StatePlace](), 0
        for number, mixer in model.spec.states.items():
            place = places[number] = StatePlace.at(end, mixer, num_pending)
            end = place.end
        return cls(places=places, num_pending=num_pending, slot_floats=end)

    @property
    def slot_bytes(self) -> int:
        return self.slot_floats * torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class LayerStates:
    """One layer's part of all slots: views, with a stride from slot to slot."""

    state: Tensor
    """[slots, heads, keys, values]; the layout inside is left to the kernels that write and read it."""
    history: Tensor
    """[slots, kernel - 1, channels]: the earlier rows that the convolution reads, the latest row last."""
    pending: Tensor
    """[slots, pending rows, row]: the inputs of the rows after the state's, in their order. A step may apply the first
    of them to the state: drafts that turned out right, or the tokens between a snapshot and the end of the match."""


class StateCache:
    """The states of `num_slots` sequences and snapshots, all layers: `data` is float32 [num_slots, slot_floats].

    A slot with zeros is the state before the first token. No sequence owns slot 0, which always has zeros: it is read
    as such a state, and never written.
    """

    def __init__(self, layout: StateLayout, num_slots: int, device: torch.device) -> None:
        self.layout = layout
        self.num_slots = num_slots
        self.data = zeros((num_slots, layout.slot_floats), torch.float32, device)

    def layer(self, index: int) -> LayerStates:
        place, num_pending = self.layout.places[index], self.layout.num_pending
        mixer = place.mixer
        return LayerStates(
            self._part(place.state, *mixer.state_shape),
            self._part(place.history, mixer.kernel - 1, mixer.history_channels),
            self._part(place.pending, num_pending, mixer.row_floats),
        )

    def _part(self, start: int, *shape: int) -> Tensor:
        count = torch.Size(shape).numel()
        return self.data[:, start : start + count].view(self.num_slots, *shape)


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT
