"""What a step is told of the slots of states: tensors on its device, made of what its plan says."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from engine.execution.uploads import send_apart
from engine.kernels.batch import Batch
from engine.planning.states import ChunkState
from engine.planning.step import Chunk

_NO_STATE = ChunkState(0, 0, 0)


def tell_slots(batch: Batch, chunks: Iterable[Chunk]) -> None:
    """Sets `state_slots` and `state_saves` of a batch of these chunks; one without a state begins at its first token.

    Drafts are the rows that are not certain.
    """
    slots, saves = list[tuple[int, ...]](), list[tuple[int, ...]]()
    for number, chunk in enumerate(chunks):
        state = chunk.state or _NO_STATE
        slots.append((state.source, state.target, state.replayed, chunk.num_tokens - len(chunk.drafts)))
        saves += [(number, *save) for save in state.saves]
    words = [list(chain.from_iterable(rows)) for rows in (slots, saves)]
    batch.state_slots, batch.state_saves = (
        sent.view(-1, 4) for sent in send_apart(words, batch.token_ids.device)
    )
