"""Triton kernels that find what top-k and top-p keep of a row of logits.

Histograms hold the number of tokens (for top-k) and their mass (for top-p) by level, in integers, so that it does not
matter in which order they are added. A filter's cut is the last level that has less than a limit above it: k tokens, or
the share top_p of the mass. It is never an empty level, since what lies above the next one would be the same. The first
histograms are by the upper half of a level's bits, and those that follow by the lower half, in the one bin that the cut
lies in. A kernel finds that bin in the histograms of the launch before it, every program for itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.triton.sampling_rows import AT_TOP_P, INFINITY, WORDS, filters_of, processed_logits
from engine.sampling import reference

BINS = 2048
"""Of a histogram: as many as half of a level's bits can tell apart."""
NUM_COUNTS, NUM_MASSES = 2, 3
"""Histograms of a row."""
SEARCH_SIZE = 8
"""Of `searches`, for each row: see below."""

_BINS, _BIN_BITS = tl.constexpr(BINS), tl.constexpr(BINS.bit_length() - 1)
_COUNTS, _MASSES = tl.constexpr(NUM_COUNTS * BINS), tl.constexpr(NUM_MASSES * BINS)
_SEARCH_SIZE = tl.constexpr(SEARCH_SIZE)
_LAST_LEVEL = tl.constexpr(reference.LEVELS - 1)
_LEVELS_PER_NAT = tl.constexpr(reference.LEVELS_PER_NAT)
_BINS_PER_NAT = tl.constexpr(reference.LEVELS_PER_NAT / BINS)
_MASS_UNIT = tl.constexpr(reference.MASS_UNIT)
_LARGEST = tl.constexpr(reference.LARGEST)

_TOTAL = tl.constexpr(0)
"""In `searches`: the mass of all tokens, for a row with top-p alone."""
_BOUND = tl.constexpr(1)
"""In `searches`: the last bin of the first histograms; no cut lies in a later one."""
_FIRST, _SECOND = tl.constexpr(2), tl.constexpr(5)
"""In `searches`: the bin of the cut, the amount above that bin, and the limit, for top-k's cut or for top-p's without
top-k, and for top-p's among what top-k keeps."""


@triton.jit
def bound_kernel(
    slots: tl.tensor,
    words: tl.tensor,
    reals: tl.tensor,
    floats: tl.tensor,
    peaks: tl.tensor,
    searches: tl.tensor,
    counts: tl.tensor,
    masses: tl.tensor,
    maxima: tl.tensor,
    MAXIMA: tl.constexpr,
    TILES: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    VOCAB: tl.constexpr,
    NUM_TILES: tl.constexpr,
) -> None:
    """Starts the searches of one row: finds its largest logit, bounds its cuts, and empties its histograms.

    Top-k's cut is at the k-th largest of the groups' maxima or above. Without top-k, all tokens that lie n nats or more
    below the most likely one have together at most VOCAB * exp(-n) times its mass; where that is less than the share
    1 - top_p of the total, top-p keeps none of them.
    """
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    reals += slot * WORDS
    temperature, top_k, has_top_p, is_filtered = filters_of(words + slot * WORDS, reals, TOP_K, TOP_P, VOCAB)
    if is_filtered:
        tiles = tl.arange(0, TILES)
        of_tiles = tl.load(floats + row * 4 * NUM_TILES + tiles, mask=tiles < NUM_TILES, other=-INFINITY)
        peak = tl.max(of_tiles)
        tl.store(peaks + row, peak)
        searches += row * _SEARCH_SIZE
        bins = tl.arange(0, _BINS)
        bound = tl.full((), _BINS - 1, tl.int32)
        if top_k > 0:
            groups = tl.arange(0, MAXIMA)
            num_groups = NUM_TILES * GROUPS
            exists = groups < num_groups
            largest = tl.load(maxima + row.to(tl.int64) * num_groups + groups, mask=exists, other=-INFINITY)
            group_bins = levels_of(peak - largest, temperature) >> _BIN_BITS
            bound = _bin_of_rank(tl.where(exists, group_bins, _BINS), top_k)
            for start in range(0, _COUNTS, _BINS):
                tl.store(counts + row.to(tl.int64) * _COUNTS + start + bins, tl.zeros_like(bins))
        elif has_top_p:
            # The margin is more than what depths and masses are rounded by.
            nats = tl.log(VOCAB / (1 - tl.load(reals + AT_TOP_P))) + 0.05
            bound = tl.minimum((nats * _BINS_PER_NAT).to(tl.int32) + 1, _BINS - 1)
        tl.store(searches + _BOUND, bound.to(tl.int64))
        if has_top_p:
            tl.store(searches + _TOTAL, tl.zeros((), tl.int64))
            for start in range(0, _MASSES, _BINS):
                tl.store(masses + row.to(tl.int64) * _MASSES + start + bins, tl.zeros((_BINS,), tl.int64))


