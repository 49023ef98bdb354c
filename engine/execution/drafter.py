"""Drafter: a draft model's passes, in the blocks and with the sampling parameters of the model that it drafts for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListLike
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

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
        passes = _Passes(chunks, length, self.block_size)
        hidden = self._draft.decoder(passes.first)
        found: list[list[int]] = [[] for _ in chunks]
        if not passes.places:
            return found
        sequences = [chunks[i].sequence for i in passes.places]
        slots = [slot for sequence in sequences if (slot := self._slot_of(sequence)) is not None]
        with self._counts_kept(sequences, slots):
            drafts = self._write_on(passes, hidden, slots)
        for place, tokens in zip(passes.places, torch.stack(drafts, 1).tolist(), strict=True):
            found[place] = tokens
        return found

    def _write_on(self, passes: _Passes, hidden: Tensor, slots: list[int]) -> list[Tensor]:
        """Token ids [P] int32 of each pass, the first of which has brought these hidden states."""
        (chosen_slots,), filters = _tensors(slots), self._filters(slots)
        if len(passes.places) < hidden.shape[0]:
            hidden = hidden[passes.places]
        drafts: list[Tensor] = []
        for number, numbers in enumerate(passes.numbers):
            if number:
                hidden = self._draft.decoder(passes.after(number, drafts[-1]))
            drafts.append(self._choose(hidden, chosen_slots, numbers, filters))
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


class _Passes:
    """The inputs of a pass over chunks, and of those after it, one for each draft but the last.

    Attributes:
        first: the tokens of all chunks, each of which samples.
        places: the P chunks that end at the last token of their sequence: the others are not drafted for.
        numbers: by pass, [P] int32: the output tokens that there are before the one that it brings.
    """

    def __init__(self, chunks: list[DraftChunk], length: int, block_size: int) -> None:
        token_ids: list[int] = []
        positions: list[int] = []
        starts = [0]
        for chunk in chunks:
            token_ids += chunk.sequence.token_ids[chunk.start : chunk.end]
            positions += range(chunk.start, chunk.end)
            starts.append(len(token_ids))
        ends = [chunk.end for chunk in chunks]
        num_blocks = -(-(max(ends) + length) // block_size)
        tables = [block for chunk in chunks for block in _padded(chunk.sequence.block_table, num_blocks)]
        self.places = [i for i, chunk in enumerate(chunks) if chunk.end == len(chunk.sequence.token_ids)]
        num = len(self.places)
        lengths = [[ends[i] + number for i in self.places] for number in range(length)]
        numbers = [
            [chunks[i].sequence.num_output_tokens + number for i in self.places] for number in range(length)
        ]
        tensors = _tensors(
            token_ids,
            positions,
            starts,
            ends,
            [start - 1 for start in starts[1:]],
            tables,
            range(num + 1),
            *lengths,
            *numbers,
        )
        token_tensor, position_tensor, start_tensor, end_tensor, rows, table, self._rows = tensors[:7]
        self._lengths, self.numbers = tensors[7 : 7 + length], tensors[7 + length :]
        self._tables = table = table.view(len(chunks), num_blocks)
        if num < len(chunks):
            self._tables = table[self.places]
        self.first = Batch(token_tensor, position_tensor, start_tensor, end_tensor, table, rows)

    def after(self, number: int, token_ids: Tensor) -> Batch:
        """The pass after the first `number`, over the tokens [P] that the one before it brought."""
        positions, contexts = self._lengths[number - 1 : number + 1]
        return Batch(token_ids, positions, self._rows, contexts, self._tables, self._rows[:-1])


def _padded(blocks: list[int], num: int) -> list[int]:
    return blocks[:num] + [0] * (num - len(blocks))


def _tensors(*parts: ListLike[int]) -> list[Tensor]:
    """The parts as int32 tensors, which are made at once: that is quicker."""
    words = torch.tensor(list(chain.from_iterable(parts)), dtype=torch.int32)
    return list(words.split_with_sizes([len(part) for part in parts]))
