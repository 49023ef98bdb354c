"""The table of the running sequences on the device, a row for each seat, and the inputs of a step made from it.

All work on the table is in the order of one stream. Its last row belongs to no seat: seat -1, which pads a step to the
size of a graph, reads and writes that row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.engine.kernels.batch import Batch

FROM_TABLE = -1
"""A token id that only the device knows: the one that was sampled last for its sequence."""


class SequenceTable:
    """The running sequences on the device; all int32.

    Attributes:
        lengths: [rows] tokens whose KV is written by the steps launched so far, but for those dropped since.
        prompt_lens: [rows] tokens of the prompt, less all that were dropped: so many fewer, below 0 if need be.
        last_tokens: [rows] the token sampled last; -1 where that step found none.
        dropped: [rows] tokens that were dropped: the token at place p of those that are left has position p + dropped.
        block_tables: [rows, max_blocks] KV blocks; of several tables, the entries for the same tokens side by side.
        words: these five, one after another, in one piece of memory.
        prompt_lens_at, last_tokens_at, dropped_at, block_tables_at: the place of their first words there; lengths are
            first.
    """

    def __init__(
        self, num_seats: int, max_blocks: int, block_size: int, device: torch.device, num_tables: int = 1
    ) -> None:
        """`max_blocks` counts the blocks of all `num_tables` tables of a sequence together."""
        self.num_rows = rows = num_seats + 1
        self.max_blocks, self.block_size, self.num_tables = max_blocks, block_size, num_tables
        sizes = [rows, rows, rows, rows, rows * max_blocks]
        self.words = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self.lengths, self.prompt_lens, self.last_tokens, self.dropped, blocks = torch.split(
            self.words, sizes
        )
        self.block_tables = blocks.view(rows, max_blocks)
        self.prompt_lens_at, self.last_tokens_at, self.dropped_at, self.block_tables_at = (
            number * rows for number in range(1, 5)
        )

    def num_outputs(self, seats: Tensor) -> Tensor:
        """[n] int32: the output tokens of these seats whose KV is written."""
        return (self.lengths - self.prompt_lens)[seats.long()]


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The tokens of one step, as the host sends them; S sequences with T tokens between them, all int32."""

    seats: Tensor
    """[S] seat of each sequence; -1 is padding, which must have the fields of its row left alone."""
    query_starts: Tensor
    """[S + 1] sequence s has the tokens query_starts[s] to query_starts[s + 1] - 1."""
    token_ids: Tensor
    """[T] FROM_TABLE, for the last token of a sequence only, where the host does not know it."""
    num_blocks: int
    """No sequence of the step has more, in all its tables."""
    max_query_len: int
    """No sequence of the step has more tokens."""
    min_query_len: int = 0
    """See `Batch`."""


@dataclass(slots=True)
class TableStep:
    """A step as the host sends it where all else is in tables."""

    seats: list[int]
    """By sequence."""
    starts: Sequence[int]
    """[S + 1] sequence s has the tokens starts[s] to starts[s + 1] - 1."""
    token_ids: list[int]
    """FROM_TABLE, for the last token of a sequence only, where the host does not know it."""
    num_blocks: int
    """No sequence of the step has more, in all its tables."""
    places: list[int] = field(default_factory=list)
    """Words of the table that get new values before the step."""
    values: list[int] = field(default_factory=list)
    state_slots: Sequence[int] = ()
    """The rows of `Batch.state_slots`, one after another; empty where no layer has a state."""
    state_saves: Sequence[int] = ()
    """The rows of `Batch.state_saves`, likewise."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of the decoder and the sampler; `batch.sample_rows` is the last row of each sequence."""

    batch: Batch
    numbers: Tensor
    """[S] int32 output tokens that there are before the one that a sequence's last row chooses."""


Gather = Callable[[SequenceTable, StepTokens], StepInputs]
"""An implementation of `gather`."""


def gather(table: SequenceTable, step: StepTokens) -> StepInputs:
    """Makes the inputs of a step; from then on the table supposes that the step was run.

    Rows of the batch that belong to no sequence, and all rows of a padding seat, have position -1; a padding seat has
    context 0. Shapes are static and nothing waits for the device. This is the specification, in plain torch.
    """
    seats, starts = step.seats.long(), step.query_starts
    num_sequences, device = seats.numel(), starts.device
    is_padding = step.seats < 0
    num_queries = starts.diff()
    lengths = table.lengths[seats]
    context_lens = torch.where(is_padding, 0, lengths + num_queries)
    table.lengths[seats] = context_lens  # the row of the padding stays 0

    rows = torch.arange(step.token_ids.numel(), dtype=torch.int32, device=device)
    owners = torch.searchsorted(starts[1:], rows, right=True)
    is_real = owners < num_sequences
    owners = owners.clamp(max=num_sequences - 1)
    is_real &= ~is_padding[owners]
    positions = torch.where(is_real, lengths[owners] + rows - starts[owners], -1)
    rotary_positions = torch.where(is_real, positions + table.dropped[seats][owners], -1)
    token_ids = torch.where(step.token_ids < 0, table.last_tokens[seats][owners], step.token_ids)
    batch = Batch(
        # A token of -1 could not be sampled: its sequence ends soon, whatever it computes.
        token_ids=torch.where(is_real, token_ids, 0).clamp(min=0),
        positions=positions.int(),
        rotary_positions=rotary_positions.int(),
        query_starts=starts,
        context_lens=context_lens.int(),
        block_tables=table.block_tables[seats, : step.num_blocks],
        sample_rows=(starts[1:] - 1).clamp(min=0),
        max_query_len=step.max_query_len,
        min_query_len=step.min_query_len,
    )
    return StepInputs(batch, (context_lens - table.prompt_lens[seats]).int())
