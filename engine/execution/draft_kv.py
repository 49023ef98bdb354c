"""The part of each sequence that a draft model has read, so that its KV is there.

The KV cache of a draft model has blocks of the same numbers as the cache of the model that it drafts for: a sequence's
tokens lie in the same blocks of both, so that blocks are allocated, shared and freed once. A draft model may lag behind
by any number of tokens; it reads them when it is asked to draft, and never before. So where no sequence drafts, it
costs nothing but its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from penstock.engine.planning.request import Sequence
from penstock.engine.planning.step import OPEN, Chunk


@dataclass(slots=True)
class DraftChunk(Chunk):
    """Tokens of a sequence that a draft model reads; nothing is wanted of them but the token that follows."""

    @property
    def scored(self) -> range:
        return range(0)

    @property
    def pooled(self) -> range:
        return range(0)

    @property
    def num_logprobs(self) -> None:
        return None


@dataclass(slots=True)
class _Progress:
    """The part of a sequence that the draft model has read."""

    num_read: int = 0
    """The first tokens of the sequence whose KV is in `blocks`."""
    blocks: list[int] = field(default_factory=list)
    """The first blocks of the sequence, as they were."""
    num_marked: int = 0
    """The first of the blocks that others may find."""
    drafts: list[int] = field(default_factory=list)
    """The tokens after those read whose KV is there, too, if they turn out right."""


class DraftKV:
    """Plans the tokens of sequences that a draft model reads before it drafts for them.

    A block that was read to its end is remembered by the hash of its tokens, so that a sequence that shares it, or
    finds it again, need not read it again. If a block that is shared is missing, it is read for each sequence that
    shares it: equal tokens have equal KV.

    Args:
        max_tokens: tokens of the largest pass.
        keeps_drafts: whether the KV of drafts that turned out right is as good as the KV of tokens that were read.
    """

    def __init__(self, block_size: int, max_tokens: int, *, keeps_drafts: bool, num_tables: int = 1) -> None:
        """The draft model has its KV in the blocks of the first of a sequence's `num_tables` block tables."""
        self._block_size, self._max_tokens, self._keeps_drafts = block_size, max_tokens, keeps_drafts
        self._num_tables = num_tables
        self._progress: dict[Sequence, _Progress] = {}
        self._contents: dict[int, bytes] = {}
        """By block: the hash of the tokens whose KV the draft model has in it."""

    def begin(
        self,
        lengths: Mapping[Sequence, int],
        coming: Mapping[Sequence, int] = MappingProxyType({}),
        is_read: Callable[[Sequence], bool] = lambda _: False,
    ) -> list[DraftChunk]:
        """The chunks of a pass after which so many tokens are drafted for each sequence.

        A chunk that reaches the last token of its sequence samples; after the others there are no drafts. Chunks that
        sample come first, the one with the most drafts foremost.

        Args:
            coming: the tokens that a step in flight may bring, by sequence.
            is_read: says of such a sequence whether all that is known of it was read for that step.
        """
        chunks, room = list[DraftChunk](), self._max_tokens
        for sequence, length in lengths.items():
            if room <= 0:
                break
            num_coming, num_known = coming.get(sequence, 0), len(sequence.token_ids)
            progress = self._progress_of(sequence)
            start = num_known if num_coming and is_read(sequence) else progress.num_read
            end = min(num_known + num_coming, start + room)
            samples = end == num_known + num_coming
            if not samples:
                end = min(num_known, end)
            if end == start:
                continue
            room -= end - start
            self._write(progress, sequence, end + length - 1 if samples else end)
            drafts = [OPEN] * (num_coming - 1) if samples else []
            chunks.append(DraftChunk(sequence, start, end - start, samples=samples, drafts=drafts))
        return sorted(chunks, key=lambda chunk: -lengths[chunk.sequence] if chunk.samples else 1)

    def end(self, chunk: DraftChunk, drafts: list[int], num_coming: int = 0) -> None:
        """Notes that a chunk was read, and that these drafts, the last of which was not read, followed it.

        Args:
            num_coming: so many of its tokens may come, if it samples.
        """
        progress = self._progress[chunk.sequence]
        progress.num_read = chunk.start + chunk.num_tokens - (num_coming if chunk.samples else 0)
        if self._keeps_drafts:
            progress.drafts = drafts[:-1]

    def keep(self, sequence: Sequence, drafts: list[int]) -> None:
        """Notes the drafts of a sequence that were not known yet at the `end` of its chunk, which has read it all."""
        progress = self._progress.get(sequence)
        if progress is not None:
            progress.num_read = len(sequence.token_ids)
            progress.drafts = drafts[:-1] if self._keeps_drafts else []

    def forget(self, sequence: Sequence) -> None:
        """Forgets a sequence that ended or gave its blocks back."""
        self._progress.pop(sequence, None)

    def _progress_of(self, sequence: Sequence) -> _Progress:
        """The progress in a sequence, whose last known token is always still to be read: its logits are needed."""
        progress = self._progress.get(sequence)
        if progress is None:
            progress = self._progress[sequence] = self._found(sequence)
        self._keep_right(progress, sequence)
        self._keep_unchanged(progress, sequence)
        self._mark(progress, sequence)
        progress.num_read = min(progress.num_read, len(sequence.token_ids) - 1)
        return progress

    def _found(self, sequence: Sequence) -> _Progress:
        """Returns the progress in a sequence that starts, or starts again: the blocks that were read for others."""
        table, num = self._blocks(sequence), 0
        for block, block_hash in zip(table, sequence.block_hashes, strict=False):
            if self._contents.get(block) != block_hash:
                break
            num += 1
        return _Progress(num * self._block_size, table[:num], num)

    def _keep_right(self, progress: _Progress, sequence: Sequence) -> None:
        """Counts drafts that turned out right as read."""
        known = sequence.token_ids
        for draft in progress.drafts:
            if progress.num_read >= len(known) or known[progress.num_read] != draft:
                break
            progress.num_read += 1
        progress.drafts = []

    def _keep_unchanged(self, progress: _Progress, sequence: Sequence) -> None:
        """Gives up tokens read into a block that was replaced by a copy, which has no KV of the draft model."""
        table, blocks = self._blocks(sequence), progress.blocks
        if table[: len(blocks)] != blocks:
            pairs = enumerate(zip(table, blocks, strict=False))
            num_same = next((i for i, (a, b) in pairs if a != b), min(len(table), len(blocks)))
            progress.num_read = min(progress.num_read, num_same * self._block_size)

    def _mark(self, progress: _Progress, sequence: Sequence) -> None:
        """Lets others find the blocks that were read to their end."""
        hashes, table = sequence.block_hashes, self._blocks(sequence)
        num_full = min(progress.num_read // self._block_size, len(hashes))
        for i in range(progress.num_marked, num_full):
            self._contents[table[i]] = hashes[i]
        progress.num_marked = num_full

    def _write(self, progress: _Progress, sequence: Sequence, end: int) -> None:
        """Notes that tokens up to `end` are about to be read: the former content of their blocks is gone."""
        progress.blocks = self._blocks(sequence)[: -(-end // self._block_size)]
        for block in progress.blocks[progress.num_read // self._block_size :]:
            self._contents.pop(block, None)

    def _blocks(self, sequence: Sequence) -> list[int]:
        return sequence.block_table[:: self._num_tables]
