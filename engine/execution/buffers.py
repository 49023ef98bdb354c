"""The memory that graphs share with each other and with the host: it stays where it is as long as the model runs."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine.execution.seats import Placed, StepShape
from penstock.engine.execution.uploads import cut, part_starts
from penstock.engine.execution.verification import SampledRows
from penstock.engine.kernels.sequence_table import StepTokens


class StepBuffers:
    """The memory that a captured step reads and writes.

    Attributes:
        sample_seats: [num_rows] int32: the seats of the rows that tokens are chosen from; of a decode step, all seats.
        sample_rows: [num_rows] int32: of a step that verifies drafts, see Verification.
        numbers: [num_rows] int32, see StepInputs.
        logits: [num_rows, num_logits]
        hidden: [max_tokens, hidden_size]: what a stage gets of the one before, and what it makes for the next.
        token_ids: [num_rows] int32: the chosen tokens.
    """

    def __init__(
        self,
        num_rows: int,
        max_tokens: int,
        num_logits: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        hidden_size: int = 0,
    ) -> None:
        """
        Args:
            num_rows: of logits in a step, which has no more sequences than that.
            num_logits: of a row, as the output head makes them; 0 without one.
            hidden_size: of a stage; 0 for a whole model.
        """
        self.sample_seats = torch.full((num_rows,), -1, dtype=torch.int32, device=device)
        self.sample_rows = torch.zeros_like(self.sample_seats)
        self.numbers = torch.zeros_like(self.sample_seats)
        self.logits = torch.zeros(num_rows, num_logits, dtype=dtype, device=device)
        self.hidden = torch.zeros(max_tokens if hidden_size else 0, hidden_size, dtype=dtype, device=device)
        self.token_ids = torch.zeros_like(self.sample_seats)
        num_words = part_starts([num_rows, num_rows + 1, max_tokens])[-1]
        self._step = torch.zeros(num_words, dtype=torch.int32, device=device)
        """The seats, starts and token ids of a mixed step, one after another."""
        self._shown: Tensor | None = None
        """The tensor whose content `sample_seats` has."""

    @property
    def made(self) -> Tensor:
        """The memory for what a pass makes: logits, or hidden states in a stage before the last."""
        return self.logits if self.logits.shape[1] else self.hidden

    def step_tokens(self, shape: StepShape, num_blocks: int) -> StepTokens:
        """The part of the memory in which a mixed step of that shape lies."""
        sizes = [shape.num_sequences, shape.num_sequences + 1, shape.num_tokens]
        seats, starts, token_ids = cut(self._step, sizes)
        return StepTokens(seats, starts, token_ids, num_blocks, shape.max_query_len)

    def show(self, shape: StepShape, placed: Placed, sampled: SampledRows | None) -> None:
        """Copies a step's inputs to where the graphs of its shape read them; a decode step like the last is there."""
        if not shape.is_decode:
            own, sent = self.step_tokens(shape, 0), placed.tokens
            own.seats.copy_(sent.seats)
            own.query_starts.copy_(sent.query_starts)
            own.token_ids.copy_(sent.token_ids)
        if sampled is not None:
            self.sample_rows[: shape.num_rows].copy_(sampled.rows)
            self.numbers[: shape.num_rows].copy_(sampled.numbers)
        else:
            self.show_seats(placed.sample_seats)

    def show_seats(self, seats: Tensor) -> None:
        """Copies the seats of rows to where the graphs that choose their tokens read them."""
        if self._shown is not seats:
            self.sample_seats[: seats.numel()].copy_(seats)
            self._shown = seats
