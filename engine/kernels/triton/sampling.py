"""Triton kernels for the rule of `engine/sampling/reference.py`, in a few passes over the logits and without a sort.

A row of logits is cut into tiles, and a program works on one tile of one row. A launch that reads a row is a pass:

    prepare    biases, penalties and masks; scores of a row without filters
    histogram  tokens and masses by their levels, twice for top-k and twice for top-p: see `sampling_filters`
    choose     scores of the tokens that the filters keep

A row without filters is read once, one with min-p alone twice, one with top-k or top-p four times, one with both six
times. Of the small kernels, `bound` limits the first histogram to tokens that can still be kept, and `finish` takes the
best of the tiles' candidates, which are as in the reference's `choose_among`; ranks put theirs together before. A row's
token depends on nothing but the row: floats are only compared, and only integers are added up in an order that may
differ.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.kernels.triton.sampling_filters import (
    BINS,
    GROUPS,
    NUM_STAGES,
    SEARCH_SIZE,
    bound_kernel,
    histogram_kernel,
    last_kept_level,
    levels_of,
    tile_peak,
)
from penstock.engine.kernels.triton.sampling_rows import (
    COUNTS_ROW_AT,
    INFINITY,
    MIN_P_DEPTH_AT,
    WORDS,
    filters_of,
    gumbel_noise,
    processed_logits,
    real_at,
    rows_of,
    store_processed_logits,
)
from penstock.engine.sampling.tables import Filters, Part, SamplingTables

OPTIONS: dict[str, Any] = {"num_warps": 16, "enable_fp_fusion": False}
"""Products and sums are rounded one by one, as torch rounds them."""


class TritonChoose:
    """`reference.choose` for up to `max_rows` rows at a time, with all of its memory taken at the start.

    One step at a time: the workspace is shared by all calls.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device, tile: int = 4096) -> None:
        self._vocab_size = vocab_size
        self._tile = tile
        num_tiles = triton.cdiv(vocab_size, tile)
        self._groups = min(GROUPS, tile)

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        self._values = empty(max_rows, triton.cdiv(vocab_size, 16) * 16)
        """Logits of the rows with biases or penalties; unchanged rows are read where they are."""
        self._maxima = empty(max_rows, num_tiles * self._groups)
        self._peaks = empty(max_rows)
        self._candidates = empty(max_rows * num_tiles * 3, dtype=torch.int32)
        self._searches = empty(max_rows, NUM_STAGES, SEARCH_SIZE, dtype=torch.int64)
        self._histograms = empty(max_rows, NUM_STAGES, BINS, dtype=torch.int64)

    def __call__(
        self,
        logits: Tensor,
        tables: SamplingTables,
        seats: Tensor,
        numbers: Tensor,
        filters: Filters,
        masks: Tensor | None = None,
        part: Part | None = None,
    ) -> Tensor:
        num_rows = logits.shape[0]
        if num_rows > self._values.shape[0]:
            raise ValueError(f"{num_rows} rows of logits; there is room for {self._values.shape[0]}")
        token_ids = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
        if num_rows:
            logits = logits if logits.stride(1) == 1 else logits.contiguous()
            self._launch(logits, tables, seats, numbers, filters, masks, part, token_ids)
        return token_ids

    def _launch(
        self,
        logits: Tensor,
        tables: SamplingTables,
        seats: Tensor,
        numbers: Tensor,
        filters: Filters,
        masks: Tensor | None,
        part: Part | None,
        token_ids: Tensor,
    ) -> None:
        num_rows, num_logits = logits.shape
        grid = (num_rows, triton.cdiv(num_logits, self._tile))
        candidates = self._candidates[: num_rows * grid[1] * 3].view(num_rows, -1)
        first = 0 if part is None else part.first
        words = tables.view(torch.int32)
        rows = (logits, logits.stride(0), seats, words)
        tiles = (*rows, self._values, self._maxima)
        kinds = {"TOP_K": filters.top_k, "TOP_P": filters.top_p, "VOCAB": self._vocab_size, **OPTIONS}
        tiled = {"MASKED": masks is not None, "GROUPS": self._groups, "TILE": self._tile, **kinds}
        max_biases = tables.biases.shape[1]
        limits = (tables.biases, tables.counts, tables.counts if masks is None else masks)
        of_part = {"FIRST": first, "END": min(first + num_logits, self._vocab_size)}
        prepare_kernel[grid](*tiles, numbers, *limits, candidates, MAX_BIASES=max_biases, **of_part, **tiled)
        if filters.top_k or filters.top_p:
            search = (self._peaks, self._searches, self._histograms)
            num_maxima = self._maxima.shape[1]
            maxima = {"MAXIMA": triton.next_power_of_2(num_maxima), "NUM_MAXIMA": num_maxima}
            bound_kernel[grid[:1]](seats, words, self._maxima, *search, **maxima, **kinds)
            for stage in (0, 1) * filters.top_k + (2, 3) * filters.top_p:
                histogram_kernel[grid](*tiles, *search, STAGE=stage, **tiled)
            choose_kernel[grid](*tiles, *search, numbers, candidates, **tiled)
        if part is not None:
            candidates = part.gather(candidates)
        num_candidates = candidates.shape[1] // 3
        finish_kernel[grid[:1]](
            seats,
            words,
            tables.counts,
            candidates,
            token_ids,
            VOCAB=self._vocab_size,
            NUM_CANDIDATES=num_candidates,
            CANDIDATES=triton.next_power_of_2(num_candidates),
            num_warps=1,
            enable_fp_fusion=False,
        )


