"""The rule of sampling where ranks have parts of the vocabulary, all of them in one process."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine.sampling.tables import Choose, Filters, Part, SamplingTables


def in_parts(choose: Choose, num_parts: int) -> Choose:
    """Chooses as so many ranks do, one after the other, or fewer if there are not as many tokens.

    Padding has logits that would win if anything looked at them. All ranks must choose and count the same.
    """

    def together(
        logits: Tensor,
        tables: SamplingTables,
        seats: Tensor,
        numbers: Tensor,
        filters: Filters,
        masks: Tensor | None = None,
        part: Part | None = None,
    ) -> Tensor:
        assert part is None
        assert not filters.need_whole_rows
        width = -(-tables.vocab_size // num_parts)
        before, given = tables.counts.clone(), list[Tensor]()

        def run(first: int, others: Tensor | None) -> tuple[Tensor, Tensor]:
            def gather(own: Tensor) -> Tensor:
                given.append(own.clone())
                return own if others is None else others

            tables.counts.copy_(before)
            rows = logits.new_full((len(logits), width), torch.inf)
            real = logits[:, first : first + width]
            rows[:, : real.shape[1]] = real
            token_ids = choose(rows, tables, seats, numbers, filters, masks, Part(first, gather))
            return token_ids, tables.counts.clone()

        firsts = range(0, tables.vocab_size, width)
        for first in firsts:
            run(first, None)
        assert len({own.shape for own in given}) == 1, "each rank gives as much"
        everything = torch.cat(given, 1)
        (token_ids, counts), *others = [run(first, everything) for first in firsts]
        for of_rank, its_counts in others:
            assert of_rank.equal(token_ids)
            assert its_counts.equal(counts)
        return token_ids

    return together
