"""Drafter: a draft model's passes, in the blocks and with the sampling parameters of the model that it drafts for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListLike
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.batch import Batch
from engine.kernels.kv_cache import KVCache
from engine.kernels.linear import Linear
from engine.model.transformer import ForwardPass
from engine.planning.request import Sequence
from engine.planning.step import DraftChunk
from engine.sampling.sampler import Sampler, has_penalties
from engine.sampling.tables import Filters

_VERY_UNLIKELY = -1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedDraft:
    """A draft model on its device."""

    decoder: ForwardPass
    lm_head: Linear
    kv: KVCache
    """It has as many blocks, of as many tokens, as the target's."""


class Drafter:
    """Drafts for sequences that have a slot; see `planning.step.DraftRunner`.

    Args:
        sampler: the target's; the draft chooses tokens by the parameters in its tables, as the target would.
        slot_of: the slot of a sequence; None if it has none.
    """

    def __init__(
        self, draft: LoadedDraft, sampler: Sampler, slot_of: Callable[[Sequence], int | None], max_tokens: int
    ) -> None:
        self.block_size = draft.kv.block_size
        self.max_tokens = max_tokens
        self._draft = draft
        self._sampler = sampler
        self._slot_of = slot_of

    def knows(self, sequence: Sequence) -> bool:
        return self._slot_of(sequence) is not None

    @torch.inference_mode()
    def draft(self, chunks: list[DraftChunk], length: int) -> list[list[int]]:
        """See `planning.step.DraftRunner`."""
        batch = _first_batch(chunks, length, self.block_size)
        hidden = self._draft.decoder(batch)
        places = [i for i, chunk in enumerate(chunks) if chunk.end == len(chunk.sequence.token_ids)]
        found: list[list[int]] = [[] for _ in chunks]
        if not places:
            return found
        sequences = [chunks[i].sequence for i in places]
        slots = [slot for sequence in sequences if (slot := self._slot_of(sequence)) is not None]
        with self._counts_kept(sequences, slots):
            drafts = self._write_on(batch, hidden, places, sequences, slots, length)
        for place, tokens in zip(places, torch.stack(drafts, 1).tolist(), strict=True):
            found[place] = tokens
        return found

    def _write_on(
        self,
        batch: Batch,
        hidden: Tensor,
        places: list[int],
        sequences: list[Sequence],
        slots: list[int],
        length: int,
    ) -> list[Tensor]:
        """The drafts after the last tokens at these places of a batch: `length` times token ids [P] int32."""
        chosen_slots, filters = _ints(slots), self._filters(slots)
        numbers = _ints([sequence.num_output_tokens for sequence in sequences])
        positions, tables = batch.context_lens, batch.block_tables
        if len(places) < hidden.shape[0]:
            hidden, positions, tables = hidden[places], positions[places], tables[places]
        drafts = [self._choose(hidden, chosen_slots, numbers, filters)]
        rows = torch.arange(len(places) + 1, dtype=torch.int32)
        for _ in range(length - 1):
            context_lens = positions + 1
            step = Batch(drafts[-1], positions, rows, context_lens, tables, rows[:-1], max_query_len=1)
            numbers = numbers + 1
            drafts.append(self._choose(self._draft.decoder(step), chosen_slots, numbers, filters))
            positions = context_lens
        return drafts

    def _choose(self, hidden: Tensor, slots: Tensor, numbers: Tensor, filters: Filters) -> Tensor:
        """Token ids [R] int32, by the target's rule."""
        logits = self._draft.lm_head(hidden)
        vocab = self._sampler.vocab_size
        if logits.shape[1] != vocab:  # what one of the two has more are rows of padding
            logits = F.pad(logits, (0, vocab - logits.shape[1]), value=_VERY_UNLIKELY).contiguous()
        return self._sampler.sample(logits, slots, numbers, filters)[0]

    def _filters(self, slots: list[int]) -> Filters:
        filters = self._sampler.filters(slots)
        return Filters(top_k=filters.top_k, top_p=filters.top_p, logprobs=False)

    @contextmanager
    def _counts_kept(self, sequences: list[Sequence], slots: list[int]) -> Iterator[None]:
        """Choosing counts tokens for the penalties of the next; drafts are not to be counted when they are over."""
        pairs = zip(sequences, slots, strict=True)
        penalised = [slot for sequence, slot in pairs if has_penalties(sequence.request.sampling)]
        if not penalised:
            yield
            return
        counts = self._sampler.tables.counts
        before = counts[penalised]
        try:
            yield
        finally:
            counts[penalised] = before


def _first_batch(chunks: list[DraftChunk], length: int, block_size: int) -> Batch:
    """The tokens of all chunks, with block tables for as many more as are drafted; every chunk samples."""
    token_ids: list[int] = []
    positions: list[int] = []
    starts = [0]
    for chunk in chunks:
        token_ids += chunk.sequence.token_ids[chunk.start : chunk.end]
        positions += range(chunk.start, chunk.end)
        starts.append(len(token_ids))
    query_starts = _ints(starts)
    num_blocks = -(-(max([chunk.end for chunk in chunks]) + length) // block_size)
    return Batch(
        token_ids=_ints(token_ids),
        positions=_ints(positions),
        query_starts=query_starts,
        context_lens=_ints([chunk.end for chunk in chunks]),
        block_tables=_ints([_padded(chunk.sequence.block_table, num_blocks) for chunk in chunks]),
        sample_rows=query_starts[1:] - 1,
    )


def _padded(blocks: list[int], num: int) -> list[int]:
    return blocks[:num] + [0] * (num - len(blocks))


def _ints(values: ListLike[object]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
