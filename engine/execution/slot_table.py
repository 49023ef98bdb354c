"""What the device knows of the running sequences, a row for each, and the step that follows from it.

All device work is in the order of one stream. The last row belongs to no slot: index -1, which pads a batch to the
size of a graph, reads and writes it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor

from engine.kernels.batch import Batch


@dataclass(frozen=True, slots=True)
class NextStep:
    """A step as the table has it."""

    batch: Batch
    numbers: Tensor
    """[S] int32 output tokens that there are before the one that a sequence samples."""


class Gather(Protocol):
    def __call__(self, table: SlotTable, slots: Tensor, query_len: int, /) -> NextStep:
        """See `gather`."""


class SlotTable:
    """All int32; rows are slots, and one more.

    Args:
        max_blocks: blocks of the longest sequence.
        max_query_len: tokens of a sequence in the largest step that comes out of the table.
    """

    def __init__(self, num_slots: int, max_blocks: int, max_query_len: int, device: torch.device) -> None:
        self.num_rows = rows = num_slots + 1
        self.max_blocks, self.max_query_len = max_blocks, max_query_len
        sizes = [rows, rows, rows, rows * max_query_len, rows * max_blocks]
        self.words = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        """The whole table, one after another what follows."""
        parts = torch.split(self.words, sizes)
        self.lengths, self.prompt_lens, self.num_next = parts[:3]
        """[rows] each: tokens whose KV there is; tokens of the prompt; tokens that the next step computes."""
        self.next_tokens = parts[3].view(rows, max_query_len)
        """[rows, max_query_len] which these are; the first is the one sampled last, unless the host sent another."""
        self.block_tables = parts[4].view(rows, max_blocks)
        self.num_next[:-1] = 1
        self.query_starts = {
            query_len: torch.arange(0, rows * query_len, query_len, dtype=torch.int32, device=device)
            for query_len in range(1, max_query_len + 1)
        }
        """[rows] of a step in which every sequence has so many tokens."""
        self.last_rows = {
            query_len: torch.arange(
                query_len - 1, num_slots * query_len, query_len, dtype=torch.int32, device=device
            )
            for query_len in self.query_starts
        }
        """[num_slots] of each sequence in such a step."""

    @property
    def num_bytes(self) -> int:
        held = (self.words, *self.query_starts.values(), *self.last_rows.values())
        return sum(tensor.nbytes for tensor in held)

    def keep_tokens(self, slots: Tensor, token_ids: Tensor) -> None:
        """What was sampled, [R] each, is what these slots compute next."""
        self.next_tokens[:, 0][slots.long()] = token_ids

    def keep_lengths(self, slots: Tensor, context_lens: Tensor) -> None:
        """The KV of so many tokens is there now. [S] each, and no padding."""
        self.lengths[slots.long()] = context_lens

    def numbers(self, slots: Tensor, context_lens: Tensor) -> Tensor:
        """[S] int32 output tokens that there are before the one that a row samples."""
        prompt_lens: Tensor = self.prompt_lens[slots.long()]
        return context_lens - prompt_lens


def gather(table: SlotTable, slots: Tensor, query_len: int) -> NextStep:
    """The step that the table has for these slots; from then on the table supposes that it was run.

    Everything has a static shape and nothing waits for the device. Each sequence has `query_len` rows, of which its
    tokens are the last; the others, and all of a padding slot, have position -1. Plain torch, on any device.

    Args:
        slots: [S] int32; -1 is padding.
    """
    rows, num = slots.long(), slots.numel()
    lengths, num_next = table.lengths[rows], table.num_next[rows]
    context_lens = lengths + num_next
    places = torch.arange(query_len, device=slots.device) - query_len + num_next[:, None]
    # -1 could not be sampled: the sequence ends soon, whatever it computes
    token_ids = table.next_tokens[rows].gather(1, places.clamp(min=0)).clamp(min=0)
    table.lengths[rows] = context_lens
    table.num_next[rows] = num_next.clamp(max=1)
    query_starts = table.query_starts[query_len]
    batch = Batch(
        token_ids=token_ids.masked_fill(places < 0, 0).flatten(),
        positions=torch.where(places < 0, -1, lengths[:, None] + places).flatten().int(),
        query_starts=query_starts[: num + 1],
        context_lens=context_lens,
        block_tables=table.block_tables[rows],
        sample_rows=table.last_rows[query_len][:num],
        max_query_len=query_len,
    )
    return NextStep(batch, table.numbers(slots, context_lens))


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """What graphs leave for each other and for the host: of S slots, the first rows of what there is for all."""

    slots: Tensor
    """[S] int32; -1 is padding."""
    numbers: Tensor
    """[S] int32 output tokens that there are already."""
    logits: Tensor
    """[S, vocab]"""
    token_ids: Tensor
    """[S] int32"""
    logprobs: Tensor
    """[S] float32"""

    @classmethod
    def empty(cls, num_slots: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> StepBuffers:
        slots = torch.full((num_slots,), -1, dtype=torch.int32, device=device)
        return cls(
            slots=slots,
            numbers=torch.zeros_like(slots),
            logits=torch.zeros(num_slots, vocab_size, dtype=dtype, device=device),
            token_ids=torch.zeros_like(slots),
            logprobs=torch.zeros_like(slots, dtype=torch.float32),
        )

    def part(self, num: int) -> StepBuffers:
        """The rows of the first so many slots."""
        return StepBuffers(*(getattr(self, field.name)[:num] for field in fields(self)))

    @property
    def num_bytes(self) -> int:
        return sum(getattr(self, field.name).nbytes for field in fields(self))
