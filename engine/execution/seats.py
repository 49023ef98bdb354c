"""Seats: the row of the device's table that each running sequence has, and the data that the host sends for a step.

A decode step, in which every sequence computes the token that it sampled last, needs nothing from the host but its
seats, and not even the seats if they are the same as in the step before: tokens, lengths and block tables are in the
table, and each step leaves them there as the next one needs them. The host remembers the words that it sent and that
the launched steps will have written, and sends only the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as ListLike
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import repeat

import torch
from torch import Tensor

from penstock.engine.execution.uploads import send_apart
from penstock.engine.kernels.sequence_table import FROM_TABLE, SequenceTable, StepTokens, TableStep
from penstock.engine.planning.followed_table import FollowedTable
from penstock.engine.planning.request import Sequence
from penstock.engine.planning.step import Chunk, StepPlan


@dataclass(frozen=True, slots=True)
class StepShape:
    """The shape of a step: its own, or the larger one of a graph that the step is padded to."""

    num_tokens: int
    num_sequences: int
    max_query_len: int
    """Tokens of one sequence."""
    is_decode: bool = False
    """Every sequence has one token, the one that it sampled last, and samples the next."""
    num_rows: int = 0
    """Rows of logits that tokens are chosen from: one for each sequence and each draft, or more as padding."""
    verifies: bool = False
    """Some sequence has drafts."""
    min_query_len: int = 0
    """See `Batch`; 0 for the shape of a graph."""

    @classmethod
    def of(cls, plan: StepPlan) -> StepShape:
        num = len(plan.chunks)
        if plan.num_tokens == num:
            return cls(num, num, 1, False not in [chunk.samples for chunk in plan.chunks], num)
        lengths, num_drafts = [chunk.num_tokens for chunk in plan.chunks], plan.num_drafts
        num_rows = num + num_drafts
        return cls(plan.num_tokens, num, max(lengths), False, num_rows, num_drafts > 0, min(lengths))

    def covers(self, other: StepShape) -> bool:
        return (
            self.is_decode == other.is_decode
            and self.verifies == other.verifies
            and self.num_tokens >= other.num_tokens
            and self.num_sequences >= other.num_sequences
            and self.max_query_len >= other.max_query_len
        )

    def __str__(self) -> str:
        return f"{self.num_tokens} tokens of {self.num_sequences} sequences"


@dataclass(slots=True)
class Seat:
    """A sequence's seat, and what its row has after the steps launched so far, as far as the host knows."""

    number: int
    """The row of the table."""
    length: int = -1
    """Tokens whose KV is written; -1 if nothing of the row is known but the token sampled last."""
    sampled_at: int = -1
    """The position of the token that was sampled last, if its value is in the table; else -1."""
    num_dropped: int = 0
    """The tokens of its sequence that had been dropped when the step before was sent."""
    table: FollowedTable = field(default_factory=FollowedTable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A step whose sequences have their seats, and whose inputs are on the device."""

    seats: list[Seat]
    """By chunk."""
    tokens: StepTokens
    sample_seats: Tensor
    """[num_rows] int32: the seat of each sequence that samples, -1 for the others and for padding."""
    copies: tuple[Tensor, Tensor] | None
    """Blocks to be copied first: sources and targets."""


class Seats:
    """Keeps the device's table of the running sequences up to date.

    Args:
        table: is on its device.
        on_seat: is called with a seat and the sequence that has it from the next step on.
        on_leave: is called with a seat that no sequence has any more.
    """

    def __init__(
        self,
        table: SequenceTable,
        *,
        on_seat: Callable[[int, Sequence], None] = lambda *_: None,
        on_leave: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.table = table
        device, num_seats = table.words.device, table.num_rows - 1
        self._on_seat, self._on_leave = on_seat, on_leave
        self._seat_of: dict[Sequence, Seat] = {}
        self._free = list(reversed(range(num_seats)))
        self._decode_starts = torch.arange(table.num_rows, dtype=torch.int32, device=device)
        self._decode_tokens = torch.full((num_seats,), FROM_TABLE, dtype=torch.int32, device=device)
        self._last_seats: list[int] = []
        self._last_seat_tensor = torch.zeros(0, dtype=torch.int32, device=device)

    def forget(self, sequence: Sequence) -> None:
        """The sequence ended or gave way: its seat is free. A step in flight may still use it."""
        seat = self._seat_of.pop(sequence, None)
        if seat is not None:
            self._free.append(seat.number)
            self._on_leave(seat.number)

    def number_of(self, sequence: Sequence) -> int | None:
        """The sequence's seat, by number; None before its first step, and after it gave way."""
        seat = self._seat_of.get(sequence)
        return None if seat is None else seat.number

    def place(self, plan: StepPlan, shape: StepShape) -> Placed:
        """Gives every sequence of a plan its seat, and sends the data that the device lacks.

        Args:
            shape: the step's own, or a larger one that it is padded to.
        """
        seat_of = self._seat_of
        seats = [seat_of.get(chunk.sequence) or self._seat(chunk.sequence) for chunk in plan.chunks]
        changes = self._changes(plan, seats, is_decode=shape.is_decode)
        place = self._place_decode if shape.is_decode else self._place_mixed
        return place(plan, shape, seats, changes)

    def seated(self, plan: StepPlan) -> list[Seat] | None:
        """The seats of a plan's sequences; None if one has none yet."""
        seats = [seat for chunk in plan.chunks if (seat := self._seat_of.get(chunk.sequence)) is not None]
        return seats if len(seats) == len(plan.chunks) else None

    def table_step(self, plan: StepPlan, seats: ListLike[Seat]) -> TableStep:
        """Makes a step of a plan whose sequences have these seats, and which the caller is to run or launch."""
        is_decode, numbers = StepShape.of(plan).is_decode, [seat.number for seat in seats]
        changes = self._changes(plan, seats, is_decode=is_decode)
        num = len(numbers)
        token_ids, starts = ([FROM_TABLE] * num, range(num + 1)) if is_decode else _token_ids(plan.chunks)
        return TableStep(numbers, starts, token_ids, _most_blocks(plan), changes.places, changes.values)

    def note_launched(self, plan: StepPlan, seats: ListLike[Seat]) -> None:
        """Notes that the step is on its way: from now on the device is supposed to know its changes."""
        for seat, chunk in zip(seats, plan.chunks, strict=True):
            seat.length = chunk.start + chunk.num_tokens
            if chunk.samples:
                seat.sampled_at = seat.length

    def note_handed_on(self, plan: StepPlan, seats: ListLike[Seat]) -> None:
        """Notes that the step is on its way; its tokens are chosen elsewhere, so that later steps have to send them."""
        for seat, chunk in zip(seats, plan.chunks, strict=True):
            seat.length = chunk.start + chunk.num_tokens

    def note_verified(self, seats: Iterable[Seat]) -> None:
        """Drafts of these sequences were verified by one native call, which takes nothing back in the table.

        It has the token after the last draft, whichever came last, and its lengths count wrong drafts, too; the next
        step of a sequence begins where they are to be written over, and `place` sends that.
        """
        for seat in seats:
            seat.sampled_at = -1

    def note_wrong(self, seat: Seat, num_drafts: int) -> None:
        """So many drafts of a step that has landed were wrong; the table has taken them back since."""
        if seat.length >= 0:
            seat.length -= num_drafts
        if seat.sampled_at >= 0:
            seat.sampled_at -= num_drafts

    @contextmanager
    def kept(self, sequences: Iterable[Sequence]) -> Iterator[None]:
        """Gives the rows of these sequences back the lengths and tokens that they had before."""
        seats = [self._seat_of[sequence] for sequence in sequences]
        before = [(seat.length, seat.sampled_at) for seat in seats]
        table, (sent,) = self.table, send_apart([[seat.number for seat in seats]], self.table.words.device)
        rows = sent.long()
        lengths, last_tokens = table.lengths[rows], table.last_tokens[rows]
        try:
            yield
        finally:
            table.lengths[rows], table.last_tokens[rows] = lengths, last_tokens
            for seat, (length, sampled_at) in zip(seats, before, strict=True):
                seat.length, seat.sampled_at = length, sampled_at

    def distrust(self, plan: StepPlan) -> None:
        """The step's launch failed before it sampled: it is unknown how far it came."""
        self._last_seats = []
        for chunk in plan.chunks:
            seat = self._seat_of.get(chunk.sequence)
            if seat is not None:
                seat.length, seat.table = -1, FollowedTable()

    def decode_tokens(self, seats: Tensor, num_blocks: int) -> StepTokens:
        """A decode step over these seats, padding included."""
        num = seats.numel()
        return StepTokens(seats, self._decode_starts[: num + 1], self._decode_tokens[:num], num_blocks, 1)

    def _changes(self, plan: StepPlan, seats: ListLike[Seat], *, is_decode: bool) -> _Changes:
        changes = _Changes(self.table)
        for seat, chunk in zip(seats, plan.chunks, strict=True):
            # The table has all of a step whose one token is the one sampled last, in blocks that it knows.
            is_next = chunk.start == seat.length == seat.sampled_at and chunk.num_tokens == 1
            sequence, known = chunk.sequence, seat.table
            is_known = (
                sequence.block_table is known.blocks
                and len(sequence.block_table) == known.num_blocks
                and len(sequence.rewritten) == known.num_rewritten
                and sequence.num_dropped == seat.num_dropped
            )
            if not (is_next and is_known):
                changes.note(seat, chunk, is_decode=is_decode)
        return changes

    def _seat(self, sequence: Sequence) -> Seat:
        seat = self._seat_of[sequence] = Seat(self._free.pop())
        self._on_seat(seat.number, sequence)
        return seat

    def _place_decode(self, plan: StepPlan, shape: StepShape, seats: list[Seat], changes: _Changes) -> Placed:
        numbers = [seat.number for seat in seats]
        numbers += repeat(-1, shape.num_rows - len(numbers))
        is_known, copies = numbers == self._last_seats, None
        if not is_known or changes.places or plan.copies:
            (sent,), copies = self._send(plan, changes, [[] if is_known else numbers])
            if not is_known:
                self._last_seats, self._last_seat_tensor = numbers, sent
        rows = self._last_seat_tensor
        tokens = self.decode_tokens(rows[: shape.num_sequences], _most_blocks(plan))
        return Placed(seats=seats, tokens=tokens, sample_seats=rows, copies=copies)

    def _place_mixed(self, plan: StepPlan, shape: StepShape, seats: list[Seat], changes: _Changes) -> Placed:
        token_ids, starts = _token_ids(plan.chunks)
        numbers = [seat.number for seat in seats]
        samples = [number if c.samples else -1 for number, c in zip(numbers, plan.chunks, strict=True)]
        num_padding = shape.num_sequences - len(numbers)
        numbers += repeat(-1, num_padding)
        starts += repeat(starts[-1], num_padding)
        token_ids += repeat(0, shape.num_tokens - len(token_ids))
        samples += repeat(-1, shape.num_rows - len(samples))
        sent, copies = self._send(plan, changes, [numbers, starts, token_ids, samples])
        seats_sent, starts_sent, tokens_sent, samples_sent = sent
        lengths = shape.max_query_len, shape.min_query_len
        tokens = StepTokens(seats_sent, starts_sent, tokens_sent, _most_blocks(plan), *lengths)
        return Placed(seats=seats, tokens=tokens, sample_seats=samples_sent, copies=copies)

    def _send(
        self, plan: StepPlan, changes: _Changes, parts: list[list[int]]
    ) -> tuple[list[Tensor], tuple[Tensor, Tensor] | None]:
        """The parts on the device, and the block copies; the table is changed."""
        sources, targets = [source for source, _ in plan.copies], [target for _, target in plan.copies]
        *sent, places, values, from_blocks, to_blocks = send_apart(
            [*parts, changes.places, changes.values, sources, targets], self.table.words.device
        )
        if changes.places:
            self.table.words[places.long()] = values
        return sent, (from_blocks, to_blocks) if plan.copies else None


class _Changes:
    """Words of the table to be overwritten."""

    def __init__(self, table: SequenceTable) -> None:
        self.places: list[int] = []
        self.values: list[int] = []
        self._table = table

    def note(self, seat: Seat, chunk: Chunk, *, is_decode: bool) -> None:
        """Notes the words of a sequence's next step that the table lacks."""
        sequence, number, table = chunk.sequence, seat.number, self._table
        num_dropped = sequence.num_dropped
        is_shifted = seat.num_dropped != num_dropped
        if seat.length < 0 or is_shifted:
            self._set(table.prompt_lens_at + number, [sequence.num_prompt_tokens - num_dropped])
            self._set(table.dropped_at + number, [num_dropped])
        if seat.length != chunk.start or is_shifted:
            self._set(number, [chunk.start - num_dropped])
        seat.num_dropped = num_dropped
        if is_decode and seat.sampled_at != chunk.start:
            self._set(table.last_tokens_at + number, [sequence.token_ids[chunk.start]])
        blocks, first = sequence.block_table, table.block_tables_at + number * table.max_blocks
        places, num_known = seat.table.changes(sequence)
        for place in places:
            self._set(first + place, [blocks[place]])
        if num_known < len(blocks):
            self._set(first + num_known, blocks[num_known:])

    def _set(self, first: int, values: list[int]) -> None:
        """The words of the table from `first` on; see `SequenceTable.words`."""
        self.places += range(first, first + len(values))
        self.values += values


def _token_ids(chunks: ListLike[Chunk]) -> tuple[list[int], list[int]]:
    """The token ids of the chunks, one after another, and where each chunk starts and the last one ends."""
    token_ids: list[int] = []
    starts = [0]
    for chunk in chunks:
        known, end = chunk.sequence.token_ids, chunk.start + chunk.num_tokens
        end -= len(chunk.drafts)
        token_ids += known[chunk.start : end]
        if end > len(known):
            token_ids.append(FROM_TABLE)
        if chunk.drafts:
            token_ids += chunk.drafts
        starts.append(len(token_ids))
    return token_ids, starts


def _most_blocks(plan: StepPlan) -> int:
    return max([len(chunk.sequence.block_table) for chunk in plan.chunks])
