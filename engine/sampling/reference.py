"""The rule by which a token is chosen, in plain torch on any device: the specification of faster implementations.

For one row of logits, in this order:

1. Biases are added; a token that would end the sequence before `min_tokens` is banned (minus infinity).
2. Tokens that have appeared are penalised: repetition (a positive logit is divided by it, another multiplied), then
   frequency times the number of appearances in the output, and presence if there is one. A logit that a penalty takes
   beyond float32 becomes its largest or smallest number.
3. A token that the row's mask rules out is banned.
4. With `peak` the largest logit so far, the depth of a token is peak - logit. Depths divided by the temperature and cut
   to multiples of 2^-17 nat are its level, at most LEVELS - 1 (32 nats). Top-k keeps every token whose level is at most
   the k-th most likely token's. Top-p keeps, of the tokens that top-k kept, each level that less than top_p of the mass
   lies above; the mass of a token is exp(-depth / temperature) in units of 2^-34, cut to an integer, so that sums do
   not depend on their order. Top-k and top-p keep whole levels. Min-p keeps depths up to min_p_depth times the
   temperature, whatever their levels. Rarer filters are masks: see `sieve.py`.
5. Of the tokens kept, the one with the largest logit + temperature * noise is chosen, the lowest id where several are
   largest: the Gumbel-max trick (Gumbel, 1954; Maddison, Tarlow and Minka, "A* sampling", 2014) chooses each token with
   its probability. Temperature 0 is the argmax, and filters do not matter to it.

A row whose raw logits are not all finite, or that has every token banned, has no token.

Where ranks have parts of the vocabulary, each finds the best token of its own by rules 1 to 3 and 5, which look at one
token at a time, and the best of these candidates is the token: a few numbers are exchanged, and no logits.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from penstock.engine.sampling.noise import gumbel, hashes, noise_keys
from penstock.engine.sampling.tables import Filters, Part, SamplingTables

LEVELS = 1 << 22
LEVELS_PER_NAT = float(1 << 17)
MASS_UNIT = float(1 << 34)
LARGEST = torch.finfo(torch.float32).max


def choose(
    logits: Tensor,
    tables: SamplingTables,
    seats: Tensor,
    numbers: Tensor,
    filters: Filters,
    masks: Tensor | None = None,
    part: Part | None = None,
) -> Tensor:
    """Chooses one token for each row of logits, and counts it in its seat for the penalties of the next.

    Every row is computed for itself: its token does not depend on the rows around it. Shapes are static and nothing
    waits for the device.

    Args:
        logits: [R, vocab] float32, float16 or bfloat16, or [R, n] of a part; they are not changed.
        seats: [R] int32, -1 for padding; a seat with penalties stands there once at most.
        numbers: [R] int32, the output tokens that each seat's sequence has already.
        masks: [R, ceil(vocab / 32)] int32: bit v % 32 of word v // 32 is set if token v may be chosen. None allows all.
        part: the part of the vocabulary that the logits are for, where ranks choose together; the filters must not need
            whole rows. Tables and masks are whole. None if the logits are, too.

    Returns:
        Token ids [R] int32, -1 where there is none; the same on all ranks.
    """
    first = 0 if part is None else part.first
    rows = _Rows(tables, seats, numbers)
    raw = logits[:, : tables.vocab_size - first].float()
    values = processed(raw, tables, seats, numbers, masks, first)
    temperature = rows.column("temperature")[:, None]
    bits = hashes(noise_keys(rows.column("state"), numbers), raw.shape[-1], first)
    scores = values + temperature * gumbel(bits)
    if filters.top_k or filters.top_p:
        depths = values.amax(-1, keepdim=True) - values
        scores = scores.masked_fill(~kept(depths, rows.filters, filters), -torch.inf)
    best = scores.argmax(-1, keepdim=True)
    columns = scores.gather(1, best).view(torch.int32), best + first, ~raw.isfinite().all(-1, keepdim=True)
    candidates = torch.cat([column.to(torch.int32) for column in columns], 1)
    return choose_among(candidates if part is None else part.gather(candidates), tables, seats)


def choose_among(candidates: Tensor, tables: SamplingTables, seats: Tensor) -> Tensor:
    """Chooses the best of some candidates for each row, of equals the first, and counts it; see `choose`.

    Args:
        candidates: [R, 3 * n] int32, in the order of their token ids. A candidate is the best token of some columns:
            the bits of its float32 score, its id, and 1 if not all raw logits of these columns are finite, else 0. The
            score is minus infinity where none of the tokens is allowed.
    """
    bits, token_ids, is_bad = torch.unflatten(candidates, 1, (-1, 3)).unbind(-1)
    scores = bits.contiguous().view(torch.float32)
    best = scores.argmax(-1, keepdim=True)
    is_allowed = scores.gather(1, best).squeeze(1) > -torch.inf
    usable = (seats >= 0) & (is_bad == 0).all(-1) & is_allowed
    chosen = token_ids.gather(1, best).squeeze(1)
    _count(chosen, usable, tables, seats)
    return torch.where(usable, chosen, -1)


def processed(
    raw: Tensor,
    tables: SamplingTables,
    seats: Tensor,
    numbers: Tensor,
    masks: Tensor | None,
    first: int = 0,
) -> Tensor:
    """The float32 logits after biases, penalties and masks; arguments as in `choose`.

    Args:
        raw: [R, n], of the tokens from `first` on.
    """
    rows = _Rows(tables, seats, numbers)
    return _masked(_penalised(_biased(raw, rows, first), rows, first), masks, first)


def kept(depths: Tensor, columns: Mapping[str, Tensor], filters: Filters) -> Tensor:
    """[R, vocab] bool: the tokens that top-k, top-p and min-p keep, by their depths below the most likely token.

    Args:
        columns: [R] temperature, top_k, top_p and min_p_depth, as in `tables.ROW`.
    """
    temperature = columns["temperature"][:, None]
    temperature = torch.where(temperature > 0, temperature, 1.0)
    levels = _levels(depths, temperature)
    cuts = torch.full_like(levels[:, :1], LEVELS - 1)
    if filters.top_k:
        top_k = columns["top_k"].long()[:, None]
        kth = levels.sort(-1).values.gather(1, top_k.clamp(1, levels.shape[-1]) - 1)
        cuts = torch.where(top_k > 0, kth, cuts)
    if filters.top_p:
        top_p = columns["top_p"].double()[:, None]
        nucleus = _nucleus(levels, depths / temperature, cuts, top_p)
        cuts = torch.where(top_p < 1, torch.minimum(cuts, nucleus), cuts)
    return (levels <= cuts) & (depths <= columns["min_p_depth"][:, None] * temperature)


def most_likely(logits: Tensor, rows: Tensor, num: int) -> tuple[Tensor, Tensor, Tensor]:
    """Finds the most likely tokens of some rows of logits, and the norms of all log probabilities of a row.

    Every row is computed for itself. One that is not finite has no order, and NaN for log probabilities.

    Args:
        logits: [R, vocab]
        rows: [T] int32, of the logits.

    Returns:
        Norms [T, 2] float32, for `logprobs_of`: the largest logit, and the logarithm of the sum of exponentials below
        it. The `num` most likely tokens [T, num], or all if there are fewer, best first: int32 ids, and float32 log
        probabilities, of the untouched logits.
    """
    raw = logits.index_select(0, rows).float()
    peaks = raw.amax(-1, keepdim=True)
    below = (raw - peaks).logsumexp(-1, keepdim=True)
    values, token_ids = raw.topk(min(num, raw.shape[-1]))
    return torch.cat((peaks, below), 1), token_ids.to(torch.int32), values - peaks - below


def logprobs_of(logits: Tensor, rows: Tensor, token_ids: Tensor, norms: Tensor) -> Tensor:
    """[T] float32: the log probability of one token of each row, anything for -1; the rest is as in `most_likely`."""
    values = logits[rows.long(), token_ids.clamp(min=0).long()].float()
    return values - norms[:, 0] - norms[:, 1]


class _Rows:
    """The tables as the R rows of a step see them; a row of padding sees seat 0."""

    def __init__(self, tables: SamplingTables, seats: Tensor, numbers: Tensor) -> None:
        self.tables = tables
        self.seats = seats.clamp(min=0).long()
        self.numbers = numbers

    @property
    def filters(self) -> dict[str, Tensor]:
        """The columns that `kept` needs."""
        return {name: self.column(name) for name in ("temperature", "top_k", "top_p", "min_p_depth")}

    def column(self, name: str) -> Tensor:
        return self.tables.column(name)[self.seats]


def _biased(raw: Tensor, rows: _Rows, first: int = 0) -> Tensor:
    entries = rows.tables.biases[rows.seats]
    codes, values = entries[..., 0], entries[..., 1].contiguous().view(torch.float32)
    active = torch.arange(entries.shape[1], device=raw.device) < rows.column("num_biases")[:, None]
    is_early = (rows.numbers < rows.column("min_tokens"))[:, None]
    places = torch.where(codes < 0, -1 - codes, codes) - first
    active &= (places >= 0) & (places < raw.shape[1])
    values = torch.where(is_early & (codes < 0), -torch.inf, values)
    return raw.scatter_add(1, torch.where(active, places, 0).long(), torch.where(active, values, 0.0))


def _penalised(values: Tensor, rows: _Rows, first: int = 0) -> Tensor:
    if not rows.tables.counts.numel():
        return values
    counts_rows = rows.column("counts_row")
    codes = rows.tables.counts[:, first : first + values.shape[1]][counts_rows.clamp(min=0).long()]
    counts = codes >> 1
    repetition, presence, frequency = (
        rows.column(name)[:, None] for name in ("repetition", "presence", "frequency")
    )
    penalised = torch.where(values > 0, values / repetition, values * repetition)
    penalised = penalised - (frequency * counts + presence * (counts > 0))
    penalised = penalised.clamp(-LARGEST, LARGEST)
    applies = (counts_rows >= 0)[:, None] & (codes > 0) & (values > -torch.inf)
    return torch.where(applies, penalised, values)


def _masked(values: Tensor, masks: Tensor | None, first: int = 0) -> Tensor:
    if masks is None:
        return values
    bits = (masks[..., None] >> torch.arange(32, dtype=torch.int32, device=masks.device)) & 1
    return values.masked_fill(bits.flatten(1)[:, first : first + values.shape[1]] == 0, -torch.inf)


def _levels(depths: Tensor, temperature: Tensor) -> Tensor:
    """[R, vocab] int64 in [0, LEVELS); 0 is the most likely token's."""
    scale = (LEVELS_PER_NAT / temperature).clamp(max=LARGEST)
    return (depths * scale).clamp(max=LEVELS - 1.0).long()


