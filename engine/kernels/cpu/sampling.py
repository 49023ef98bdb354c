"""Choosing tokens, and telling the most likely ones, with the native kernels."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from penstock.engine.kernels.cpu.library import Team, check, created, expect_ints, float32, freed_with
from penstock.engine.kernels.cpu.structs import ChooseArgs, LikelyArgs
from penstock.engine.sampling.reference import choose_among
from penstock.engine.sampling.tables import Filters, Part, SamplingTables, num_words


class NativeChoose:
    """Implements `engine.sampling.tables.Choose` on the threads of a team.

    Calls must come from one thread at a time.
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self._tables: SamplingTables | None = None
        self._arguments = ChooseArgs()
        library = team.library
        self.handle = created(library.call("penstock_chooser_new", team.handle))
        freed_with(self, library, "penstock_chooser_free", self.handle)
        self._choose = library.function("penstock_choose")

    def __call__(
        self,
        logits: Tensor,
        tables: SamplingTables,
        seats: Tensor,
        numbers: Tensor,
        filters: Filters,
        masks: Tensor | None = None,
        part: Part | None = None,
    ) -> Tensor:
        """Chooses a token for each row of logits; see `engine.sampling.reference.choose`.

        Raises:
            ValueError: tensors that do not fit each other, or a seat that does not exist.
        """
        arguments = self.arguments_of(tables)
        num_rows, first = logits.shape[0], 0
        if part is not None:
            first = part.first
            logits = logits[:, : tables.vocab_size - first]
        elif logits.shape != (num_rows, tables.vocab_size):
            raise ValueError(f"logits {(num_rows, tables.vocab_size)} expected, not {tuple(logits.shape)}")
        logits = float32(logits)
        expect_ints("seats", seats, (num_rows,))
        expect_ints("numbers", numbers, (num_rows,))
        if masks is not None:
            expect_ints("masks", masks, (num_rows, num_words(tables.vocab_size)))
        token_ids = torch.empty(num_rows, dtype=torch.int32)
        arguments.logits = logits.data_ptr()
        arguments.seats, arguments.numbers = seats.data_ptr(), numbers.data_ptr()
        arguments.token_ids = token_ids.data_ptr()
        arguments.masks = None if masks is None else masks.data_ptr()
        arguments.num_rows, arguments.first, arguments.num_logits = num_rows, first, logits.shape[1]
        arguments.top_k, arguments.top_p = filters.top_k, filters.top_p
        if part is None:
            arguments.candidates = None
            check(self._choose(self.handle, ctypes.byref(arguments)))
            return token_ids
        candidates = torch.empty((num_rows, 3), dtype=torch.int32)
        arguments.candidates = candidates.data_ptr()
        check(self._choose(self.handle, ctypes.byref(arguments)))
        return choose_among(part.gather(candidates), tables, seats)

    def arguments_of(self, tables: SamplingTables) -> ChooseArgs:
        """The arguments of a call for whole rows, with the addresses of the tables; the rows are missing."""
        if tables is not self._tables:
            self._read(tables)
        return self._arguments

    def _read(self, tables: SamplingTables) -> None:
        """Keeps the addresses of the tables, which stay where they are as long as the tables live."""
        arguments = self._arguments
        arguments.table, arguments.biases = tables.rows.data_ptr(), tables.biases.data_ptr()
        arguments.counts, arguments.num_counts = tables.counts.data_ptr(), tables.counts.shape[0]
        arguments.num_seats, arguments.max_biases = tables.biases.shape[:2]
        arguments.vocab = arguments.num_logits = tables.vocab_size
        self._tables = tables


class NativeMostLikely:
    """Implements `engine.sampling.tables.MostLikely` on the threads of a team; of equals the lowest id is first."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._likely = team.library.function("penstock_likely")

    def __call__(self, logits: Tensor, rows: Tensor, num: int) -> tuple[Tensor, Tensor, Tensor]:
        """Finds the most likely tokens of rows of logits; see `engine.sampling.reference.most_likely`.

        Raises:
            ValueError: a row that does not exist.
        """
        (num_rows,), (num_logits, vocab) = rows.shape, logits.shape
        expect_ints("rows", rows, (num_rows,))
        if num_rows and not 0 <= int(rows.min()) <= int(rows.max()) < num_logits:
            raise ValueError(f"rows are not among {num_logits} rows of logits")
        logits, num = float32(logits), min(num, vocab)
        norms, logprobs = torch.empty((num_rows, 2)), torch.empty((num_rows, num))
        token_ids = torch.empty((num_rows, num), dtype=torch.int32)
        given = (tensor.data_ptr() for tensor in (logits, rows, norms, token_ids, logprobs))
        check(self._likely(self._team.handle, ctypes.byref(LikelyArgs(*given, num_rows, vocab, num))))
        return norms, token_ids, logprobs
