"""Verifying drafts: the rows of a chunk with drafts are sampled, and count as long as the drafts before were right.

A row is sampled as if it came alone: its token depends on its number, its logits and its sequence's parameters. Only
penalties look at the tokens before. So if a sequence with drafts has any, rows are sampled in rounds: round j samples
the (j + 1)-th new token of each sequence whose first j drafts were right, and no token is counted that does not come.
The rows of a round lie side by side. The host looks at what was chosen: this is for devices that it need not wait for.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListLike

import torch
from torch import Tensor

from engine.planning.step import Plan
from engine.sampling.sampler import has_penalties

Choose = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""(logits [R, vocab], slots [R], numbers [R], masks [R, words]) -> token ids [R], log probabilities [R]."""


class Verification:
    """The rows of a step with drafts, and how they are sampled.

    Attributes:
        rows: [R] int32, of the step's tokens: those whose logits are wanted. Round 0 has one row for every chunk.
        order: [R] the chunk of each row, and how many of its drafts come before.
        token_ids: [R] int32, what was chosen for each row; -1 where nothing was.
        logprobs: [R] float32, theirs.
    """

    token_ids: Tensor
    logprobs: Tensor

    def __init__(self, plan: Plan) -> None:
        self._drafts = [chunk.drafts for chunk in plan.chunks]
        self._in_rounds = any(
            chunk.drafts and has_penalties(chunk.sequence.request.sampling) for chunk in plan.chunks
        )
        places = list(range(len(plan.chunks)))
        self._rounds = []
        """By round: the places of its chunks."""
        while places:
            self._rounds.append(places)
            places = [i for i in places if len(self._drafts[i]) >= len(self._rounds)]
        first, before, end = [], [], 0
        for chunk in plan.chunks:
            end += chunk.num_tokens
            known = chunk.num_tokens - len(chunk.drafts)
            first.append(end - 1 - len(chunk.drafts))
            before.append(chunk.start + known - chunk.sequence.num_prompt_tokens)
        self.order = [(i, number) for number, places in enumerate(self._rounds) for i in places]
        self._places = [i for i, _ in self.order]
        rows, numbers = [first[i] + n for i, n in self.order], [before[i] + n for i, n in self.order]
        self.rows, self._numbers = torch.tensor([rows, numbers], dtype=torch.int32)

    def run(
        self, logits: Tensor, slots: ListLike[int], choose: Choose, masks: Tensor | None
    ) -> list[list[int]]:
        """Samples the rows.

        Args:
            logits: [R, vocab], of `rows`.
            slots: by chunk; -1 for one that does not sample.
            masks: [R, words], of `rows`.

        Returns:
            By chunk, its rows of logits that brought a token; one of a sampling chunk at least, whose token is -1 if
            there is none.
        """
        alive, brought = list(slots), [list[int]() for _ in slots]
        if self._in_rounds:
            self.token_ids, self.logprobs = (
                torch.full_like(self.rows, -1),
                torch.full(self.rows.shape, torch.nan),
            )
            chosen = [-1] * len(self._places)
        else:
            asked = torch.tensor([slots[i] for i in self._places], dtype=torch.int32)
            self.token_ids, self.logprobs = choose(logits, asked, self._numbers, masks)
            chosen = self.token_ids.tolist()
        start = 0
        for number, places in enumerate(self._rounds):
            rows = slice(start, start + len(places))
            if self._in_rounds:
                asked = torch.tensor([alive[i] for i in places], dtype=torch.int32)
                its_masks = None if masks is None else masks[rows]
                found = choose(logits[rows], asked, self._numbers[rows], its_masks)
                self.token_ids[rows], self.logprobs[rows] = found
                chosen[rows] = found[0].tolist()
            for row, (i, token_id) in enumerate(zip(places, chosen[rows], strict=True), start):
                if alive[i] < 0:
                    continue
                if token_id >= 0 or not number:
                    brought[i].append(row)
                if number >= len(self._drafts[i]) or token_id != self._drafts[i][number]:
                    alive[i] = -1
            start = rows.stop
            if max(alive) < 0:
                break
        return brought
