"""Triton kernels that find the tokens that top-k and top-p keep of a row of logits.

Histograms hold the number of tokens (for top-k) and their mass (for top-p) by level, in integers, so that it does not
matter in which order they are added. A filter's cut is the last level that has less than a limit above it: k tokens, or
the share top_p of the mass. It is never an empty level, since the mass above the next one would be the same. It is
found in two stages: a histogram by the upper half of a level's bits, then one by the lower half, of the levels in the
bin that the cut lies in. Stages 0 and 1 are top-k's, stages 2 and 3 top-p's among the tokens that top-k keeps.

A stage's search is three numbers in `searches`: the first and the last level that its histogram holds, and the part of
the limit that is left for these levels. They follow from the numbers and the histogram of the stage before, and every
program that needs them works them out for itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.engine.kernels.triton.sampling_rows import (
    INFINITY,
    TOP_P_AT,
    WORDS,
    filters_of,
    processed_logits,
    real_at,
    rows_of,
)
from penstock.engine.sampling import reference

BINS = 2048
"""The bins of a histogram: as many as half of a level's bits can tell apart."""
NUM_STAGES = 4
SEARCH_SIZE = 3
"""Numbers of a stage in `searches`."""
GROUPS = 32
"""Parts of a tile; their largest logits bound top-k's cut."""

_BINS, _BIN_BITS = tl.constexpr(BINS), tl.constexpr(BINS.bit_length() - 1)
_HISTOGRAMS = tl.constexpr(NUM_STAGES * BINS)
_SEARCH, _SEARCHES = tl.constexpr(SEARCH_SIZE), tl.constexpr(NUM_STAGES * SEARCH_SIZE)
_LAST_LEVEL = tl.constexpr(reference.LEVELS - 1)
_LEVELS_PER_NAT = tl.constexpr(reference.LEVELS_PER_NAT)
_BINS_PER_NAT = tl.constexpr(reference.LEVELS_PER_NAT / BINS)
_MASS_UNIT = tl.constexpr(reference.MASS_UNIT)
_LARGEST = tl.constexpr(reference.LARGEST)


@triton.jit
def bound_kernel(
    seats: tl.tensor,
    words: tl.tensor,
    maxima: tl.tensor,
    peaks: tl.tensor,
    searches: tl.tensor,
    histograms: tl.tensor,
    MAXIMA: tl.constexpr,
    NUM_MAXIMA: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    VOCAB: tl.constexpr,
) -> None:
    """Finds the largest logit of one row, empties its histograms, and bounds the search of its first stage.

    Top-k's cut is at the k-th largest of the groups' maxima or above. Without top-k, all tokens that lie n nats or more
    below the most likely one have together at most VOCAB * exp(-n) times its mass; where that is less than the share
    1 - top_p of the total, top-p keeps none of them.
    """
    row = tl.program_id(0)
    seat = tl.load(seats + row).to(tl.int64)
    if seat < 0:
        return
    words += seat * WORDS
    temperature, top_k, _, is_filtered = filters_of(words, TOP_K, TOP_P, VOCAB)
    if is_filtered:
        groups = tl.arange(0, MAXIMA)
        exists = groups < NUM_MAXIMA
        largest = tl.load(maxima + row * NUM_MAXIMA + groups, mask=exists, other=-INFINITY)
        peak = tl.max(largest)
        tl.store(peaks + row, peak)
        if top_k > 0:
            group_bins = levels_of(peak - largest, temperature) >> _BIN_BITS
            bound = _bin_of_rank(tl.where(exists, group_bins, _BINS), top_k)
        else:  # the margin exceeds the rounding of depths and masses
            nats = tl.log(VOCAB / tl.maximum(1 - real_at(words, TOP_P_AT), 1e-8)) + 0.05
            bound = tl.minimum((nats * _BINS_PER_NAT).to(tl.int32) + 1, _BINS - 1)
        search = searches + row * _SEARCHES + tl.where(top_k > 0, 0, 2 * _SEARCH)
        zero = tl.zeros((), tl.int64)
        _store_search(search, zero, zero + bound * _BINS + _BINS - 1, zero + top_k)
        for start in range(0, _HISTOGRAMS, _BINS):
            bins = start + tl.arange(0, _BINS)
            tl.store(histograms + row.to(tl.int64) * _HISTOGRAMS + bins, tl.zeros((_BINS,), tl.int64))


