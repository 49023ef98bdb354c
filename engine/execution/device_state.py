"""Keeps the device's table of the running sequences up to date, by sending what it cannot know.

A short step, whose sequences all sample and have a few tokens each, needs nothing from the host but which slots it has,
and not even that if they are those of the step before: tokens, lengths and blocks are in the table, and the step leaves
them there as the next one needs them. The host remembers what it sent and what the steps that it launched will have
written; only the difference is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from itertools import repeat

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.execution.slot_table import SlotTable
from engine.kernels.batch import Batch
from engine.planning.request import Sequence
from engine.planning.step import Chunk, Plan

I32 = NDArray[np.int32]

_NUM_BUFFERS = 4
"""More than steps in flight; a launch that found no room waits for the device before it is tried again."""

_ALIGNMENT = 4
"""Words: 16 bytes."""


class Uploader:
    """Small arrays on their way to the device, by way of pinned memory, without waiting for it."""

    def __init__(self, device: torch.device, num_words: int) -> None:
        self._device = device
        self._buffers = [
            torch.empty(num_words, dtype=torch.int32, pin_memory=True)
            for _ in range(_NUM_BUFFERS if device.type == "cuda" else 0)
        ]
        self._turn = 0

    def send_parts(self, parts: ListLike[ListLike[int]]) -> list[Tensor]:
        """Several arrays in one go, each aligned as kernels like it: they are compiled anew for what is not."""
        sizes = [len(part) for part in parts]
        starts = np.cumsum([0, *(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]).tolist()
        words = np.zeros(starts[-1], np.int32)
        for start, part in zip(starts, parts, strict=False):
            words[start : start + len(part)] = part
        sent = self.send(words)
        return [sent[start : start + size] for start, size in zip(starts, sizes, strict=False)]

    def send(self, words: I32) -> Tensor:
        """The words on the device; called at most once for each step."""
        if not self._buffers or len(words) > len(self._buffers[0]):
            return torch.from_numpy(words.copy()).to(self._device)
        self._turn = (self._turn + 1) % len(self._buffers)
        buffer = self._buffers[self._turn][: len(words)]
        buffer.copy_(torch.from_numpy(words))
        return buffer.to(self._device, non_blocking=True)


@dataclass(slots=True)
class Seat:
    """A sequence's slot, and what it holds once the steps launched so far are done, as far as the host can know."""

    slot: int
    incarnation: int
    length: int = -1
    """-1: unknown, and so is the rest."""
    sampled_at: int = -1
    """Position of the token that was sampled last; its value is in the table."""
    blocks: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Changes:
    """Words of the table to be overwritten."""

    places: list[int] = field(default_factory=list)
    values: list[int] = field(default_factory=list)

    def set(self, part: Tensor, slot: int, values: list[int], column: int = 0) -> None:
        """A slot's words from `column` on, in this part of the table."""
        first = part.storage_offset() + slot * part.stride(0) + column
        self.places += range(first, first + len(values))
        self.values += values


@dataclass(slots=True, kw_only=True)
class Placed:
    """A step whose sequences have their slots."""

    seats: list[Seat]
    """By chunk."""
    query_len: int | None
    """Of a short step, which comes out of the table: rows of each sequence. None: the host made a batch."""
    copies: tuple[Tensor, Tensor] | None
    """Blocks to be copied first: sources and targets."""
    slot_tensor: Tensor
    """[S] int32, or more with -1 if padding was asked for."""
    batch: Batch | None = None
    """If the step is not short."""
    sampled_slots: Tensor | None = None
    """[R] int32 slots of `batch.sample_rows`."""
    sampled_chunks: Tensor | None = None
    """[R] int32 and their chunks."""


class DeviceState:
    """The table, and who has which slot.

    Args:
        table: on its device.
        max_tokens: tokens of the largest step.
        query_lens: of the steps that come out of the table, ascending: no sequence has more tokens.
        seat: told of a slot and the sequence that has it from the next step on.
        vacate: told of a slot that nobody has any more.
    """

    def __init__(
        self,
        table: SlotTable,
        max_tokens: int,
        *,
        query_lens: tuple[int, ...] = (1,),
        seat: Callable[[int, Sequence], None] = lambda *_: None,
        vacate: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.table = table
        self._query_lens = query_lens
        rows, device = table.num_rows, table.words.device
        num_slots = rows - 1
        self._uploader = Uploader(device, 4 * max_tokens + 8 * num_slots + rows * table.max_blocks // 4)
        self._seat, self._vacate = seat, vacate
        self._seat_of: dict[Sequence, Seat] = {}
        self._free = list(reversed(range(num_slots)))
        self._last_slots: list[int] = []
        self._last_slot_tensor = torch.zeros(0, dtype=torch.int32, device=device)

    # Before a step

    def place(self, plan: Plan, pad: Callable[[int, int], int] = lambda num, _: num) -> Placed:
        """Gives every sequence of a plan its slot, and sends what the device does not know.

        Args:
            pad: to how many sequences a short step of so many, with so many tokens each, is to be padded.
        """
        changes = _Changes()
        query_len = self._query_len(plan)
        seats = [self._seat_for(chunk.sequence) for chunk in plan.chunks]
        for seat, chunk in zip(seats, plan.chunks, strict=True):
            if plan.copies or not _is_as_expected(seat, chunk):
                self._note_changes(seat, chunk, changes, is_short=query_len is not None)
        slots = [seat.slot for seat in seats]
        if query_len is None:
            return self._send_mixed(plan, seats, slots, changes)
        padded = [*slots, *repeat(-1, pad(len(slots), query_len) - len(slots))]
        return self._send_short(plan, seats, padded, query_len, changes)

    def note_launched(self, plan: Plan, seats: ListLike[Seat]) -> None:
        """The step is on its way: from now on the device is supposed to know what it brings."""
        for seat, chunk in zip(seats, plan.chunks, strict=True):
            seat.length = chunk.start + chunk.num_tokens
            if chunk.samples:
                seat.sampled_at = seat.length

    def distrust(self, plan: Plan) -> None:
        """The step's launch failed before it sampled: nobody knows how far it came."""
        self._last_slots = []
        for chunk in plan.chunks:
            seat = self._seat_of.get(chunk.sequence)
            if seat is not None:
                seat.length, seat.blocks = -1, []

    # Inside

    def _seat_for(self, sequence: Sequence) -> Seat:
        seat = self._seat_of.get(sequence)
        if seat is None:
            if not self._free:
                self._vacate_unused()
            slot = self._free.pop()
        elif seat.incarnation == sequence.num_preemptions:
            return seat
        else:
            slot = seat.slot
        seat = self._seat_of[sequence] = Seat(slot, sequence.num_preemptions)
        self._seat(slot, sequence)
        return seat

    def _vacate_unused(self) -> None:
        for sequence, seat in list(self._seat_of.items()):
            if not sequence.block_table or sequence.finish_reason is not None:
                del self._seat_of[sequence]
                self._free.append(seat.slot)
                self._vacate(seat.slot)

    def _query_len(self, plan: Plan) -> int | None:
        """Of the short step that this plan is. What only the device knows of a sequence is a single token's step."""
        if not all(chunk.samples for chunk in plan.chunks):
            return None
        longest = max(chunk.num_tokens for chunk in plan.chunks)
        if longest > 1 and any(_is_ahead(chunk) for chunk in plan.chunks if chunk.num_tokens > 1):
            return None
        return next((query_len for query_len in self._query_lens if query_len >= longest), None)

    def _note_changes(self, seat: Seat, chunk: Chunk, changes: _Changes, *, is_short: bool) -> None:
        sequence, slot, table = chunk.sequence, seat.slot, self.table
        num_next = chunk.num_tokens if is_short else 1
        if seat.length < 0:
            changes.set(table.prompt_lens, slot, [sequence.num_prompt_tokens])
        if seat.length < 0 or num_next > 1:
            changes.set(table.num_next, slot, [num_next])
        if seat.length != chunk.start:
            changes.set(table.lengths, slot, [chunk.start])
        if num_next > 1 or (is_short and seat.sampled_at != chunk.start):
            changes.set(table.next_tokens, slot, sequence.token_ids[chunk.start : chunk.start + num_next])
        blocks, known = sequence.block_table, seat.blocks
        if blocks != known:
            same = next(
                (i for i, (a, b) in enumerate(zip(blocks, known, strict=False)) if a != b), len(known)
            )
            changes.set(table.block_tables, slot, blocks[same:], same)
            seat.blocks = list(blocks)

    def _send_short(
        self, plan: Plan, seats: list[Seat], padded: list[int], query_len: int, changes: _Changes
    ) -> Placed:
        is_known, copies = padded == self._last_slots, None
        if not is_known or changes.places or plan.copies:
            sent, copies = self._send(plan, [] if is_known else padded, changes, [])
            if not is_known:
                self._last_slots, self._last_slot_tensor = padded, sent[0]
        return Placed(seats=seats, query_len=query_len, copies=copies, slot_tensor=self._last_slot_tensor)

    def _send_mixed(self, plan: Plan, seats: list[Seat], slots: list[int], changes: _Changes) -> Placed:
        sent, copies = self._send(plan, slots, changes, self._mixed_parts(plan.chunks, slots))
        placed = Placed(seats=seats, query_len=None, copies=copies, slot_tensor=sent[0])
        self._mix(placed, sent[1:], plan)
        return placed

    def _send(
        self, plan: Plan, slots: list[int], changes: _Changes, more: list[list[int]]
    ) -> tuple[list[Tensor], tuple[Tensor, Tensor] | None]:
        """([slots, *more], block copies); the table is changed."""
        sources, targets = [source for source, _ in plan.copies], [target for _, target in plan.copies]
        parts = [changes.places, changes.values, sources, targets, slots, *more]
        places, values, from_blocks, to_blocks, *sent = self._uploader.send_parts(parts)
        if changes.places:
            self.table.words[places.long()] = values
        return sent, (from_blocks, to_blocks) if plan.copies else None

    def _mixed_parts(self, chunks: list[Chunk], slots: list[int]) -> list[list[int]]:
        """What a step that is not short has beside the table; see `_mix`."""
        token_ids: list[int] = []
        positions: list[int] = []
        starts, ends = [0], []
        unknown: list[tuple[int, int]] = []
        sampled: list[tuple[int, int, int]] = []
        for i, (chunk, slot) in enumerate(zip(chunks, slots, strict=True)):
            end, known = chunk.start + chunk.num_tokens, chunk.sequence.token_ids
            token_ids += known[chunk.start : end]
            if end > len(known):
                unknown.append((len(token_ids), slot))
                token_ids.append(0)
            positions += range(chunk.start, end)
            starts.append(len(token_ids))
            ends.append(end)
            if chunk.samples:
                sampled.append((len(token_ids) - 1, slot, i))
        return [
            token_ids,
            positions,
            starts,
            ends,
            [row for row, _ in unknown],
            [slot for _, slot in unknown],
            [row for row, _, _ in sampled],
            [slot for _, slot, _ in sampled],
            [i for _, _, i in sampled],
        ]

    def _mix(self, placed: Placed, sent: ListLike[Tensor], plan: Plan) -> None:
        token_ids, positions, starts, ends, unknown_rows, unknown_slots, rows, slots, chunks = sent
        if unknown_rows.numel():
            sampled = self.table.next_tokens[:, 0][unknown_slots.long()]
            token_ids[unknown_rows.long()] = sampled.clamp(min=0)
        width = max(len(chunk.sequence.block_table) for chunk in plan.chunks)
        placed.batch = Batch(
            token_ids=token_ids,
            positions=positions,
            query_starts=starts,
            context_lens=ends,
            block_tables=self.table.block_tables[placed.slot_tensor.long(), :width],
            sample_rows=rows,
            max_query_len=max(chunk.num_tokens for chunk in plan.chunks),
            host_lengths=[(chunk.num_tokens, chunk.start + chunk.num_tokens) for chunk in plan.chunks],
        )
        placed.sampled_slots, placed.sampled_chunks = slots, chunks


def _is_as_expected(seat: Seat, chunk: Chunk) -> bool:
    """Whether the device knows all of a sequence's next step: it is the one token that the step before sampled."""
    is_next = chunk.num_tokens == 1 and chunk.start == seat.length == seat.sampled_at
    return is_next and len(chunk.sequence.block_table) == len(seat.blocks)


def _is_ahead(chunk: Chunk) -> bool:
    """Whether its last token is one that a step in flight samples."""
    return chunk.start + chunk.num_tokens > len(chunk.sequence.token_ids)
