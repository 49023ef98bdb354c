"""Scoring: the log probabilities of prompt tokens, each by the logits of the token before it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.kernels.batch import Batch
from engine.planning.step import Plan


@dataclass(frozen=True, slots=True)
class Scored:
    """What was found of N prompt tokens, on the device."""

    chunks: ListLike[tuple[int, int]]
    """By chunk that scores any: how many tokens, and how many of the most likely ones are wanted at each."""
    tensors: ListLike[Tensor]
    """[N] float32 log probabilities; if any are wanted, [N, k] ids and log probabilities of the most likely tokens."""


class Scoring:
    """The rows of one step whose logits score the tokens that follow them.

    Logits are made of as many rows at a time as there is memory for, and what is wanted of them is taken at once.
    """

    def __init__(
        self, rows: list[int], targets: list[int], chunks: list[tuple[int, int]], num_logits: int
    ) -> None:
        self._sent = torch.tensor([rows, targets], dtype=torch.int32)
        self._chunks = chunks
        self._num_logits = num_logits

    @classmethod
    def of(cls, plan: Plan, num_logits: int) -> Scoring | None:
        """None if no chunk scores any; `num_logits` are the rows of logits that there is memory for."""
        rows, targets, chunks, first = list[int](), list[int](), list[tuple[int, int]](), 0
        for chunk in plan.chunks:
            scored, sequence = chunk.scored, chunk.sequence
            if scored:
                rows += range(first, first + len(scored))
                targets += sequence.token_ids[scored.start : scored.stop]
                chunks.append((len(scored), sequence.request.sampling.num_prompt_logprobs or 0))
            first += chunk.num_tokens
        return cls(rows, targets, chunks, num_logits) if chunks else None

    def run(
        self, decoder: Callable[[Batch], Tensor], lm_head: Callable[[Tensor], Tensor], batch: Batch
    ) -> tuple[Tensor, Scored]:
        """Launches the pass: the hidden states of the batch's own sample rows, and what was found of the tokens."""
        sent = self._sent
        if batch.token_ids.device.type == "cuda":
            sent = sent.pin_memory().to(batch.token_ids.device, non_blocking=True)
        rows, targets = sent[0], sent[1].long()
        num_own, num_top = batch.sample_rows.numel(), max(num for _, num in self._chunks)
        hidden = decoder(replace(batch, sample_rows=torch.cat((batch.sample_rows, rows))))
        parts = torch.split(hidden[num_own:], self._num_logits)
        pieces = [
            _scores(lm_head(part), its_targets, num_top)
            for part, its_targets in zip(parts, torch.split(targets, self._num_logits), strict=True)
        ]
        return hidden[:num_own], Scored(
            self._chunks, [torch.cat(found) for found in zip(*pieces, strict=True)]
        )


def _scores(logits: Tensor, targets: Tensor, num_top: int) -> tuple[Tensor, ...]:
    """The log probabilities [R] of the targets; with `num_top`, ids and log probabilities [R, k] of the best tokens."""
    logprobs = logits.float().log_softmax(-1)
    found = logprobs.gather(1, targets[:, None]).squeeze(1)
    if not num_top:
        return (found,)
    values, token_ids = logprobs.topk(min(num_top, logprobs.shape[-1]))
    return found, token_ids.to(torch.int32), values
