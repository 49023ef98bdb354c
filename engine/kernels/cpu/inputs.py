"""Making the inputs of a step with the native kernels."""

from __future__ import annotations

import ctypes

import torch

from penstock.engine.kernels.batch import Batch
from penstock.engine.kernels.cpu import structs
from penstock.engine.kernels.cpu.library import NativeLibrary, check, expect_ints
from penstock.engine.kernels.sequence_table import SequenceTable, StepInputs, StepTokens


class NativeGather:
    """Implements `engine.kernels.sequence_table.Gather` in one call.

    Every step gets memory of its own, so that its inputs stay valid as long as they are referenced. Calls must come
    from one thread at a time.
    """

    def __init__(self, library: NativeLibrary) -> None:
        self._gather = library.function("penstock_gather")
        self._table: SequenceTable | None = None
        self._arguments = structs.GatherArgs()

    def __call__(self, table: SequenceTable, step: StepTokens) -> StepInputs:
        """Makes the inputs of a step; see `engine.kernels.sequence_table.gather`.

        Raises:
            ValueError: tensors that do not fit each other, or a seat that does not exist; the table is as before.
        """
        if table is not self._table:
            self._read(table)
        num_sequences, num_tokens = step.seats.shape[0], step.token_ids.shape[0]
        num_blocks = step.num_blocks
        expect_ints("seats", step.seats, (num_sequences,))
        expect_ints("query_starts", step.query_starts, (num_sequences + 1,))
        expect_ints("token_ids", step.token_ids, (num_tokens,))
        if not 0 <= num_blocks <= table.max_blocks:
            raise ValueError(f"{num_blocks} blocks; a row of the table has {table.max_blocks}")
        sizes = [num_tokens] * 3 + [num_sequences] * 3 + [num_sequences * num_blocks]
        words = torch.empty(sum(sizes), dtype=torch.int32)
        token_ids, positions, rotary_positions, *rest = words.split_with_sizes(sizes)
        context_lens, sample_rows, numbers, blocks = rest
        arguments = self._arguments
        arguments.seats, arguments.query_starts = step.seats.data_ptr(), step.query_starts.data_ptr()
        arguments.token_ids = step.token_ids.data_ptr()
        arguments.num_sequences, arguments.num_tokens = num_sequences, num_tokens
        arguments.num_blocks = num_blocks
        arguments.out = words.data_ptr()
        check(self._gather(ctypes.byref(arguments)))
        batch = Batch(
            token_ids=token_ids,
            positions=positions,
            rotary_positions=rotary_positions,
            query_starts=step.query_starts,
            context_lens=context_lens,
            block_tables=blocks.view(num_sequences, num_blocks),
            sample_rows=sample_rows,
            max_query_len=step.max_query_len,
            min_query_len=step.min_query_len,
        )
        return StepInputs(batch, numbers)

    def _read(self, table: SequenceTable) -> None:
        """Keeps the addresses of the table, which stay where they are as long as it lives."""
        arguments = self._arguments
        arguments.lengths, arguments.prompt_lens = table.lengths.data_ptr(), table.prompt_lens.data_ptr()
        arguments.last_tokens, arguments.dropped = table.last_tokens.data_ptr(), table.dropped.data_ptr()
        arguments.block_tables = table.block_tables.data_ptr()
        arguments.num_rows, arguments.max_blocks = table.num_rows, table.max_blocks
        self._table = table
