"""Drafting with the native kernels: all passes of a draft model in one call."""

from __future__ import annotations

import ctypes
from ctypes import c_int32

from torch import Tensor

from penstock.engine.kernels.cpu.library import Team, check, created, freed_with
from penstock.engine.kernels.cpu.linear import NativeLinear
from penstock.engine.kernels.cpu.sampling import NativeChoose
from penstock.engine.kernels.sequence_table import SequenceTable, TableStep
from penstock.engine.program.native import NativeDecoder
from penstock.engine.program.native_tables import sent, tables_of
from penstock.engine.sampling.tables import Filters, SamplingTables


class NativeDraft:
    """Drafts for sequences of a table: one pass over their tokens, then one over each chosen token but the last.

    Calls must come from one thread at a time, while nothing else uses the tables.

    Args:
        table: has the block tables of the decoder's KV cache.
        drafted: int32, the tokens whose logits lm_head makes, each once; None for all. No others are drafted.
    """

    def __init__(
        self,
        team: Team,
        decoder: NativeDecoder,
        lm_head: NativeLinear,
        table: SequenceTable,
        tables: SamplingTables,
        drafted: Tensor | None = None,
    ) -> None:
        choose = NativeChoose(team)
        made = tables_of(decoder, lm_head, choose, table, tables, drafted)
        self._kept = (team, decoder, lm_head, choose, table, tables, drafted)
        handles = team.handle, decoder.handle, lm_head.handle, choose.handle
        library = team.library
        self._handle = created(library.call("penstock_drafts_new", *handles, ctypes.byref(made)))
        freed_with(self, library, "penstock_drafts_free", self._handle)
        self._run = library.function("penstock_drafts_run")

    def __call__(self, first: TableStep, counts: list[int], filters: Filters) -> list[list[int]]:
        """The tokens of each pass, chosen as `engine.sampling.reference.choose` has it; -1 where there is none.

        Args:
            first: its first sequences are drafted for, the others are read.
            counts: the drafts that are wanted of each, the most first.

        Raises:
            ValueError: the step cannot be.
        """
        if counts != sorted(counts, reverse=True):
            raise ValueError(f"the most drafts first expected, not {counts}")
        num, most = len(counts), max(counts, default=0)
        token_ids = (c_int32 * (most * num))(*[-1] * (most * num))
        check(
            self._run(
                self._handle, ctypes.byref(sent(first, filters)), (c_int32 * num)(*counts), num, token_ids
            )
        )
        return [token_ids[at : at + num] for at in range(0, most * num, num or 1)]