def _nucleus(levels: Tensor, nats: Tensor, cuts: Tensor, top_p: Tensor) -> Tensor:
    """[R, 1] the last level that less than top_p of the mass up to `cuts` lies above; 0 at least."""
    masses = (torch.exp(-nats) * MASS_UNIT).long().masked_fill(levels > cuts, 0)
    ordered, order = levels.sort(-1)
    running = masses.gather(1, order).cumsum(-1)
    # Mass above a level: the mass of everything before the first token of the level.
    first = torch.searchsorted(ordered, ordered, right=False)
    above = torch.where(first > 0, running.gather(1, (first - 1).clamp(min=0)), 0)
    is_kept = (above.double() < top_p * running[:, -1:].double()) & (ordered <= cuts)
    return ordered.masked_fill(~is_kept, 0).amax(-1, keepdim=True)


def _count(chosen: Tensor, usable: Tensor, tables: SamplingTables, seats: Tensor) -> None:
    counts = tables.counts
    if not counts.numel():
        return
    counts_rows = tables.column("counts_row")[seats.clamp(min=0).long()]
    counted = usable & (counts_rows >= 0)
    places = torch.where(counted, counts_rows.long() * counts.shape[1] + chosen, 0)
    counts.view(-1).scatter_add_(0, places, 2 * counted.to(torch.int32))
