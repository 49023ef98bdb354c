"""The inputs of a step from the table of sequences, as `sequence_table.gather` specifies them, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.kernels.batch import Batch
from penstock.engine.kernels.sequence_table import SequenceTable, StepInputs, StepTokens

FEW, MANY = 128, 1024
"""Tokens, or blocks, that a program moves at a time; MANY where some sequence has more than FEW tokens in the step."""


def gather(table: SequenceTable, step: StepTokens) -> StepInputs:
    """`sequence_table.gather`; entries of the block tables beyond a sequence's context are not set."""
    num_sequences, num_tokens = step.seats.numel(), step.token_ids.numel()

    def empty(*size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, device=step.seats.device)

    batch = Batch(
        token_ids=empty(num_tokens),
        positions=empty(num_tokens),
        rotary_positions=empty(num_tokens),
        query_starts=step.query_starts,
        context_lens=empty(num_sequences),
        block_tables=empty(num_sequences, step.num_blocks),
        sample_rows=empty(num_sequences),
        max_query_len=step.max_query_len,
        min_query_len=step.min_query_len,
    )
    numbers = empty(num_sequences)
    entries, num_warps = (FEW, 1) if step.max_query_len <= FEW else (MANY, 4)
    gather_kernel[(num_sequences + 1,)](
        step.seats,
        step.query_starts,
        step.token_ids,
        table.lengths,
        table.prompt_lens,
        table.last_tokens,
        table.dropped,
        table.block_tables,
        batch.token_ids,
        batch.positions,
        batch.rotary_positions,
        batch.context_lens,
        batch.block_tables,
        batch.sample_rows,
        numbers,
        num_sequences,
        num_tokens,
        step.num_blocks,
        LAST_ROW=table.num_rows - 1,
        MAX_BLOCKS=table.max_blocks,
        BLOCK_SIZE=table.block_size,
        NUM_TABLES=table.num_tables,
        ENTRIES=entries,
        num_warps=num_warps,
    )
    return StepInputs(batch, numbers)


@triton.jit
def gather_kernel(
    seats: tl.tensor,
    query_starts: tl.tensor,
    tokens: tl.tensor,
    lengths: tl.tensor,
    prompt_lens: tl.tensor,
    last_tokens: tl.tensor,
    dropped: tl.tensor,
    table_blocks: tl.tensor,
    token_ids: tl.tensor,
    positions: tl.tensor,
    rotary_positions: tl.tensor,
    context_lens: tl.tensor,
    block_tables: tl.tensor,
    sample_rows: tl.tensor,
    numbers: tl.tensor,
    num_sequences: tl.tensor,
    num_tokens: tl.tensor,
    num_blocks: tl.tensor,
    LAST_ROW: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_TABLES: tl.constexpr,
    ENTRIES: tl.constexpr,
) -> None:
    """One sequence: its rows of the batch and its length after the step; the last program fills rows of no sequence.

    A sequence's length is read and written by its own program alone; the programs of padding all leave theirs 0.
    """
    sequence = tl.program_id(0)
    start = tl.load(query_starts + sequence)
    if sequence == num_sequences:
        for first in range(start, num_tokens, ENTRIES):
            rows = first + tl.arange(0, ENTRIES)
            tl.store(token_ids + rows, 0, mask=rows < num_tokens)
            tl.store(positions + rows, -1, mask=rows < num_tokens)
            tl.store(rotary_positions + rows, -1, mask=rows < num_tokens)
        return
    end = tl.load(query_starts + sequence + 1)
    seat = tl.load(seats + sequence)
    is_padding = seat < 0
    row = tl.where(is_padding, LAST_ROW, seat).to(tl.int64)
    length = tl.load(lengths + row)
    context = tl.where(is_padding, 0, length + end - start)
    last_token, num_dropped = tl.load(last_tokens + row), tl.load(dropped + row)
    tl.store(context_lens + sequence, context)
    tl.store(sample_rows + sequence, tl.maximum(end - 1, 0))
    tl.store(numbers + sequence, context - tl.load(prompt_lens + row))

    for first in range(start, end, ENTRIES):
        rows = first + tl.arange(0, ENTRIES)
        known = tl.load(tokens + rows, mask=rows < end, other=0)
        # A token of -1 could not be sampled: its sequence ends soon, whatever it computes.
        found = tl.maximum(tl.where(known < 0, last_token, known), 0)
        tl.store(token_ids + rows, tl.where(is_padding, 0, found), mask=rows < end)
        position = length + rows - start
        tl.store(positions + rows, tl.where(is_padding, -1, position), mask=rows < end)
        tl.store(rotary_positions + rows, tl.where(is_padding, -1, position + num_dropped), mask=rows < end)

    used = tl.minimum(tl.cdiv(context, BLOCK_SIZE) * NUM_TABLES, num_blocks)
    source = table_blocks + row * MAX_BLOCKS
    target = block_tables + sequence.to(tl.int64) * num_blocks
    for first in range(0, used, ENTRIES):
        entries = first + tl.arange(0, ENTRIES)
        tl.store(target + entries, tl.load(source + entries, mask=entries < used), mask=entries < used)

    tl.debug_barrier()  # every thread has read the length by now
    tl.store(lengths + row, context)
