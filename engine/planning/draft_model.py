"""A draft model: a small model of the same tokens, which writes on for a few tokens ahead of the model that is served.

Its KV cache has blocks of the same numbers as the target's: a sequence's tokens lie in the same blocks of both, so that
blocks are allocated, shared and freed once. What the draft has computed may lag behind by any number of tokens; it
computes them when it is asked to draft, and never before. So where nobody drafts it costs nothing but its memory.

The draft chooses its tokens as the target does, by the same parameters and the same noise: as Gumbel-max sampling
couples the two, they agree about as often as any two samplers of their distributions could (Leviathan, Kalman and
Matias, "Fast inference from transformers via speculative decoding", 2023, accept at the best rate there is; Daliri,
Musco and Suresh, "Coupling without communication and drafter-invariant speculative decoding", 2025).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.planning.request import Sequence
from engine.planning.step import DraftChunk, DraftRunner, StepSeconds

_SPREAD = 16
"""What a sequence has to catch up is taken to serve so many steps."""
_LEARNING = 0.1
"""The weight of the latest drafting in what drafts take."""


@dataclass(slots=True)
class _Progress:
    """What the draft has computed of a sequence."""

    incarnation: int
    """How often the sequence had been preempted by then."""
    num_computed: int = 0
    """The first tokens of the sequence whose KV is in `blocks`."""
    blocks: list[int] = field(default_factory=list)
    """The first blocks of the sequence, as they were."""
    num_marked: int = 0
    """The first of them that others may know."""
    drafts: list[int] = field(default_factory=list)
    """The tokens after the computed ones whose KV is there, too, if they turn out right."""


class DraftModel:
    """Proposes what a draft model says. It is a Proposer.

    A block that the draft has computed to its end is remembered by the hash of its tokens, so that whoever shares it,
    or finds it again, need not compute it again. If the draft lacks a block that is shared, it is computed again for
    each of those who share it: equal tokens have equal KV.
    """

    name = "draft"
    is_behind = False

    def __init__(
        self,
        runner: DraftRunner,
        clock: Callable[[], float] = lambda: 0.0,
        step_seconds: StepSeconds = lambda *_: 0.0,
    ) -> None:
        self._runner = runner
        self._clock = clock
        self._step_seconds = step_seconds
        self._share = 0.0
        """What a pass of the draft takes, in units of a step of the target with as many tokens."""
        self._progress: dict[Sequence, _Progress] = {}
        self._contents: dict[int, bytes] = {}
        """By block: the hash of the tokens whose KV the draft has in it."""

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> list[list[int]]:
        """What the draft says comes next; nothing for sequences with more to catch up than fits into a pass."""
        found: list[list[int]] = [[] for _ in sequences]
        chunks, places = [], []
        room, num_late, length = self._runner.max_tokens, 0, max(lengths)
        for place, sequence in enumerate(sequences):
            num_known = len(sequence.token_ids)
            if room <= 0 or not self._runner.knows(sequence):
                continue
            progress = self._progress_of(sequence)
            start = progress.num_computed
            end = min(num_known, start + room)
            room -= end - start
            num_late += max(0, end - start - 2)
            self._write(progress, sequence, end + length - 1 if end == num_known else end)
            chunks.append(DraftChunk(sequence, start, end))
            places.append(place)
        if not chunks:
            return found
        started = self._clock()
        drafted = self._runner.draft(chunks, length)
        if target_s := self._target_seconds(len(chunks), num_late, length):
            share = (self._clock() - started) / target_s
            self._share += (_LEARNING if self._share else 1.0) * (share - self._share)
        for place, chunk, drafts in zip(places, chunks, drafted, strict=True):
            progress = self._progress[chunk.sequence]
            progress.num_computed = chunk.end
            found[place] = drafts[: lengths[place]]
            if not self._runner.reads_target:  # a head computes them again, from what the target made of them
                progress.drafts = found[place][:-1]  # the last one was not computed
        return found

    def seconds(self, sequences: list[Sequence], length: int) -> float:
        """What drafting takes, and a share of what it takes to catch up first."""
        num_late = min(sum(map(self._num_late, sequences)), self._runner.max_tokens)
        return self._share * self._target_seconds(len(sequences), num_late // _SPREAD, length)

    def _target_seconds(self, num_sequences: int, num_late: int, length: int) -> float:
        """What steps of the target take that have the tokens of the draft's passes.

        What the host does for all passes takes about as long as one more.
        """
        each_s, late_s = (self._step_seconds(num, num_sequences, 0) for num in (0, num_late))
        return length * each_s + late_s

    def _num_late(self, sequence: Sequence) -> int:
        """About how many tokens a sequence has to catch up."""
        progress = self._progress.get(sequence)
        if progress is None:
            return len(sequence.token_ids)
        return max(0, len(sequence.token_ids) - progress.num_computed - len(progress.drafts) - 2)

    def forget(self, sequence: Sequence) -> None:
        self._progress.pop(sequence, None)

    def _progress_of(self, sequence: Sequence) -> _Progress:
        """What is there of a sequence's KV; its last known token never is: its logits are needed."""
        progress = self._progress.get(sequence)
        if progress is None or progress.incarnation != sequence.num_preemptions:
            progress = self._progress[sequence] = self._found(sequence)
        self._keep_right(progress, sequence)
        self._keep_unchanged(progress, sequence)
        self._mark(progress, sequence)
        progress.num_computed = min(progress.num_computed, len(sequence.token_ids) - 1)
        return progress

    def _found(self, sequence: Sequence) -> _Progress:
        """What others have computed of a sequence that starts, or starts again."""
        table, num = sequence.block_table, 0
        for block, block_hash in zip(table, sequence.block_hashes, strict=False):
            if self._contents.get(block) != block_hash:
                break
            num += 1
        return _Progress(sequence.num_preemptions, num * self._runner.block_size, table[:num], num)

    def _keep_right(self, progress: _Progress, sequence: Sequence) -> None:
        """The drafts that turned out right are computed already."""
        known = sequence.token_ids
        for draft in progress.drafts:
            if progress.num_computed >= len(known) or known[progress.num_computed] != draft:
                break
            progress.num_computed += 1
        progress.drafts = []

    def _keep_unchanged(self, progress: _Progress, sequence: Sequence) -> None:
        """A block that was replaced by a copy has nothing of the draft."""
        table, blocks = sequence.block_table, progress.blocks
        if table[: len(blocks)] != blocks:
            pairs = enumerate(zip(table, blocks, strict=False))
            num_same = next((i for i, (a, b) in pairs if a != b), min(len(table), len(blocks)))
            progress.num_computed = min(progress.num_computed, num_same * self._runner.block_size)

    def _mark(self, progress: _Progress, sequence: Sequence) -> None:
        """Lets others find the blocks that are complete."""
        hashes, table = sequence.block_hashes, sequence.block_table
        num_full = min(progress.num_computed // self._runner.block_size, len(hashes))
        for i in range(progress.num_marked, num_full):
            self._contents[table[i]] = hashes[i]
        progress.num_marked = num_full

    def _write(self, progress: _Progress, sequence: Sequence, end: int) -> None:
        """Notes that tokens up to `end` are about to be computed: what their blocks held before is gone."""
        size, table = self._runner.block_size, sequence.block_table
        progress.blocks = table[: -(-end // size)]
        for block in progress.blocks[progress.num_computed // size :]:
            self._contents.pop(block, None)
