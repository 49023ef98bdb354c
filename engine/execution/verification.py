"""Verifying drafts: the rows of a chunk with drafts are sampled in turn, as long as the drafts before were right.

Round j samples the (j + 1)-th new token of each sequence whose first j drafts were right. So a sequence's penalties
know all tokens before, and no token is counted that does not come. The rows of a round lie side by side. Between rounds
the host looks at what was chosen: this is for devices that it need not wait for.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListLike

import torch
from torch import Tensor

from engine.planning.step import Plan

Choose = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(logits [R, vocab], slots [R], numbers [R]) -> token ids [R], log probabilities [R]."""


class Verification:
    """The rows of a step with drafts, and how they are sampled.

    Attributes:
        rows: [R] int32, of the step's tokens: those whose logits are wanted. Round 0 has one row for every chunk.
    """

    def __init__(self, plan: Plan) -> None:
        self._chunks = plan.chunks
        self._rounds = [list(range(len(plan.chunks)))]
        """By round: the places of its chunks."""
        longest = max(len(chunk.drafts) for chunk in plan.chunks)
        for number in range(1, longest + 1):
            self._rounds.append([i for i in self._rounds[-1] if len(plan.chunks[i].drafts) >= number])
        first, end = [], 0
        for chunk in plan.chunks:
            end += chunk.num_tokens
            first.append(end - 1 - len(chunk.drafts))
        rows = [first[i] + number for number, places in enumerate(self._rounds) for i in places]
        self.rows = torch.tensor(rows, dtype=torch.int32)
        self.num_drafts = torch.tensor([len(chunk.drafts) for chunk in plan.chunks], dtype=torch.int32)
        self.token_ids: Tensor
        """[R] int32: what was chosen for each row, -1 where nothing was."""
        self.logprobs: Tensor
        """[R] float32: theirs."""

    def run(self, logits: Tensor, numbers: Tensor, slots: ListLike[int], choose: Choose) -> list[list[int]]:
        """Samples round after round.

        Args:
            logits: [R, vocab], of `rows`.
            numbers: [S] int32, the output tokens before the first row of each chunk.
            slots: by chunk; -1 for one that does not sample.

        Returns:
            By chunk, its rows of logits that brought a token; one of a sampling chunk at least, whose token is -1 if
            there is none.
        """
        alive, brought = list(slots), [list[int]() for _ in slots]
        self.token_ids = torch.full((len(self.rows),), -1, dtype=torch.int32)
        self.logprobs = torch.full((len(self.rows),), torch.nan)
        start = 0
        for number, places in enumerate(self._rounds):
            rows = slice(start, start + len(places))
            asked = torch.tensor([alive[i] for i in places], dtype=torch.int32)
            if number and not (asked >= 0).any():
                break
            token_ids, logprobs = choose(logits[rows], asked, numbers[places] + number)
            self.token_ids[rows], self.logprobs[rows] = token_ids, logprobs
            for row, (i, token_id) in enumerate(zip(places, token_ids.tolist(), strict=True), start):
                if alive[i] < 0:
                    continue
                if token_id >= 0 or not number:
                    brought[i].append(row)
                drafts = self._chunks[i].drafts
                if number >= len(drafts) or token_id != drafts[number]:
                    alive[i] = -1
            start = rows.stop
        return brought
