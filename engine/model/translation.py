"""A draft model of another vocabulary as one of its target's tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engine.kernels.linear import Linear, chained
from penstock.engine.model.drafts import SharedTokens
from penstock.engine.program.decoders import ForwardPass

VERY_UNLIKELY = -1e30
"""The logit of a token that is never drafted."""


@dataclass(frozen=True, slots=True)
class Translation:
    """Makes a draft model of another vocabulary, or of logits of another number, one of its target's tokens."""

    context: Tensor
    """[vocab] int32: by token of the target, the one that the draft model reads."""
    columns: Tensor
    """[vocab] int64: by token of the target, its logit among the draft model's; one past the last if there is none."""

    @classmethod
    def of(cls, tokens: SharedTokens | None, vocab: int, num_logits: int) -> Translation:
        """Without shared tokens, all are the same; the surplus of one of the two is rows of padding."""
        same = torch.arange(vocab)
        context = same
        if tokens is not None:
            num = min(vocab, len(tokens.same))
            same, context = torch.full((vocab,), num_logits), torch.zeros(vocab, dtype=torch.int64)
            same[:num] = torch.tensor(tokens.same)[:num]
            context[:num] = torch.tensor(tokens.context)[:num]
        is_there = (same >= 0) & (same < num_logits)
        is_known = context < num_logits  # a row of padding is never read
        return cls(torch.where(is_known, context, 0).int(), torch.where(is_there, same, num_logits))

    def to(self, device: torch.device) -> Translation:
        return Translation(self.context.to(device), self.columns.to(device))

    def decoder(self, decoder: ForwardPass) -> ForwardPass:
        """The decoder over batches of the target's tokens."""
        return lambda batch: decoder(replace(batch, token_ids=self.context[batch.token_ids.long()]))

    def head(self, head: Linear) -> Linear:
        """The output head with a logit for each of the target's tokens."""
        return spread(head, self.columns)


def spread(head: Linear, columns: Tensor) -> Linear:
    """An output head with a logit for each token, given its number among the head's own; one past the last is none."""
    return chained(head, lambda x: F.pad(x, (0, 1), value=VERY_UNLIKELY).index_select(1, columns))


def columns_of(drafted: Tensor, vocab: int) -> Tensor:
    """[vocab] int64: by token, the number of its logit, for a head with logits of the tokens `drafted` alone."""
    num = len(drafted)
    columns = torch.full((vocab,), num, device=drafted.device)
    columns[drafted.long()] = torch.arange(num, device=drafted.device)
    return columns
