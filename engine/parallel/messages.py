"""The messages of rank 0 to the others: the plans of its steps, as changes to sequences that they know.

Every rank runs the same steps of the same sequences. A sequence is sent whole when a step first has it, its request
included; from then on one array of 32-bit integers for each step has the tokens and blocks that are new.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, count, islice
from pathlib import Path

from penstock.engine.config import LoadOptions
from penstock.engine.planning.followed_table import FollowedTable
from penstock.engine.planning.request import Request, Sequence
from penstock.engine.planning.state_records import ChunkState, Save
from penstock.engine.planning.step import Chunk, Masks, StepPlan


@dataclass(frozen=True, slots=True)
class Load:
    """Load this checkpoint; answered with None once the model is warm, or with an error."""

    folder: Path
    options: LoadOptions


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch a step."""

    new: list[tuple[int, Request, int]]
    """Key, request and index of each sequence that no step had before, or not since it was forgotten."""
    words: bytes
    """int32: how many block copies, and these; then for each chunk, key, start, num_tokens, samples, the tokens that
    its sequence has dropped, and four lists, each after its length: drafts, the tokens that are new, the place in the
    block table from which on the blocks after it are new, and the numbers of its `ChunkState`, if it has one."""
    rows: tuple[int, ...] = ()
    """See `StepPlan`."""


@dataclass(frozen=True, slots=True)
class ChooseTokens:
    """Choose the tokens of the step that was launched last."""

    masks: Masks | None


@dataclass(frozen=True, slots=True)
class Forget:
    """Forget sequences."""

    keys: list[int]


Message = Load | Launch | ChooseTokens | Forget


@dataclass(slots=True)
class _Told:
    """The part of a sequence that the other ranks know."""

    key: int
    num_tokens: int
    table: FollowedTable = field(default_factory=FollowedTable)


class Narrator:
    """Makes messages of plans, on rank 0.

    Args:
        first_block: the number that planning has for block 0 of the ranks that hear them.
    """

    def __init__(self, first_block: int = 0) -> None:
        self._first_block = first_block
        self._told: dict[Sequence, _Told] = {}
        self._keys = count()

    def launch(self, plan: StepPlan) -> Launch:
        new: list[tuple[int, Request, int]] = []
        words = [len(plan.copies), *self._numbers(chain.from_iterable(plan.copies))]
        for chunk in plan.chunks:
            sequence = chunk.sequence
            told = self._told.get(sequence)
            if told is None:
                request, key = sequence.request, next(self._keys)
                known = sequence.num_prompt_tokens + len(request.output_token_ids)
                told = self._told[sequence] = _Told(key, known)
                new.append((key, request, sequence.index))
            words += (
                told.key,
                chunk.start,
                chunk.num_tokens,
                chunk.samples,
                sequence.num_dropped,
                len(chunk.drafts),
                *chunk.drafts,
            )
            tokens, blocks = sequence.token_ids[told.num_tokens :], sequence.block_table
            words += (len(tokens), *tokens)
            told.num_tokens += len(tokens)
            places, num_known = told.table.changes(sequence)
            first = min([*places, num_known])
            words += (1 + len(blocks) - first, first, *self._numbers(blocks[first:]))
            state = _state_words(chunk.state)
            words += (len(state), *state)
        return Launch(new, array("i", words).tobytes(), plan.rows)

    def forget(self, sequences: Iterable[Sequence]) -> Forget:
        return Forget([self._told.pop(sequence).key for sequence in sequences if sequence in self._told])

    def _numbers(self, blocks: Iterable[int]) -> Iterable[int]:
        """The numbers that these blocks have on their ranks."""
        first = self._first_block
        return [block and block - first for block in blocks] if first else blocks


class Listener:
    """Makes plans of messages, on the other ranks: their sequences have the fields that a step reads, and no more."""

    def __init__(self) -> None:
        self._sequences: dict[int, Sequence] = {}

    def plan(self, message: Launch) -> StepPlan:
        for key, request, index in message.new:
            self._sequences[key] = Sequence(request, index)
        words = array("i")
        words.frombytes(message.words)
        rest = iter(words)
        copies = [(next(rest), next(rest)) for _ in range(next(rest))]
        chunks = [self._chunk(key, rest) for key in rest]
        return StepPlan(chunks, copies, sum(chunk.num_tokens for chunk in chunks), rows=message.rows)

    def forgotten(self, message: Forget) -> list[Sequence]:
        return [self._sequences.pop(key) for key in message.keys]

    def _chunk(self, key: int, rest: Iterator[int]) -> Chunk:
        sequence = self._sequences[key]
        start, num_tokens, samples, sequence.num_dropped = islice(rest, 4)
        drafts = _list(rest)
        sequence.token_ids += _list(rest)
        first, *blocks = _list(rest)
        if first:
            sequence.rewritten += range(first, len(sequence.block_table))
            sequence.block_table[first:] = blocks
        else:  # another table, which may be shorter
            sequence.block_table, sequence.rewritten = blocks, []
        state = _state(_list(rest))
        return Chunk(sequence, start, num_tokens, bool(samples), drafts=drafts, state=state)


def _state_words(state: ChunkState | None) -> list[int]:
    if state is None:
        return []
    return [state.source, state.target, state.replayed, *chain.from_iterable(state.saves)]


def _state(words: list[int]) -> ChunkState | None:
    if not words:
        return None
    source, target, replayed, *saves = words
    rest = iter(saves)
    return ChunkState(source, target, replayed, [Save(*save) for save in zip(rest, rest, rest, strict=True)])


def _list(rest: Iterator[int]) -> list[int]:
    return list(islice(rest, next(rest)))
