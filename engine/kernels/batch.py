"""The tensors of one step, as every decoder implementation takes them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True)
class Batch:
    """S sequences with T tokens between them; all tensors contiguous, on the model's device, and int32 but for
    hidden states."""

    token_ids: Tensor
    """[T]"""
    positions: Tensor
    """[T] the place of each token among those of its sequence that were not dropped; -1 for rows that pad the batch."""
    query_starts: Tensor
    """[S + 1] sequence s has the tokens query_starts[s] to query_starts[s + 1]."""
    context_lens: Tensor
    """[S] tokens of KV that exist once this step has written its own: place of the last one + 1."""
    block_tables: Tensor
    """[S, max blocks] block of token p of sequence s: block_tables[s, p // block_size]; unused entries are 0."""
    sample_rows: Tensor
    """[R] the rows of the T tokens whose hidden states are wanted."""
    rotary_positions: Tensor | None = field(default=None, kw_only=True)
    """[T] the position of each token in its text, by which it is rotated, where tokens of a sequence may have been
    dropped; None stands for `positions`."""
    state_slots: Tensor | None = field(default=None, kw_only=True)
    """[S, 4] of each sequence, where layers have a state: its source, its target, replayed, certain.

    Source and target are slots of the `StateCache`. The state is read from the source, and the first `replayed` of the
    rows that are pending there are applied to it. The first `certain` rows of the step cannot turn out wrong: the state
    after them is written to the target, and the others become its pending rows. A source of 0 is the state before the
    first token, and a target of 0 is not written. None stands for zeros throughout.
    """
    state_saves: Tensor | None = field(default=None, kw_only=True)
    """[N, 4] sequence, rows, slot, kept: the state after so many of the sequence's certain rows of this step is written
    to this slot, too, and the `kept` rows that follow become its pending rows."""
    hidden: Tensor | None = field(default=None, kw_only=True)
    """[T, hidden], in the type of activations: what the stage before made of the tokens, where the layers are a stage
    after the first."""
    max_query_len: int | None = field(default=None, kw_only=True)
    """No sequence has more tokens than this in the step; None if the batch's maker did not count."""
    min_query_len: int = field(default=0, kw_only=True)
    """Every sequence of the step has at least so many tokens, and every row is a sequence's; 0 if that is not known."""

    rows_by_rank: tuple[int, ...] = field(default=(), kw_only=True)
    """The tokens that each rank brings to the experts, where each has sequences of its own; if nothing is said, all
    bring as many."""

    @property
    def rotated_by(self) -> Tensor:
        """[T] the position of each token in its text."""
        return self.positions if self.rotary_positions is None else self.rotary_positions

    def tables(self, num: int) -> Tensor:
        """[num, S, max blocks / num]: the `num` tables of each sequence that lie in `block_tables`, entry by entry."""
        if num == 1:
            return self.block_tables[None]
        return self.block_tables.view(self.block_tables.shape[0], -1, num).permute(2, 0, 1).contiguous()

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device; itself if it is there already."""
        if self.token_ids.device == device:
            return self
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return replace(self, **moved)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the batch by name."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in values if isinstance(value, Tensor)}


def blank_batch(num_tokens: list[int], contexts: list[int], block_tables: Tensor) -> Batch:
    """A batch of token 0: sequence i has the last num_tokens[i] of its contexts[i] tokens in the step, and samples."""
    counts, ends = torch.tensor(num_tokens, dtype=torch.int32), torch.tensor(contexts, dtype=torch.int32)
    starts = torch.cat((torch.zeros(1, dtype=torch.int32), counts.cumsum(0, dtype=torch.int32)))
    rows = torch.arange(int(starts[-1]), dtype=torch.int32)
    return Batch(
        token_ids=torch.zeros_like(rows),
        positions=rows + (ends - starts[1:]).repeat_interleave(counts),
        query_starts=starts,
        context_lens=ends,
        block_tables=block_tables,
        sample_rows=starts[1:] - 1,
        max_query_len=max(num_tokens),
    )
