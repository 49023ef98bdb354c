"""Which tokens an implementation of the sampling rule may choose, where logarithms and exponentials are rounded."""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from penstock.engine.sampling import reference
from penstock.engine.sampling.noise import gumbel, hashes, noise_keys
from penstock.engine.sampling.sampler import Sampler
from penstock.engine.sampling.tables import Filters, SamplingTables

ULPS = 4
"""Two scores may change places if they differ by less, in units in the last place of their logit and their noise."""
SHARE = 2.0**-18
"""The tolerance of top_p: exponentials are rounded, too, so that the mass above a level may be so much more or less."""


def checked_sample(
    sampler: Sampler,
    logits: Tensor,
    seats: Tensor,
    numbers: Tensor,
    filters: Filters,
    masks: Tensor | None = None,
) -> list[int]:
    """Samples; the reference must allow the tokens, and they must have been counted."""
    tables = sampler.tables
    before = tables.counts.clone()
    token_ids = sampler.sample(logits, seats, numbers, filters, masks)
    counted = tables.counts.clone()
    tables.counts.copy_(before)
    expected = reference.choose(logits, tables, seats, numbers, filters, masks)
    tables.counts.copy_(before)
    assert token_ids.dtype == torch.int32
    assert (token_ids < 0).equal(expected < 0)
    places = token_ids.clamp(min=0).long()[:, None]
    allowed = _nearly_best(logits, tables, seats, numbers, filters, masks).gather(1, places).squeeze(1)
    assert ((token_ids == expected) | allowed).all(), (token_ids, expected)
    for seat, token_id in zip(seats.tolist(), token_ids.tolist(), strict=True):
        if seat >= 0 and token_id >= 0 and tables.column("counts_row")[seat] >= 0:
            before[seat, token_id] += 2
    assert counted.equal(before)
    tables.counts.copy_(counted)
    return token_ids.tolist()


def _nearly_best(
    logits: Tensor,
    tables: SamplingTables,
    seats: Tensor,
    numbers: Tensor,
    filters: Filters,
    masks: Tensor | None,
) -> Tensor:
    """[R, vocab] bool: tokens whose score may be the best one; none in a row without temperature, which is exact."""
    rows = reference._Rows(tables, seats, numbers)
    processed = reference._penalised(reference._biased(logits.float(), rows), rows)
    processed = reference._masked(processed, masks)
    depths = processed.amax(-1, keepdim=True) - processed
    temperature = rows.column("temperature")[:, None]
    noise = gumbel(hashes(noise_keys(rows.column("state"), numbers), logits.shape[-1]))
    scores = processed + temperature * noise
    unit = torch.finfo(torch.float32).eps
    error = ULPS * unit * (processed.abs() + temperature * noise.abs().clamp(min=1))
    allowed = torch.zeros_like(scores, dtype=torch.bool)
    for share in (1 - SHARE, 1.0, 1 + SHARE):
        kept = torch.ones_like(allowed)
        if filters.top_k or filters.top_p:
            columns = reference._Rows(_with_top_p(tables, share), seats, numbers).filters
            kept = reference.kept(depths, columns, filters)
        lowest = (scores - error).masked_fill(~kept, -torch.inf).amax(-1, keepdim=True)
        allowed |= kept & (scores + error >= lowest)
    return allowed & (temperature > 0)


def _with_top_p(tables: SamplingTables, share: float) -> SamplingTables:
    """Returns the parameters with another top_p where it is less than 1."""
    copied = copy(tables)
    copied.rows = tables.rows.clone()
    copied._by_dtype = {dtype: copied.rows.view(dtype) for dtype in tables._by_dtype}
    top_p = copied.column("top_p")
    below_one = 1 - torch.finfo(torch.float32).eps
    top_p.copy_(torch.where(top_p < 1, (top_p * share).clamp(max=below_one), top_p))
    return copied
