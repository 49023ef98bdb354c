"""Verifying drafts: the rows of a chunk with drafts are sampled, and count as long as the drafts before were right.

A row is sampled as if it came alone: its token depends on its number, its logits and its sequence's parameters. Only
penalties look at the tokens before. So if a sequence with drafts has any, rows are sampled in rounds: round j samples
the (j + 1)-th new token of each sequence whose first j drafts were right, and no token is counted that does not come.
All of it is in the order of the device's queue, and nothing waits for the device. It counts the right drafts, too, and
takes the wrong ones back in the table of sequences, so that the next step may follow before the host knows.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListLike
from itertools import accumulate
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engine.execution.uploads import send_apart
from penstock.engine.kernels.sequence_table import SequenceTable
from penstock.engine.planning.step import StepPlan
from penstock.engine.sampling.sampler import has_penalties

ChooseRows = Callable[[Tensor], Tensor]
"""Seats [R] int32, -1 for rows that are not to be sampled -> token ids [R] int32."""


class SampledRows(Protocol):
    """The rows of a step that are sampled where they are not the last one of each sequence."""

    order: list[tuple[int, int]]
    rows_of: list[list[int]]
    rows: Tensor
    seats: Tensor
    numbers: Tensor
    """All as in Verification."""

    def run(self, choose: ChooseRows) -> Tensor:
        """Samples the rows: token ids [R] int32, -1 where nothing was chosen."""

    def settle(self, table: SequenceTable, token_ids: Tensor) -> None:
        """Leaves in the table what is so: its lengths suppose that all drafts are right.

        Args:
            token_ids: [R] int32, of the rows.
        """


class Verification:
    """The rows of a step with drafts, and how they are sampled. R is at least the number of rows; further ones pad.

    Attributes:
        order: [R] the chunk of each row, and the number of its drafts that come before.
        rows_of: by chunk, its rows among the R.
        rows: [R] int32, the step's tokens whose logits are wanted.
        seats: [R] int32; -1 for padding, and for a chunk that does not sample.
        numbers: [R] int32, the output tokens that there are before what a row chooses.
        wrong: [S] int32, by chunk that samples, its wrong drafts; known once the rows are sampled.
    """

    wrong: Tensor

    def __init__(self, plan: StepPlan, seats: ListLike[int], num_rows: int, table: SequenceTable) -> None:
        """
        Args:
            seats: by chunk.
            num_rows: R.
            table: has all of the sequences but this step.
        """
        chunks, device = plan.chunks, table.words.device
        self.order: list[tuple[int, int]] = []
        self.rows_of: list[list[int]] = []
        rows, seats_of_rows, counts = list[int](), list[int](), list[int]()
        drafts, before, end = list[int](), list[int](), 0
        for i, (chunk, seat) in enumerate(zip(chunks, seats, strict=True)):
            num_drafts, end = len(chunk.drafts), end + chunk.num_tokens
            first, first_row = len(self.order), end - 1 - num_drafts
            its_rows = range(first, first + num_drafts + 1)
            self.rows_of.append(list(its_rows))
            self.order += [(i, n) for n in range(num_drafts + 1)]
            rows += range(first_row, end)
            seats_of_rows += [seat if chunk.samples else -1] * len(its_rows)
            counts += range(chunk.num_tokens - num_drafts, chunk.num_tokens + 1)
            drafts += [0, *chunk.drafts]
            before += [0, *its_rows[:-1]]
        padding = [0] * (num_rows - len(rows))
        self.order += [(0, 0)] * len(padding)
        self._num_rounds = 1
        if any(chunk.drafts and has_penalties(chunk.sequence.request.sampling) for chunk in chunks):
            self._num_rounds += max(len(chunk.drafts) for chunk in chunks)
        rounds = [number for _, number in self.order]
        seats_of_rows += [-1] * len(padding)
        sampling = [i for i, chunk in enumerate(chunks) if chunk.samples]
        self._most = max([len(chunk.drafts) for chunk in chunks])
        of_rows = [rows, counts, drafts, before]
        of_chunks = [
            [self.rows_of[i][0] for i in sampling],
            [seats[i] for i in sampling],
            [len(chunks[i].drafts) for i in sampling],
        ]
        parts = [*(part + padding for part in of_rows), seats_of_rows, rounds, *of_chunks]
        self.rows, counts_, self._drafts, self._before, self.seats, self._rounds, *sent = send_apart(
            parts, device
        )
        self._firsts, self._seats, self._num_drafts = sent
        self.numbers = counts_ + table.num_outputs(self.seats)

    def set_drafts(self, rows: Tensor, token_ids: Tensor) -> None:
        """Sets the drafts that only the device knows, by the rows that count if they are right."""
        self._drafts.index_copy_(0, rows, token_ids)

    def run(self, choose: ChooseRows) -> Tensor:
        """Samples the rows: token ids [R] int32, -1 where nothing was chosen."""
        if self._num_rounds == 1:
            return choose(self.seats)
        token_ids = torch.full_like(self.rows, -1)
        for number in range(self._num_rounds):
            is_due = self._rounds == number
            if number:
                is_due &= token_ids.index_select(0, self._before) == self._drafts
            token_ids = torch.where(is_due, choose(torch.where(is_due, self.seats, -1)), token_ids)
        return token_ids

    def settle(self, table: SequenceTable, token_ids: Tensor) -> None:
        """Counts the right drafts, and leaves in the table what is so: their tokens, and the one after the last.

        Args:
            token_ids: [R] int32, of the rows.
        """
        ahead = torch.arange(1, self._most + 1, device=token_ids.device)
        rows = (self._firsts[:, None] + ahead).clamp(max=len(token_ids) - 1)
        is_right = token_ids[rows - 1] == self._drafts[rows]
        is_right &= (token_ids[rows] >= 0) & (ahead <= self._num_drafts[:, None])
        num_right = is_right.int().cumprod(1).sum(1, dtype=torch.int32)
        self.wrong = self._num_drafts - num_right
        seats = self._seats.long()
        table.lengths[seats] -= self.wrong
        table.last_tokens[seats] = token_ids[self._firsts + num_right]


class RowsInFlight:
    """The rows of a draft pass that reads the tokens of a step in flight: the last that came of each sequence.

    The pass has places for as many tokens as the step may bring. Those after wrong drafts are read in vain, and written
    over by what is read next.

    Args:
        wrong: [S] int32, by chunk, the wrong drafts of the step in flight.
        num_rows: R; further rows pad.
    """

    def __init__(
        self, plan: StepPlan, seats: ListLike[int], num_rows: int, table: SequenceTable, wrong: Tensor
    ) -> None:
        chunks, padding = plan.chunks, [0] * (num_rows - len(plan.chunks))
        self.order = [(i, 0) for i in range(num_rows)]
        self.rows_of = [[i] for i in range(len(chunks))]
        lengths = [chunk.num_tokens for chunk in chunks]
        samples = [seat if chunk.samples else -1 for seat, chunk in zip(seats, chunks, strict=True)]
        ends, lengths_, self.seats = send_apart(
            [[*accumulate(lengths), *padding], lengths + padding, samples + [-1] * len(padding)],
            wrong.device,
        )
        self._wrong = F.pad(wrong, (0, len(padding)))
        self.rows = (ends - 1 - self._wrong).clamp(min=0)
        self.numbers = lengths_ - self._wrong + table.num_outputs(self.seats)

    def run(self, choose: ChooseRows) -> Tensor:
        return choose(self.seats)

    def settle(self, table: SequenceTable, token_ids: Tensor) -> None:  # noqa: ARG002
        table.lengths.index_add_(0, self.seats.long() % table.num_rows, -self._wrong)
