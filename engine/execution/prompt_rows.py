"""The results of prompts: the log probabilities of their tokens, and their hidden states pooled."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.engine.execution.loaded import LoadedModel
from penstock.engine.kernels.batch import Batch
from penstock.engine.planning.step import StepPlan
from penstock.engine.sampling.reference import logprobs_of


@dataclass(frozen=True, slots=True)
class PromptFindings:
    """The results of the prompts of one step, on the device."""

    scored: ListLike[tuple[int, int]]
    """The number of tokens that each scoring chunk scores, and of the likeliest ones that are wanted at each."""
    scores: ListLike[Tensor]
    """[N] float32 log probabilities of the N tokens scored; [N, k] int32 ids and float32 log probabilities of the most
    likely ones, best first. Empty if N is 0."""
    pooled: Tensor | None
    """[P, hidden] float32: by chunk that pools, the sum of its hidden states."""


class PromptRows:
    """The rows of one step that bring results of prompts: they score the tokens that follow them, or are pooled.

    Logits are made of as many rows at a time as there is memory for, and the wanted results are taken at once.
    """

    def __init__(self, plan: StepPlan, num_logits: int) -> None:
        self._num_logits = num_logits
        self._scored: list[tuple[int, int]] = []
        self._pooled: list[int] = []
        """The number of rows of each chunk that pools."""
        scoring, pooling, targets, first = list[int](), list[int](), list[int](), 0
        for chunk in plan.chunks:
            if scored := chunk.scored:
                scoring += range(first, first + len(scored))
                targets += chunk.sequence.token_ids[scored.start : scored.stop]
                num_top = chunk.sequence.request.sampling.num_prompt_logprobs or 0
                self._scored.append((len(scored), num_top))
            if pooled := chunk.pooled:
                pooling += range(first + pooled.start - chunk.start, first + pooled.stop - chunk.start)
                self._pooled.append(len(pooled))
            first += chunk.num_tokens
        self._num_scored = len(scoring)
        self._words = torch.tensor([*scoring, *pooling, *targets], dtype=torch.int32)

    @classmethod
    def of(cls, plan: StepPlan, num_logits: int) -> PromptRows | None:
        """The rows of a plan, with memory for `num_logits` rows of logits; None if nothing of any prompt is wanted."""
        in_prompts = (chunk for chunk in plan.chunks if chunk.start < chunk.sequence.num_prompt_tokens)
        return cls(plan, num_logits) if any(chunk.scored or chunk.pooled for chunk in in_prompts) else None

    def run(self, model: LoadedModel, batch: Batch) -> tuple[Tensor, PromptFindings]:
        """Launches the pass: the hidden states of the batch's own sample rows, and the findings of prompts."""
        words, num_own = self._words, batch.sample_rows.numel()
        if batch.token_ids.device.type == "cuda":
            words = words.pin_memory().to(batch.token_ids.device, non_blocking=True)
        num_rows = words.numel() - self._num_scored
        hidden = model.decoder(replace(batch, sample_rows=torch.cat((batch.sample_rows, words[:num_rows]))))
        scoring, pooling = hidden[num_own:].split_with_sizes([self._num_scored, num_rows - self._num_scored])
        scores = self._scores(model, scoring, words[num_rows:])
        return hidden[:num_own], PromptFindings(self._scored, scores, self._sums(pooling))

    def _scores(self, model: LoadedModel, hidden: Tensor, targets: Tensor) -> list[Tensor]:
        if not self._scored:
            return []
        parts = zip(*(torch.split(rows, self._num_logits) for rows in (hidden, targets)), strict=True)
        pieces = [self._score(model, *part) for part in parts]
        return [torch.cat(found) for found in zip(*pieces, strict=True)]

    def _score(self, model: LoadedModel, hidden: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        rows = torch.arange(len(hidden), dtype=torch.int32, device=hidden.device)
        logits, num_top = model.whole(model.lm_head(hidden)), max(num for _, num in self._scored)
        norms, *top = model.kernels.most_likely(logits, rows, num_top)
        return logprobs_of(logits, rows, targets, norms), *top

    def _sums(self, hidden: Tensor) -> Tensor | None:
        if not self._pooled:
            return None
        return torch.stack([rows.float().sum(0) for rows in hidden.split_with_sizes(self._pooled)])
