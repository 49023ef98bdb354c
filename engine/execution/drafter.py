"""Drafter: a draft model's passes, in the blocks and with the sampling parameters of the model that it drafts for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListLike
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.batch import Batch
from engine.kernels.cpu.native import VERY_UNLIKELY, NativeDraft
from engine.kernels.kv_cache import KVCache
from engine.kernels.linear import Linear
from engine.model.drafts import SharedTokens
from engine.model.transformer import ForwardPass
from engine.planning.request import Sequence
from engine.planning.step import DraftChunk
from engine.sampling.sampler import Sampler, has_penalties
from engine.sampling.tables import Filters


@dataclass(frozen=True, slots=True)
class Translation:
    """Between the tokens of a target and those of a draft whose logits are others, or of another number."""

    context: Tensor
    """[vocab] int32: by token of the target, what the draft reads."""
    columns: Tensor
    """[vocab] int64: by token of the target, its logit among the draft's; one past the last if there is none."""

    @classmethod
    def of(cls, tokens: SharedTokens | None, vocab: int, num_logits: int) -> Translation:
        """Without shared tokens, all are the same; what one of the two has more are rows of padding."""
        same = torch.arange(vocab)
        context = same
        if tokens is not None:
            num = min(vocab, len(tokens.same))
            same, context = torch.full((vocab,), num_logits), torch.zeros(vocab, dtype=torch.int64)
            same[:num] = torch.tensor(tokens.same)[:num]
            context[:num] = torch.tensor(tokens.context)[:num]
        is_there = (same >= 0) & (same < num_logits)
        is_known = context < num_logits  # a row of padding is never read
        return cls(torch.where(is_known, context, 0).int(), torch.where(is_there, same, num_logits))

    def logits(self, logits: Tensor) -> Tensor:
        """[R, vocab] of the target's tokens, from the draft's logits."""
        return F.pad(logits, (0, 1), value=VERY_UNLIKELY).index_select(1, self.columns)

    def read(self, batch: Batch) -> Batch:
        """The batch in the draft's tokens."""
        return replace(batch, token_ids=self.context[batch.token_ids.long()])


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedDraft:
    """A draft model on its device."""

    decoder: ForwardPass
    lm_head: Linear
    kv: KVCache
    """It has as many blocks, of as many tokens, as the target's."""
    native: NativeDraft | None = None
    """All passes in one call; it needs the target's numbers of tokens."""
    translation: Translation | None = None
    """None if its tokens and their number are the target's."""
    features: Tensor | None = None
    """[blocks, block size, width], what a head reads of its target: see `NativeTaps`."""

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copies what belongs to the target's tokens; what the draft computed of a copied block counts as lost."""
        if self.features is not None:
            self.features[targets.long()] = self.features[sources.long()]

    def forward(self, batch: Batch) -> Tensor:
        """Hidden states [R, hidden] after a batch of the target's tokens."""
        return self.decoder(batch if self.translation is None else self.translation.read(batch))

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, vocab] of the target's tokens."""
        logits = self.lm_head(hidden)
        return logits if self.translation is None else self.translation.logits(logits)


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
        self.reads_target = draft.features is not None
        self._draft = draft
        self._sampler = sampler
        self._slot_of = slot_of

    def knows(self, sequence: Sequence) -> bool:
        return self._slot_of(sequence) is not None

    @torch.inference_mode()
    def draft(self, chunks: list[DraftChunk], length: int) -> list[list[int]]:
        """See `planning.step.DraftRunner`."""
        passes = _Passes(chunks, length, self.block_size)
        found: list[list[int]] = [[] for _ in chunks]
        if not passes.places:
            self._draft.forward(passes.first)
            return found
        sequences = [chunks[i].sequence for i in passes.places]
        slots = [slot for sequence in sequences if (slot := self._slot_of(sequence)) is not None]
        with self._counts_kept(sequences, slots):
            drafts = self._write_on(passes, slots)
        for place, tokens in zip(passes.places, drafts.T.tolist(), strict=True):
            found[place] = tokens
        return found

    def _write_on(self, passes: _Passes, slots: list[int]) -> Tensor:
        """Token ids [length, P] int32 that the passes bring."""
        (chosen_slots,), filters = _tensors(slots), self._filters(slots)
        if self._draft.native is not None:
            tables = self._sampler.tables
            return self._draft.native(
                passes.first, passes.tables, passes.ends, tables, chosen_slots, passes.numbers, filters
            )
        drafts: list[Tensor] = []
        for number, numbers in enumerate(passes.numbers):
            batch = passes.after(number, drafts[-1]) if number else passes.first
            drafts.append(self._choose(self._draft.forward(batch), chosen_slots, numbers, filters))
        return torch.stack(drafts)

    def _choose(self, hidden: Tensor, slots: Tensor, numbers: Tensor, filters: Filters) -> Tensor:
        """Token ids [R] int32, by the target's rule."""
        return self._sampler.sample(self._draft.logits(hidden), slots, numbers, filters)[0]

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
        places: the P chunks that end at the last token of their sequence: the others are not drafted for.
        first: the tokens of all chunks; P of them sample.
        tables: [P, max blocks] int32, their blocks.
        ends: [length, P] int32: the tokens that there are before each draft.
        numbers: [length, P] int32: the output tokens among them.
    """

    def __init__(self, chunks: list[DraftChunk], length: int, block_size: int) -> None:
        token_ids: list[int] = []
        positions: list[int] = []
        starts = [0]
        for chunk in chunks:
            token_ids += chunk.sequence.token_ids[chunk.start : chunk.end]
            positions += range(chunk.start, chunk.end)
            starts.append(len(token_ids))
        contexts = [chunk.end for chunk in chunks]
        num_blocks = -(-(max(contexts) + length) // block_size)
        blocks = [block for chunk in chunks for block in _padded(chunk.sequence.block_table, num_blocks)]
        places = [i for i, chunk in enumerate(chunks) if chunk.end == len(chunk.sequence.token_ids)]
        num_outputs = [chunks[i].sequence.num_output_tokens for i in places]
        ends = [contexts[i] + number for number in range(length) for i in places]
        numbers = [num + number for number in range(length) for num in num_outputs]
        rows = [starts[i + 1] - 1 for i in places]
        tensors = _tensors(blocks, ends, numbers, token_ids, positions, starts, contexts, rows)
        tables = tensors[0].view(len(chunks), num_blocks)
        self.places = places
        token_tensor, position_tensor, start_tensor, context_tensor, row_tensor = tensors[3:]
        self.first = Batch(token_tensor, position_tensor, start_tensor, context_tensor, tables, row_tensor)
        self.tables = tables if len(places) == len(chunks) else tables[places]
        self.ends, self.numbers = (tensor.view(length, len(places)) for tensor in tensors[1:3])

    def after(self, number: int, token_ids: Tensor) -> Batch:
        """The pass after the first `number`, over the tokens [P] that the one before it brought."""
        rows = torch.arange(len(self.places) + 1, dtype=torch.int32)
        positions, contexts = self.ends[number - 1], self.ends[number]
        return Batch(token_ids, positions, rows, contexts, self.tables, rows[:-1])


def _padded(blocks: list[int], num: int) -> list[int]:
    return blocks[:num] + [0] * (num - len(blocks))


def _tensors(*parts: ListLike[int]) -> list[Tensor]:
    """The parts as int32 tensors, which are made at once: that is quicker."""
    words = torch.tensor(list(chain.from_iterable(parts)), dtype=torch.int32)
    return list(words.split_with_sizes([len(part) for part in parts]))
