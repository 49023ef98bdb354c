"""The slots of states that a step reads and writes: tensors on its device, made from its plan."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, repeat

import torch

from penstock.engine.execution.seats import StepShape
from penstock.engine.execution.uploads import send_apart
from penstock.engine.kernels.batch import Batch
from penstock.engine.planning.state_records import ChunkState
from penstock.engine.planning.step import Chunk

MOST_SAVES = 32
"""The snapshots that a captured step has room for."""
_NO_STATE = ChunkState(0, 0, 0)
_NO_SAVE = (-1, 0, 0, 0)


def tell_slots(batch: Batch, chunks: Iterable[Chunk]) -> None:
    """Sets `state_slots` and `state_saves` of a batch of these chunks."""
    device = batch.token_ids.device
    batch.state_slots, batch.state_saves = (
        sent.view(-1, 4) for sent in send_apart(state_words(chunks), device)
    )


class StateBuffers:
    """The slots and saves that captured steps read; they stay where they are.

    A decode has room for no save, so that its kernels look for none.
    """

    def __init__(self, num_sequences: int, device: torch.device) -> None:
        self._slots = torch.zeros(num_sequences, 4, dtype=torch.int32, device=device)
        self._saves = torch.tensor([_NO_SAVE] * MOST_SAVES, dtype=torch.int32, device=device)
        self._shown: list[list[int]] = [[], []]
        """The words on the device, padding aside."""

    def hold(self, shape: StepShape, chunks: Iterable[Chunk]) -> bool:
        """Returns whether there is room for the snapshots that a step of that shape saves."""
        num_saves = sum(len(chunk.state.saves) for chunk in chunks if chunk.state is not None)
        return num_saves <= (0 if shape.is_decode else MOST_SAVES)

    def give(self, batch: Batch, shape: StepShape) -> None:
        """Lets the batch of a captured step read them."""
        batch.state_slots = self._slots[: shape.num_sequences]
        batch.state_saves = None if shape.is_decode else self._saves

    def show(self, chunks: Iterable[Chunk]) -> None:
        """Copies a step's slots and saves to where graphs read them; a decode like the last finds them there."""
        words = state_words(chunks)
        if words == self._shown:
            return
        slots, saves = words
        padding = [0] * (self._slots.numel() - len(slots))
        no_saves = chain.from_iterable(repeat(_NO_SAVE, MOST_SAVES - len(saves) // 4))
        sent = send_apart([slots + padding, [*saves, *no_saves]], self._slots.device)
        for own, new in zip((self._slots, self._saves), sent, strict=True):
            own.copy_(new.view(-1, 4))
        self._shown = words


def state_words(chunks: Iterable[Chunk]) -> list[list[int]]:
    """The rows of `Batch.state_slots` and of `Batch.state_saves`. Drafts are the rows that are not certain; a chunk
    without a state begins at its first token."""
    slots, saves = list[int](), list[int]()
    for number, chunk in enumerate(chunks):
        state = chunk.state or _NO_STATE
        slots += (state.source, state.target, state.replayed, chunk.num_tokens - len(chunk.drafts))
        for save in state.saves:
            saves += (number, *save)
    return [slots, saves]
