"""The memory of layers with a state: slots, each of which has what all of them know of one sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.kernels.kv_cache import zeros
from engine.spec import StateMixer, state_floats

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
    """[drafts, row]"""
    end: int

    @classmethod
    def at(cls, start: int, mixer: StateMixer, max_drafts: int) -> StatePlace:
        history = _aligned(start + state_floats(mixer))
        pending = _aligned(history + (mixer.kernel - 1) * mixer.history_channels)
        end = _aligned(pending + max_drafts * mixer.row_floats)
        return cls(mixer=mixer, state=start, history=history, pending=pending, end=end)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayout:
    """How a slot is cut."""

    places: Mapping[int, StatePlace]
    """By layer, of those that have a state."""
    max_drafts: int
    """The rows that a slot keeps of each layer which may still turn out wrong."""
    slot_floats: int

    @classmethod
    def of(cls, model: ModelConfig, max_drafts: int = 0) -> StateLayout:
        places, end = dict[int, StatePlace](), 0
        for number, mixer in model.spec.states.items():
            place = places[number] = StatePlace.at(end, mixer, max_drafts)
            end = place.end
        return cls(places=places, max_drafts=max_drafts, slot_floats=end)

    @property
    def slot_bytes(self) -> int:
        return self.slot_floats * torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class LayerStates:
    """One layer's part of all slots: views, with a stride from slot to slot."""

    state: Tensor
    """[slots, heads, keys, values]; what lies where inside is the business of the kernels that write and read it."""
    history: Tensor
    """[slots, kernel - 1, channels]: what the convolution reads of the rows before, the latest row last."""
    pending: Tensor
    """[slots, drafts, row]: rows that follow those of the state and may still turn out wrong, the first of them
    first."""


class StateCache:
    """The states of `num_slots` sequences and snapshots, all layers: `data` is float32 [num_slots, slot_floats].

    A slot with zeros is the state before the first token. Slot 0 belongs to nobody, and always has zeros: it is read as
    such a state, and never written.
    """

    def __init__(self, layout: StateLayout, num_slots: int, device: torch.device) -> None:
        self.layout = layout
        self.num_slots = num_slots
        self.data = zeros((num_slots, layout.slot_floats), torch.float32, device)

    def layer(self, index: int) -> LayerStates:
        place, max_drafts = self.layout.places[index], self.layout.max_drafts
        mixer = place.mixer
        return LayerStates(
            self._part(place.state, *mixer.state_shape),
            self._part(place.history, mixer.kernel - 1, mixer.history_channels),
            self._part(place.pending, max_drafts, mixer.row_floats),
        )

    def _part(self, start: int, *shape: int) -> Tensor:
        count = torch.Size(shape).numel()
        return self.data[:, start : start + count].view(self.num_slots, *shape)


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT
