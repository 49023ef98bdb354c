"""What the device knows of the running sequences: a table with a slot for each, kept up by what changed.

A step that decodes needs nothing from the host but which slots it has, and not even that if they are those of the step
before: tokens, lengths and blocks are in the table, and the step leaves them there as the next one needs them. The host
remembers what it sent and what the steps that it launched will have written; only the difference is sent.

All device work is in the order of one stream. The last row of every table belongs to no slot: index -1, which pads a
batch to the size of a graph, reads and writes it.
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

from engine.model.batch import Batch
from engine.request import Sequence
from engine.step import Chunk, Plan

I32 = NDArray[np.int32]

_NUM_BUFFERS = 4
"""Two steps may be in flight, and a launch may be tried twice."""

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
class _Seat:
    """What a slot holds on the device once the steps launched so far are done, as far as the host can know."""

    sequence: Sequence
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

    def set(self, place: int, value: int) -> None:
        self.places.append(place)
        self.values.append(value)


@dataclass(slots=True, kw_only=True)
class Placed:
    """A step whose sequences have their slots."""

    slots: list[int]
    """By chunk."""
    is_decode: bool
    """Every chunk is one token, and samples: `slots` is all that the device has to be told."""
    copies: tuple[Tensor, Tensor] | None
    """Blocks to be copied first: sources and targets."""
    slot_tensor: Tensor
    """[S] int32, or more with -1 if padding was asked for."""
    batch: Batch | None = None
    """If it is not a decode."""
    sampled_slots: Tensor | None = None
    """[R] int32 slots of `batch.sample_rows`."""
    sampled_chunks: Tensor | None = None
    """[R] int32 and their chunks."""


class DeviceState:
    """The table, and who has which slot.

    Args:
        num_slots: sequences that run at a time; one that has blocks keeps its slot.
        max_blocks: blocks of the longest sequence.
        max_tokens: tokens of the largest step.
        seat: told of a slot and the sequence that has it from the next step on.
        vacate: told of a slot that nobody has any more.
    """

    def __init__(
        self,
        num_slots: int,
        max_blocks: int,
        max_tokens: int,
        device: torch.device,
        *,
        seat: Callable[[int, Sequence], None] = lambda *_: None,
        vacate: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.num_slots = num_slots
        self.max_blocks = max_blocks
        self.device = device
        self._num_rows = rows = num_slots + 1
        self._words = torch.zeros(rows * (3 + max_blocks), dtype=torch.int32, device=device)
        self.tokens, self.lengths, self.prompt_lens = self._words[: 3 * rows].view(3, rows).unbind()
        """[num_slots + 1] each: the token sampled last; tokens whose KV there is; tokens of the prompt."""
        self.lengths[-1] = -1
        self.block_tables = self._words[3 * rows :].view(rows, max_blocks)
        self._query_starts = torch.arange(num_slots + 1, dtype=torch.int32, device=device)
        self._uploader = Uploader(device, 4 * max_tokens + 8 * num_slots + rows * max_blocks // 4)
        self._seat, self._vacate = seat, vacate
        self._slot_of: dict[Sequence, int] = {}
        self._seats: list[_Seat | None] = [None] * num_slots
        self._free = list(reversed(range(num_slots)))
        self._last_slots: list[int] = []
        self._last_slot_tensor: Tensor | None = None

    # Before a step

    def place(self, plan: Plan, pad: Callable[[int], int] = lambda n: n) -> Placed:
        """Gives every sequence of a plan its slot, and sends what the device does not know.

        Args:
            pad: to how many rows a decode of so many sequences is to be padded.
        """
        changes = _Changes()
        slots = [self._slot_for(chunk.sequence) for chunk in plan.chunks]
        for slot, chunk in zip(slots, plan.chunks, strict=True):
            self._note_changes(slot, chunk, changes, compare=bool(plan.copies))
        is_decode = all(c.num_tokens == 1 and c.samples for c in plan.chunks)
        padded = [*slots, *repeat(-1, pad(len(slots)) - len(slots))] if is_decode else slots
        if is_decode and padded == self._last_slots and not changes.places and not plan.copies:
            assert self._last_slot_tensor is not None
            return Placed(slots=slots, is_decode=True, copies=None, slot_tensor=self._last_slot_tensor)
        return self._send(plan, slots, padded, is_decode, changes)

    def note_launched(self, plan: Plan, slots: ListLike[int]) -> None:
        """The step is on its way: from now on the device is supposed to know what it brings."""
        for slot, chunk in zip(slots, plan.chunks, strict=True):
            seat = self._taken(slot)
            seat.length = chunk.start + chunk.num_tokens
            if chunk.samples:
                seat.sampled_at = seat.length

    def distrust(self, plan: Plan) -> None:
        """The step's launch failed before it sampled: nobody knows how far it came."""
        self._last_slots = []
        for chunk in plan.chunks:
            slot = self._slot_of.get(chunk.sequence)
            if slot is not None:
                seat = self._taken(slot)
                seat.length, seat.blocks = -1, []

    # On the device

    def decode_batch(self, slots: Tensor) -> Batch:
        """One token for each slot, from the table alone; with static shapes, and nothing waits.

        A padded row has position -1, no context and block 0.

        Args:
            slots: [S] int32; -1 is padding.
        """
        rows = slots.long()
        positions = self.lengths[rows]
        num = slots.numel()
        return Batch(
            token_ids=self.tokens[rows].clamp(min=0),  # -1 if it could not be sampled: the sequence ends soon
            positions=positions,
            query_starts=self._query_starts[: num + 1],
            context_lens=positions + 1,
            block_tables=self.block_tables[rows],
            sample_rows=self._query_starts[:num],
        )

    def numbers(self, slots: Tensor, context_lens: Tensor) -> Tensor:
        """[S] int32 output tokens that there are before the one that a row samples."""
        return context_lens - self.prompt_lens[slots.long()]

    def advance(self, slots: Tensor, context_lens: Tensor) -> None:
        """The KV of so many tokens is there now. [S] each."""
        self.lengths[slots.long()] = torch.where(slots >= 0, context_lens, -1)

    def keep_tokens(self, slots: Tensor, token_ids: Tensor) -> None:
        """What was sampled, [R] each, is what these slots compute next."""
        self.tokens[slots.long()] = token_ids

    # Inside

    def _taken(self, slot: int) -> _Seat:
        seat = self._seats[slot]
        assert seat is not None
        return seat

    def _slot_for(self, sequence: Sequence) -> int:
        slot = self._slot_of.get(sequence)
        if slot is None:
            if not self._free:
                self._vacate_unused()
            slot = self._slot_of[sequence] = self._free.pop()
        elif self._taken(slot).incarnation == sequence.num_preemptions:
            return slot
        self._seats[slot] = _Seat(sequence, sequence.num_preemptions)
        self._seat(slot, sequence)
        return slot

    def _vacate_unused(self) -> None:
        for sequence, slot in list(self._slot_of.items()):
            if not sequence.block_table or sequence.finish_reason is not None:
                del self._slot_of[sequence]
                self._seats[slot] = None
                self._free.append(slot)
                self._vacate(slot)

    def _note_changes(self, slot: int, chunk: Chunk, changes: _Changes, *, compare: bool) -> None:
        seat, sequence = self._taken(slot), chunk.sequence
        if seat.length < 0:
            changes.set(2 * self._num_rows + slot, sequence.num_prompt_tokens)
        if seat.length != chunk.start:
            changes.set(self._num_rows + slot, chunk.start)
        if chunk.num_tokens == 1 and seat.sampled_at != chunk.start:
            changes.set(slot, sequence.token_ids[chunk.start])
        table, known = sequence.block_table, seat.blocks
        if len(table) != len(known) or (compare and table != known):
            first = (3 * self._num_rows) + slot * self.max_blocks
            for i, block in enumerate(table):
                if i >= len(known) or known[i] != block:
                    changes.set(first + i, block)
            seat.blocks = list(table)

    def _send(
        self, plan: Plan, slots: list[int], padded: list[int], is_decode: bool, changes: _Changes
    ) -> Placed:
        sources, targets = [source for source, _ in plan.copies], [target for _, target in plan.copies]
        parts = [padded, changes.places, changes.values, sources, targets]
        if not is_decode:
            parts += self._mixed_parts(plan.chunks, slots)
        sent = self._uploader.send_parts(parts)
        if changes.places:
            self._words[sent[1].long()] = sent[2]
        placed = Placed(
            slots=slots,
            is_decode=is_decode,
            slot_tensor=sent[0],
            copies=(sent[3], sent[4]) if plan.copies else None,
        )
        self._last_slots, self._last_slot_tensor = (padded if is_decode else []), sent[0]
        if not is_decode:
            self._mix(placed, sent[5:], plan)
        return placed

    def _mixed_parts(self, chunks: list[Chunk], slots: list[int]) -> list[list[int]]:
        """What a step that is no decode has beside the table; see `_mix`."""
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
            token_ids[unknown_rows.long()] = self.tokens[unknown_slots.long()].clamp(min=0)
        width = max(len(chunk.sequence.block_table) for chunk in plan.chunks)
        placed.batch = Batch(
            token_ids=token_ids,
            positions=positions,
            query_starts=starts,
            context_lens=ends,
            block_tables=self.block_tables[placed.slot_tensor.long(), :width],
            sample_rows=rows,
            host_lengths=[(chunk.num_tokens, chunk.start + chunk.num_tokens) for chunk in plan.chunks],
        )
        placed.sampled_slots, placed.sampled_chunks = slots, chunks
