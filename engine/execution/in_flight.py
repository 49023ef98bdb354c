"""Tokens in flight: what a step brings is read by the passes of a draft model before the host knows it."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as ListLike
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engine.execution.uploads import send_apart
from penstock.engine.execution.verification import RowsInFlight, SampledRows, Verification
from penstock.engine.kernels.sequence_table import SequenceTable
from penstock.engine.planning.request import Sequence
from penstock.engine.planning.step import StepPlan


class TokensInFlight:
    """The tokens of a step that was launched last, by sequence.

    Args:
        token_ids: [R] int32, of the step's rows; the next choice of tokens may write over them.
        sampled: the rows; None if each sequence has one.
    """

    def __init__(self, plan: StepPlan, token_ids: Tensor, sampled: SampledRows | None) -> None:
        self._plan, self._token_ids, self._sampled = plan, token_ids, sampled

    @cached_property
    def _rows(self) -> Mapping[Sequence, ListLike[int]]:
        """The rows of each sequence that is sampled: one, and one for each of its drafts."""
        chunks, sampled = self._plan.chunks, self._sampled
        return {
            chunk.sequence: (place,) if sampled is None else sampled.rows_of[place]
            for place, chunk in enumerate(chunks)
            if chunk.samples
        }

    def _wrong(self, sequences: ListLike[Sequence]) -> Tensor:
        """[n] int32: how many drafts of these sequences were wrong; 0 of a sequence that has none here."""
        device = self._token_ids.device
        if not isinstance(self._sampled, Verification):
            return torch.zeros(len(sequences), dtype=torch.int32, device=device)
        places = {sequence: place for place, sequence in enumerate(self._rows)}
        (wanted,) = send_apart([[places.get(sequence, len(places)) for sequence in sequences]], device)
        return F.pad(self._sampled.wrong, (0, 1)).index_select(0, wanted)

    def put(
        self,
        plan: StepPlan,
        step_tokens: Tensor,
        seats: ListLike[int],
        num_rows: int,
        table: SequenceTable,
    ) -> RowsInFlight:
        """Puts the tokens where a pass reads them, at the end of each chunk that samples.

        Args:
            plan: the pass; chunks of sequences in flight end with as many tokens as these may bring.
            step_tokens: [T] int32, the tokens of the pass.
            num_rows: of the pass, padding included.
        """
        rows_of, sources, targets, end = self._rows, list[int](), list[int](), 0
        for chunk in plan.chunks:
            end += chunk.num_tokens
            if chunk.samples and chunk.sequence in rows_of:
                rows = rows_of[chunk.sequence]
                sources += rows
                targets += range(end - len(rows), end)
        sources_, targets_ = send_apart([sources, targets], step_tokens.device)
        token_ids = self._token_ids.index_select(0, sources_).clamp(min=0)
        step_tokens.index_copy_(0, targets_.long(), token_ids)
        wrong = self._wrong([chunk.sequence for chunk in plan.chunks])
        return RowsInFlight(plan, seats, num_rows, table, wrong)