@triton.jit
def histogram_kernel(
    logits: tl.tensor,
    logits_stride: tl.tensor,
    seats: tl.tensor,
    words: tl.tensor,
    values: tl.tensor,
    maxima: tl.tensor,
    peaks: tl.tensor,
    searches: tl.tensor,
    histograms: tl.tensor,
    STAGE: tl.constexpr,
    MASKED: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Adds one tile of one row to the histogram of a stage.

    For a row with top-p alone, tokens below the bound are added to the last bin: they count for the total mass.
    """
    row, tile = tl.program_id(0), tl.program_id(1)
    seat = tl.load(seats + row).to(tl.int64)
    if seat < 0:
        return
    words += seat * WORDS
    temperature, top_k, has_top_p, _ = filters_of(words, TOP_K, TOP_P, VOCAB)
    if (top_k > 0) if STAGE < 2 else has_top_p:
        histograms += row.to(tl.int64) * _HISTOGRAMS
        searches += row * _SEARCHES
        peak = tl.load(peaks + row)
        best_level = levels_of(peak - tile_peak(maxima, row, tile, GROUPS), temperature)
        starts_here = (STAGE == 0) | ((STAGE == 2) & (top_k == 0))
        needs_total = (STAGE == 2) & (top_k == 0)
        known = searches + tl.where(starts_here, STAGE, STAGE - 1) * _SEARCH
        if (best_level <= tl.load(known + 1)) | (tile == 0) | needs_total:
            first, last, left = _load_search(known)
            if STAGE > 0:  # noqa: SIM102 - known to the compiler, unlike the next condition
                if not starts_here:
                    before = histograms + (STAGE - 1) * _BINS
                    first, last, left = _next_search(first, last, left, before, words, STAGE - 1)
                    if tile == 0:
                        _store_search(searches + STAGE * _SEARCH, first, last, left)
            if (best_level <= last) | needs_total:
                ids = tile * TILE + tl.arange(0, TILE)
                logits_row, values_row = rows_of(logits, logits_stride, values, row, VOCAB)
                depths = peak - processed_logits(logits_row, words, values_row, ids, MASKED, VOCAB)
                levels = levels_of(depths, temperature)
                amounts = tl.full((TILE,), 1, tl.int64)
                if STAGE >= 2:
                    amounts = (tl.exp(-(depths / temperature)) * _MASS_UNIT).to(tl.int64)
                is_below = levels > last.to(tl.int32)
                here = (ids < VOCAB) & (levels >= first.to(tl.int32)) & (is_below == 0) & (amounts > 0)
                places = STAGE * _BINS + (levels >> _BIN_BITS if STAGE % 2 == 0 else levels & (_BINS - 1))
                tl.atomic_add(histograms + places, amounts, mask=here, sem="relaxed")
                if needs_total:
                    below = tl.sum(tl.where(is_below, amounts, 0))
                    tl.atomic_add(histograms + STAGE * _BINS + _BINS - 1, below, sem="relaxed")


@triton.jit
def last_kept_level(
    searches: tl.tensor,
    histograms: tl.tensor,
    words: tl.tensor,
    row: tl.tensor,
    best_level: tl.tensor,
    top_k: tl.tensor,
    has_top_p: tl.tensor,
) -> tl.tensor:
    """The last level that a row's top-k and top-p keep; anything below `best_level` if that is not kept."""
    cut = tl.full((), _LAST_LEVEL, tl.int64)
    if (top_k > 0) | has_top_p:
        stage = tl.where(has_top_p, 3, 1)
        first, last, left = _load_search(searches + row * _SEARCHES + stage * _SEARCH)
        cut = last
        if best_level <= last:
            histogram = histograms + row.to(tl.int64) * _HISTOGRAMS + stage * _BINS
            first, cut, left = _next_search(first, last, left, histogram, words, 3)
    return cut.to(tl.int32)


@triton.jit
def tile_peak(maxima: tl.tensor, row: tl.tensor, tile: tl.tensor, GROUPS: tl.constexpr) -> tl.tensor:
    """The largest logit of one tile of one row."""
    return tl.max(tl.load(maxima + (row * tl.num_programs(1) + tile) * GROUPS + tl.arange(0, GROUPS)))


@triton.jit
def levels_of(depths: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Returns levels as in the reference; NaN has the last, so that a histogram is never written outside."""
    scaled = depths * tl.minimum(tl.div_rn(_LEVELS_PER_NAT, temperature), _LARGEST)
    return tl.where(scaled < _LAST_LEVEL, scaled, _LAST_LEVEL).to(tl.int32)


@triton.jit
def _next_search(
    first: tl.tensor,
    last: tl.tensor,
    left: tl.tensor,
    histogram: tl.tensor,
    words: tl.tensor,
    STAGE: tl.constexpr,
) -> tl.tensor:
    """Returns the search of the stage after STAGE, whose histogram is complete: the cut's bin, or all up to the cut."""
    bins = tl.arange(0, _BINS)
    amounts = tl.load(histogram + bins)
    if STAGE == 2:
        left = _mass_limit(real_at(words, TOP_P_AT), tl.sum(amounts))
    starts = tl.cumsum(amounts, 0) - amounts
    found = tl.max(tl.where(starts < left, bins, 0)).to(tl.int64)
    if STAGE % 2 == 0:
        first = found * _BINS
        last = tl.minimum(last, first + _BINS - 1)
        left -= tl.sum(tl.where(bins == found, starts, 0))
    else:
        last = first + found
        first = tl.zeros((), tl.int64)
    return first, last, left


@triton.jit
def _load_search(search: tl.tensor) -> tl.tensor:
    return tl.load(search), tl.load(search + 1), tl.load(search + 2)


@triton.jit
def _store_search(search: tl.tensor, first: tl.tensor, last: tl.tensor, left: tl.tensor) -> None:
    tl.store(search, first)
    tl.store(search + 1, last)
    tl.store(search + 2, left)


@triton.jit
def _mass_limit(top_p: tl.tensor, total: tl.tensor) -> tl.tensor:
    """The least integer that is not less than top_p * total."""
    share = top_p.to(tl.float64) * total.to(tl.float64)
    whole = share.to(tl.int64)
    return whole + (whole.to(tl.float64) < share).to(tl.int64)


@triton.jit
def _bin_of_rank(bins: tl.tensor, rank: tl.tensor) -> tl.tensor:
    """The first bin up to which there are `rank` of `bins`; the last of all if there are fewer."""
    low = tl.zeros((), tl.int32)
    high = low + (_BINS - 1)
    for _ in range(_BIN_BITS):
        middle = (low + high) >> 1
        is_enough = tl.sum((bins <= middle).to(tl.int32)) >= rank
        low = tl.where(is_enough, low, middle + 1)
        high = tl.where(is_enough, middle, high)
    return low
