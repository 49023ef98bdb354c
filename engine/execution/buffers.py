"""The memory that graphs share with each other and with the host: it stays where it is as long as the model runs."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.execution.seats import Placed, StepShape
from engine.execution.uploads import part_starts
from engine.kernels.sequence_table import StepTokens


class StepBuffers:
    """What a captured step reads and writes.

    Attributes:
        sample_slots: [num_slots] int32: the slots of the rows that tokens are chosen from; of a decode step, all slots.
        numbers: [num_slots] int32, see StepInputs.
        logits: [num_slots, vocab]
        token_ids, logprobs: [num_slots] what was chosen.
    """

    def __init__(
        self, num_slots: int, max_tokens: int, vocab_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.sample_slots = torch.full((num_slots,), -1, dtype=torch.int32, device=device)
        self.numbers = torch.zeros_like(self.sample_slots)
        self.logits = torch.zeros(num_slots, vocab_size, dtype=dtype, device=device)
        self.token_ids = torch.zeros_like(self.sample_slots)
        self.logprobs = torch.zeros(num_slots, dtype=torch.float32, device=device)
        num_words = part_starts([num_slots, num_slots + 1, max_tokens])[-1]
        self._step = torch.zeros(num_words, dtype=torch.int32, device=device)
        """The slots, starts and token ids of a mixed step, one after another."""
        self._shown: Tensor | None = None
        """The slots of a decode step that `sample_slots` holds."""

    def step_tokens(self, shape: StepShape, num_blocks: int) -> StepTokens:
        """Where a mixed step of that shape lies."""
        sizes = [shape.num_sequences, shape.num_sequences + 1, shape.num_tokens]
        slots, starts, token_ids = (
            self._step[start : start + size] for start, size in zip(part_starts(sizes), sizes, strict=False)
        )
        return StepTokens(slots, starts, token_ids, num_blocks, shape.max_query_len)

    def show(self, shape: StepShape, placed: Placed) -> None:
        """Copies a step's inputs to where the graphs of its shape read them; a decode step like the last is there."""
        if not shape.is_decode:
            own, sent = self.step_tokens(shape, 0), placed.tokens
            own.slots.copy_(sent.slots)
            own.query_starts.copy_(sent.query_starts)
            own.token_ids.copy_(sent.token_ids)
        if self._shown is not placed.sample_slots:
            self.sample_slots[: shape.num_rows].copy_(placed.sample_slots)
            self._shown = placed.sample_slots
