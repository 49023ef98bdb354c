"""Verifying drafts: the rows of a chunk with drafts are sampled, and count as long as the drafts before were right.

A row is sampled as if it came alone: its token depends on its number, its logits and its sequence's parameters. Only
penalties look at the tokens before. So if a sequence with drafts has any, rows are sampled in rounds: round j samples
the (j + 1)-th new token of each sequence whose first j drafts were right, and no token is counted that does not come.
All of it is in the order of the device's queue, and nothing waits for the device: which rows count is found when the
step has landed.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListLike

import torch
from torch import Tensor

from penstock.engine.execution.uploads import send_apart
from penstock.engine.planning.step import StepPlan
from penstock.engine.sampling.sampler import has_penalties

ChooseRows = Callable[[Tensor], Tensor]
"""Seats [R] int32, -1 for rows that are not to be sampled -> token ids [R] int32."""


class Verification:
    """The rows of a step with drafts, and how they are sampled. R is at least the number of rows; further ones pad.

    Attributes:
        order: [R] the chunk of each row, and the number of its drafts that come before.
        rows_of: by chunk, its rows among the R.
        rows: [R] int32, the step's tokens whose logits are wanted.
        seats: [R] int32; -1 for padding, and for a chunk that does not sample.
        numbers: [R] int32, the output tokens that there are before what a row chooses.
    """

    def __init__(self, plan: StepPlan, seats: ListLike[int], num_rows: int, device: torch.device) -> None:
        """
        Args:
            seats: by chunk.
            num_rows: R.
        """
        chunks = plan.chunks
        self.order: list[tuple[int, int]] = []
        self.rows_of: list[list[int]] = []
        rows, seats_of_rows, numbers = list[int](), list[int](), list[int]()
        drafts, before, end = list[int](), list[int](), 0
        for i, (chunk, seat) in enumerate(zip(chunks, seats, strict=True)):
            num_drafts, end = len(chunk.drafts), end + chunk.num_tokens
            first, first_row = len(self.order), end - 1 - num_drafts
            number = chunk.start + chunk.num_tokens - num_drafts - chunk.sequence.num_prompt_tokens
            its_rows = range(first, first + num_drafts + 1)
            self.rows_of.append(list(its_rows))
            self.order += [(i, n) for n in range(num_drafts + 1)]
            rows += range(first_row, end)
            seats_of_rows += [seat if chunk.samples else -1] * len(its_rows)
            numbers += range(number, number + len(its_rows))
            drafts += [0, *chunk.drafts]
            before += [0, *its_rows[:-1]]
        padding = [0] * (num_rows - len(rows))
        self.order += [(0, 0)] * len(padding)
        self._num_rounds = 1
        if any(chunk.drafts and has_penalties(chunk.sequence.request.sampling) for chunk in chunks):
            self._num_rounds += max(len(chunk.drafts) for chunk in chunks)
        rounds = [number for _, number in self.order]
        seats_of_rows += [-1] * len(padding)
        self.rows, self.seats, self.numbers, self._rounds, self._drafts, self._before = send_apart(
            [rows + padding, seats_of_rows, numbers + padding, rounds, drafts + padding, before + padding],
            device,
        )

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