@triton.jit
def histogram_kernel(
    logits: tl.tensor,
    logits_stride: tl.tensor,
    slots: tl.tensor,
    words: tl.tensor,
    reals: tl.tensor,
    values: tl.tensor,
    floats: tl.tensor,
    peaks: tl.tensor,
    searches: tl.tensor,
    counts: tl.tensor,
    masses: tl.tensor,
    STAGE: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    NUM_TILES: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Adds one tile of one row to the histograms of a stage.

    Stage 0 is by the upper bits of the levels. Stage 1 is by the lower bits in the bin of top-k's cut, or of top-p's if
    there is no top-k. Stage 2 is by the lower bits in the bin of top-p's cut among what top-k keeps.
    """
    row, tile = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    words += slot * WORDS
    reals += slot * WORDS
    temperature, top_k, has_top_p, _ = filters_of(words, reals, TOP_K, TOP_P, VOCAB)
    if ((top_k > 0) & has_top_p) | (((top_k > 0) | has_top_p) & (STAGE < 2)):
        searches += row * _SEARCH_SIZE
        counts += row.to(tl.int64) * _COUNTS
        masses += row.to(tl.int64) * _MASSES
        peak = tl.load(peaks + row)
        best_level = levels_of(peak - tl.load(floats + row * 4 * NUM_TILES + tile), temperature)
        needs_total = has_top_p & (top_k == 0) & (STAGE == 0)
        bound = tl.load(searches + _BOUND).to(tl.int32)
        if (best_level >> _BIN_BITS <= bound) | (tile == 0) | needs_total:
            first, last = _stage_levels(reals, searches, counts, masses, tile, top_k, bound, STAGE)
            if (best_level <= last) | needs_total:
                ids = tile * TILE + tl.arange(0, TILE)
                depths = peak - processed_logits(
                    logits, logits_stride, words, values, row, ids, VOCAB, STRIDE
                )
                levels = levels_of(depths, temperature)
                here = (ids < VOCAB) & (levels >= first) & (levels <= last)
                places = levels >> _BIN_BITS if STAGE == 0 else levels & (_BINS - 1)
                if (top_k > 0) & (STAGE < 2):
                    tl.atomic_add(counts + STAGE * _BINS + places, 1, mask=here, sem="relaxed")
                if has_top_p:
                    units = (tl.exp(-(depths / temperature)) * _MASS_UNIT).to(tl.int64)
                    places += STAGE * _BINS
                    tl.atomic_add(masses + places, units, mask=here & (units > 0), sem="relaxed")
                    if needs_total:
                        tl.atomic_add(searches + _TOTAL, tl.sum(units), sem="relaxed")


@triton.jit
def last_kept_level(
    searches: tl.tensor,
    counts: tl.tensor,
    masses: tl.tensor,
    row: tl.tensor,
    best_level: tl.tensor,
    top_k: tl.tensor,
    has_top_p: tl.tensor,
) -> tl.tensor:
    """The last level that a row's top-k and top-p keep; anything below `best_level` if that is not kept."""
    cut = tl.full((), _LAST_LEVEL, tl.int32)
    if (top_k > 0) | has_top_p:
        has_both = (top_k > 0) & has_top_p
        searches += row * _SEARCH_SIZE + tl.where(has_both, _SECOND, _FIRST)
        found = tl.load(searches).to(tl.int32)
        cut = found * _BINS
        if best_level >> _BIN_BITS <= found:
            bins = tl.arange(0, _BINS)
            if has_top_p:
                stage = tl.where(has_both, 2, 1)
                amounts = tl.load(masses + row.to(tl.int64) * _MASSES + stage * _BINS + bins)
            else:
                amounts = tl.load(counts + row.to(tl.int64) * _COUNTS + _BINS + bins).to(tl.int64)
            lower, _ = _last_bin(amounts, tl.load(searches + 1), tl.load(searches + 2))
            cut += lower
    return cut


@triton.jit
def levels_of(depths: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Levels as in the reference; that of NaN is the last, so that a histogram is never written outside."""
    scaled = depths * tl.minimum(tl.div_rn(_LEVELS_PER_NAT, temperature), _LARGEST)
    return tl.where(scaled < _LAST_LEVEL, scaled, _LAST_LEVEL).to(tl.int32)


@triton.jit
def _stage_levels(
    reals: tl.tensor,
    searches: tl.tensor,
    counts: tl.tensor,
    masses: tl.tensor,
    tile: tl.tensor,
    top_k: tl.tensor,
    bound: tl.tensor,
    STAGE: tl.constexpr,
) -> tl.tensor:
    """(first, last) of the levels that a stage's histograms hold."""
    bins = tl.arange(0, _BINS)
    first = tl.zeros((), tl.int32)
    last = bound * _BINS + _BINS - 1
    if STAGE == 1:
        if top_k > 0:
            limit = top_k.to(tl.int64)
            amounts = tl.load(counts + bins, mask=bins <= bound, other=0).to(tl.int64)
        else:
            limit = _mass_limit(reals, tl.load(searches + _TOTAL))
            amounts = tl.load(masses + bins, mask=bins <= bound, other=0)
        first = _search(searches + _FIRST, tile, amounts, limit) * _BINS
        last = first + _BINS - 1
    if STAGE == 2:
        top_k_bin = tl.load(searches + _FIRST).to(tl.int32)
        amounts = tl.load(counts + _BINS + bins).to(tl.int64)
        lower, _ = _last_bin(amounts, tl.load(searches + _FIRST + 1), tl.load(searches + _FIRST + 2))
        kept = tl.load(masses + bins, mask=bins < top_k_bin, other=0)
        kept_in_bin = tl.sum(tl.load(masses + _BINS + bins, mask=bins <= lower, other=0))
        kept = tl.where(bins == top_k_bin, kept_in_bin, kept)
        first = _search(searches + _SECOND, tile, kept, _mass_limit(reals, tl.sum(kept))) * _BINS
        last = first + _BINS - 1
    return first, last


@triton.jit
def _search(search: tl.tensor, tile: tl.tensor, amounts: tl.tensor, limit: tl.tensor) -> tl.tensor:
    """The bin of the cut; the first tile of a row stores it with the amount above it and the limit."""
    found, above = _last_bin(amounts, tl.zeros((), tl.int64), limit)
    if tile == 0:
        tl.store(search, found.to(tl.int64))
        tl.store(search + 1, above)
        tl.store(search + 2, limit)
    return found


@triton.jit
def _last_bin(amounts: tl.tensor, above: tl.tensor, limit: tl.tensor) -> tl.tensor:
    """(last bin that has less than `limit` above it, or bin 0; the amount above it). `above` lies above all bins."""
    bins = tl.arange(0, _BINS)
    starts = above + tl.cumsum(amounts, 0) - amounts
    found = tl.max(tl.where(starts < limit, bins, 0))
    return found, tl.sum(tl.where(bins == found, starts, 0))


@triton.jit
def _mass_limit(reals: tl.tensor, total: tl.tensor) -> tl.tensor:
    """The least integer that is not less than top_p * total."""
    share = tl.load(reals + AT_TOP_P).to(tl.float64) * total.to(tl.float64)
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
