"""The inputs of a step out of the slot table, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.execution.slot_table import NextStep, SlotTable
from engine.kernels.batch import Batch

BLOCKS_AT_A_TIME = 128


def gather(table: SlotTable, slots: Tensor, query_len: int, block_size: int) -> NextStep:
    """`slot_table.gather`; block tables have nothing of use beyond a sequence's blocks, of `block_size` tokens."""
    num = slots.numel()
    token_ids, positions, context_lens, numbers, block_tables = (
        slots.new_empty(size)
        for size in (num * query_len, num * query_len, num, num, (num, table.max_blocks))
    )
    gather_kernel[(num,)](
        slots,
        table.lengths,
        table.prompt_lens,
        table.num_next,
        table.next_tokens,
        table.block_tables,
        token_ids,
        positions,
        context_lens,
        numbers,
        block_tables,
        LAST_ROW=table.num_rows - 1,
        MAX_QUERY_LEN=table.max_query_len,
        MAX_BLOCKS=table.max_blocks,
        QUERY_LEN=query_len,
        QUERIES=triton.next_power_of_2(query_len),
        BLOCK_SIZE=block_size,
        ENTRIES=BLOCKS_AT_A_TIME,
        num_warps=1,
    )
    query_starts = table.query_starts[query_len]
    batch = Batch(
        token_ids=token_ids,
        positions=positions,
        query_starts=query_starts[: num + 1],
        context_lens=context_lens,
        block_tables=block_tables,
        sample_rows=table.last_rows[query_len][:num],
        max_query_len=query_len,
    )
    return NextStep(batch, numbers)


@triton.jit
def gather_kernel(
    slots: tl.tensor,
    lengths: tl.tensor,
    prompt_lens: tl.tensor,
    num_next: tl.tensor,
    next_tokens: tl.tensor,
    table_blocks: tl.tensor,
    token_ids: tl.tensor,
    positions: tl.tensor,
    context_lens: tl.tensor,
    numbers: tl.tensor,
    block_tables: tl.tensor,
    LAST_ROW: tl.constexpr,
    MAX_QUERY_LEN: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ENTRIES: tl.constexpr,
) -> None:
    """One sequence: what it computes next, and its row as it is after that.

    Programs that are padding share a row, and all leave it as it was.
    """
    sequence = tl.program_id(0)
    slot = tl.load(slots + sequence)
    row = tl.where(slot < 0, LAST_ROW, slot).to(tl.int64)
    length, number = tl.load(lengths + row), tl.load(num_next + row)
    context = length + number
    tl.store(context_lens + sequence, context)
    tl.store(numbers + sequence, context - tl.load(prompt_lens + row))

    queries = tl.arange(0, QUERIES)
    inside = queries < QUERY_LEN
    places = queries - QUERY_LEN + number
    is_token = inside & (places >= 0)
    tokens = tl.load(next_tokens + row * MAX_QUERY_LEN + places, mask=is_token, other=0)
    # -1 could not be sampled: the sequence ends soon, whatever it computes.
    tl.store(token_ids + sequence * QUERY_LEN + queries, tl.maximum(tokens, 0), mask=inside)
    tl.store(positions + sequence * QUERY_LEN + queries, tl.where(is_token, length + places, -1), mask=inside)

    num_blocks = tl.cdiv(context, BLOCK_SIZE)
    source = table_blocks + row * MAX_BLOCKS
    target = block_tables + sequence.to(tl.int64) * MAX_BLOCKS
    for first in range(0, num_blocks, ENTRIES):
        entries = first + tl.arange(0, ENTRIES)
        tl.store(
            target + entries, tl.load(source + entries, mask=entries < num_blocks), mask=entries < num_blocks
        )

    tl.debug_barrier()  # no thread reads the row after another wrote it
    tl.store(lengths + row, context)
    tl.store(num_next + row, tl.minimum(number, 1))