@triton.jit
def prepare_kernel(
    logits: tl.tensor,
    logits_stride: tl.tensor,
    seats: tl.tensor,
    words: tl.tensor,
    values: tl.tensor,
    maxima: tl.tensor,
    numbers: tl.tensor,
    biases: tl.tensor,
    counts: tl.tensor,
    masks: tl.tensor,
    candidates: tl.tensor,
    MAX_BIASES: tl.constexpr,
    FIRST: tl.constexpr,
    END: tl.constexpr,
    MASKED: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Applies biases, penalties and masks to one tile of one row; finds its largest logits, or scores without filters.

    `masks` are read if MASKED. The logits are those of the tokens from FIRST to END, of which `values` has as many.
    """
    row, tile, num_tiles = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    seat = tl.load(seats + row).to(tl.int64)
    if seat < 0:
        return
    words += seat * WORDS
    number = tl.load(numbers + row)
    first = FIRST + tile * TILE
    ids = first + tl.arange(0, TILE)
    inside = ids < END
    candidate = candidates + (row * num_tiles + tile) * 3
    logits_row, values_row = rows_of(logits, logits_stride, values, row, VOCAB)
    logits_row -= FIRST
    values_row -= FIRST

    biases += seat * MAX_BIASES * 2
    mask_row = masks + row.to(tl.int64) * ((VOCAB + 31) // 32)
    store_processed_logits(
        logits_row, words, number, biases, counts, mask_row, values_row, first, MASKED, END, VOCAB, TILE
    )
    raw = tl.load(logits_row + ids, mask=inside, other=0.0).to(tl.float32)
    tl.store(candidate + 2, tl.max((inside & ((tl.abs(raw) < INFINITY) == 0)).to(tl.int32)))
    processed = processed_logits(logits_row, words, values_row, ids, MASKED, END)
    temperature, _, _, is_filtered = filters_of(words, TOP_K, TOP_P, VOCAB)
    if is_filtered:
        largest = tl.max(tl.reshape(processed, (GROUPS, TILE // GROUPS)), 1)
        tl.store(maxima + (row * num_tiles + tile).to(tl.int64) * GROUPS + tl.arange(0, GROUPS), largest)
    else:
        noisy = processed
        if temperature > 0:
            noisy += temperature * gumbel_noise(words, number, ids)
        tl.store(candidate, tl.max(noisy).to(tl.int32, bitcast=True))
        tl.store(candidate + 1, first + tl.argmax(noisy, 0, tie_break_left=True))


@triton.jit
def choose_kernel(
    logits: tl.tensor,
    logits_stride: tl.tensor,
    seats: tl.tensor,
    words: tl.tensor,
    values: tl.tensor,
    maxima: tl.tensor,
    peaks: tl.tensor,
    searches: tl.tensor,
    histograms: tl.tensor,
    numbers: tl.tensor,
    candidates: tl.tensor,
    MASKED: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Finds the best score in one tile of one row among the tokens that the filters keep."""
    row, tile, num_tiles = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    seat = tl.load(seats + row).to(tl.int64)
    if seat < 0:
        return
    words += seat * WORDS
    temperature, top_k, has_top_p, is_filtered = filters_of(words, TOP_K, TOP_P, VOCAB)
    if is_filtered:
        peak = tl.load(peaks + row)
        smallest_depth = peak - tile_peak(maxima, row, tile, GROUPS)
        best_level = levels_of(smallest_depth, temperature)
        cut = last_kept_level(searches, histograms, words, row, best_level, top_k, has_top_p)
        deepest = real_at(words, MIN_P_DEPTH_AT) * temperature
        best = tl.full((), -INFINITY, tl.float32)
        best_id = tl.zeros((), tl.int32)
        if (best_level <= cut) & (smallest_depth <= deepest):
            ids = tile * TILE + tl.arange(0, TILE)
            logits_row, values_row = rows_of(logits, logits_stride, values, row, VOCAB)
            processed = processed_logits(logits_row, words, values_row, ids, MASKED, VOCAB)
            depths = peak - processed
            kept = (levels_of(depths, temperature) <= cut) & (depths <= deepest)
            noisy = tl.where(kept, processed, -INFINITY)
            noisy += temperature * gumbel_noise(words, tl.load(numbers + row), ids)
            best = tl.max(noisy)
            best_id = tile * TILE + tl.argmax(noisy, 0, tie_break_left=True)
        candidate = candidates + (row * num_tiles + tile) * 3
        tl.store(candidate, best.to(tl.int32, bitcast=True))
        tl.store(candidate + 1, best_id)


@triton.jit
def finish_kernel(
    seats: tl.tensor,
    words: tl.tensor,
    counts: tl.tensor,
    candidates: tl.tensor,
    token_ids: tl.tensor,
    VOCAB: tl.constexpr,
    NUM_CANDIDATES: tl.constexpr,
    CANDIDATES: tl.constexpr,
) -> None:
    """Takes the best of one row's candidates, and counts it."""
    row = tl.program_id(0)
    seat = tl.load(seats + row).to(tl.int64)
    if seat < 0:
        tl.store(token_ids + row, -1)
        return
    places = tl.arange(0, CANDIDATES)
    exists = places < NUM_CANDIDATES
    candidates += row * NUM_CANDIDATES * 3
    bits = tl.load(candidates + 3 * places, mask=exists, other=0)
    scores = tl.where(exists, bits.to(tl.float32, bitcast=True), -INFINITY)
    bad = tl.max(tl.load(candidates + 3 * places + 2, mask=exists, other=0))
    usable = (bad == 0) & (tl.max(scores) > -INFINITY)
    best = tl.argmax(scores, 0, tie_break_left=True)
    token_id = tl.minimum(tl.load(candidates + 3 * best + 1), VOCAB - 1)
    tl.store(token_ids + row, tl.where(usable, token_id, -1))
    counts_row = tl.load(words + seat * WORDS + COUNTS_ROW_AT).to(tl.int64)
    if usable & (counts_row >= 0):
        place = counts + counts_row * VOCAB + token_id
        tl.store(place, tl.load(place) + 2)
