"""Drafting with the native kernels: all passes of a draft model in one call."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_void_p

import torch
from torch import Tensor

from engine.kernels.batch import Batch
from engine.kernels.cpu.decoder import NativeDecoder
from engine.kernels.cpu.library import Team, check, expect_ints, fields, pointer
from engine.kernels.cpu.linear import PackedLinear
from engine.kernels.cpu.program import Step, step_of
from engine.kernels.cpu.sampling import ChooseArguments, NativeChoose
from engine.sampling.tables import Filters, SamplingTables

VERY_UNLIKELY = -1e30
"""The logit of a token that is never drafted."""


class _Draft(ctypes.Structure):
    _fields_ = [
        ("first", Step),
        ("choose", ChooseArguments),
        *fields(c_void_p, "counts rows hidden logits drafted narrow"),
        *fields(c_int32, "width num_drafted"),
    ]


class NativeDraft:
    """Drafts for P sequences: a pass over a batch, then one over each token that was chosen, but for the last of each.

    Calls must come from one thread at a time.

    Args:
        drafted: int32, the tokens whose logits lm_head makes, each once; None for all. No others are drafted.
    """

    def __init__(
        self, team: Team, decoder: NativeDecoder, lm_head: PackedLinear, drafted: Tensor | None = None
    ) -> None:
        self._team, self._decoder, self._lm_head = team, decoder, lm_head
        if drafted is not None:
            expect_ints("drafted", drafted, (lm_head.out_features,))
            if drafted.min() < 0:
                raise ValueError("negative tokens are drafted")
        self._drafted = drafted
        self._last_drafted = -1 if drafted is None else int(drafted.max())
        self._chooser = NativeChoose(team)
        self._draft = team.library.function("penstock_draft")

    def __call__(
        self,
        first: Batch,
        counts: list[int],
        tables: SamplingTables,
        slots: Tensor,
        numbers: Tensor,
        filters: Filters,
    ) -> Tensor:
        """Token ids [most drafts, P], chosen as `engine.sampling.reference.choose` has it; -1 where there is none.

        Args:
            first: its first P sequences are drafted for; the last row of each is a sample row, and there are no others.
            counts: the drafts that are wanted of each, the most first.
            slots: [P]
            numbers: [P] the output tokens before the first draft of each.

        Raises:
            ValueError: tensors that do not fit each other, or a draft that is no token.
        """
        num, block_tables = len(counts), self._decoder.tables_of(first)
        step = step_of(first, block_tables)
        expect_ints("sample_rows", first.sample_rows, (num,))
        expect_ints("slots", slots, (num,))
        expect_ints("numbers", numbers, (num,))
        if counts != sorted(counts, reverse=True):
            raise ValueError(f"the most drafts first expected, not {counts}")
        drafted, num_logits = self._drafted, self._lm_head.out_features
        if drafted is None and num_logits != tables.vocab_size:
            raise ValueError(f"{num_logits} logits, and a vocabulary of {tables.vocab_size}")
        if self._last_drafted >= tables.vocab_size:
            raise ValueError(f"{self._last_drafted} is drafted, with a vocabulary of {tables.vocab_size}")
        rows, wanted = torch.arange(num + 1, dtype=torch.int32), torch.tensor(counts, dtype=torch.int32)
        hidden = torch.empty((num, self._decoder.hidden_size))
        logits = torch.full((num, tables.vocab_size), VERY_UNLIKELY)
        narrow = None if drafted is None else torch.empty((num, num_logits))
        token_ids = torch.full((max(counts, default=0), num), -1, dtype=torch.int32)
        choose = self._chooser.arguments_of(tables)
        choose.slots, choose.numbers, choose.num_rows = slots.data_ptr(), numbers.data_ptr(), num
        choose.token_ids = token_ids.data_ptr()
        choose.top_k, choose.top_p = filters.top_k, filters.top_p
        arguments = _Draft(
            step,
            choose,
            wanted.data_ptr(),
            rows.data_ptr(),
            hidden.data_ptr(),
            logits.data_ptr(),
            pointer(drafted),
            pointer(narrow),
            hidden.shape[1],
            num_logits,
        )
        handles = self._team.handle, self._decoder.handle, self._lm_head.handle, self._chooser.handle
        check(self._draft(*handles, ctypes.byref(arguments)))
        return token_ids
