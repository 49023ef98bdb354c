"""Triton kernels for the rule of `engine/sampling/reference.py`, in a few passes over the logits and without a sort.

A row of logits is cut into tiles, and a program works on one tile of one row. A launch that reads a row is a pass:

    prepare    biases, penalties and the sums of the log probability; scores of a row without filters
    histogram  tokens and masses by the upper 11 bits of their level, then by the lower 11 in the bin of top-k's cut (of
               top-p's without top-k), then in the bin of top-p's cut among what top-k keeps
    choose     scores of the tokens that the filters keep

A row without filters is read once, one with min-p alone twice, one with top-k or top-p four times, one with both five
times. Of the small kernels, `bound` limits the first histogram to tokens that can still be kept, and `finish` takes the
best token of the tiles. A row's token depends on nothing but the row: floats are only compared, and what is added up
in an order that may differ is integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.sampling_filters import (
    BINS,
    NUM_COUNTS,
    NUM_MASSES,
    SEARCH_SIZE,
    bound_kernel,
    histogram_kernel,
    last_kept_level,
    levels_of,
)
from engine.kernels.triton.sampling_rows import (
    AT_COUNTS_ROW,
    AT_MIN_P_DEPTH,
    AT_STATE,
    INFINITY,
    LONGS,
    WORDS,
    filters_of,
    gumbel_noise,
    processed_logits,
    store_processed_logits,
)
from engine.sampling.tables import Filters, SamplingTables

GROUPS = 32
"""Parts of a tile; their largest logits bound top-k's cut."""
OPTIONS: dict[str, Any] = {"num_warps": 16, "enable_fp_fusion": False}
"""Products and sums are rounded one by one, as torch rounds them."""


@dataclass(frozen=True, slots=True)
class _Step:
    """The arguments of a call."""

    logits: Tensor
    tables: SamplingTables
    slots: Tensor
    numbers: Tensor
    filters: Filters

    @property
    def row(self) -> tuple[Any, ...]:
        """What every kernel that reads rows takes first; `words` and `reals` are the slots' parameters."""
        views = (self.tables.view(torch.int32), self.tables.view(torch.float32))
        return (self.logits, self.logits.stride(0), self.slots, *views)


class TritonChoose:
    """`reference.choose` for up to `max_rows` rows at a time, with all of its memory taken at the start.

    One step at a time: the workspace is shared by all calls.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device, tile: int = 4096) -> None:
        self._vocab_size = vocab_size
        self._tile = tile
        self._num_tiles = num_tiles = triton.cdiv(vocab_size, tile)
        self._groups = min(GROUPS, tile)
        self._stride = triton.cdiv(vocab_size, 16) * 16

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        self._values = empty(max_rows, self._stride)
        """Logits of the rows with biases or penalties; what is not changed is read where it is."""
        self._peaks = empty(max_rows)
        self._maxima = empty(max_rows, num_tiles * self._groups)
        self._floats = empty(max_rows, 4, num_tiles)
        self._ints = empty(max_rows, 2, num_tiles, dtype=torch.int32)
        self._searches = empty(max_rows, SEARCH_SIZE, dtype=torch.int64)
        self._counts = empty(max_rows, NUM_COUNTS, BINS, dtype=torch.int32)
        self._masses = empty(max_rows, NUM_MASSES, BINS, dtype=torch.int64)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in vars(self).values() if isinstance(tensor, Tensor))

    def __call__(
        self, logits: Tensor, tables: SamplingTables, slots: Tensor, numbers: Tensor, filters: Filters
    ) -> tuple[Tensor, Tensor]:
        num_rows = logits.shape[0]
        if num_rows > self._values.shape[0]:
            raise ValueError(f"{num_rows} rows of logits; there is room for {self._values.shape[0]}")
        token_ids = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
        logprobs = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
        if num_rows:
            logits = logits if logits.stride(1) == 1 else logits.contiguous()
            step = _Step(logits, tables, slots, numbers, filters)
            self._prepare(step)
            if filters.top_k or filters.top_p:
                self._filter(step)
            self._finish(step, token_ids, logprobs)
        return token_ids, logprobs

    def _prepare(self, step: _Step) -> None:
        tables = step.tables
        prepare_kernel[(step.logits.shape[0], self._num_tiles)](
            *step.row,
            step.numbers,
            tables.view(torch.int64),
            tables.biases,
            tables.biases.view(torch.float32),
            tables.counts,
            self._values,
            self._maxima,
            self._floats,
            self._ints,
            MAX_BIASES=tables.biases.shape[1],
            LOGPROBS=step.filters.logprobs,
            GROUPS=self._groups,
            **self._tiled(step),
        )

    def _filter(self, step: _Step) -> None:
        """Scores the rows that have filters."""
        tiled = self._tiled(step)
        num_rows = step.logits.shape[0]
        search = (self._floats, self._peaks, self._searches, self._counts, self._masses)
        bound_kernel[(num_rows,)](
            *step.row[2:],
            *search,
            self._maxima,
            MAXIMA=triton.next_power_of_2(self._maxima.shape[1]),
            TILES=triton.next_power_of_2(self._num_tiles),
            GROUPS=self._groups,
            **self._shape(step),
        )
        grid = (num_rows, self._num_tiles)
        for stage in range(3 if step.filters.top_k and step.filters.top_p else 2):
            histogram_kernel[grid](*step.row, self._values, *search, STAGE=stage, **tiled)
        longs = step.tables.view(torch.int64)
        choose_kernel[grid](*step.row, self._values, *search, step.numbers, longs, self._ints, **tiled)

    def _finish(self, step: _Step, token_ids: Tensor, logprobs: Tensor) -> None:
        finish_kernel[(step.logits.shape[0],)](
            *step.row[:-1],
            step.tables.counts,
            self._floats,
            self._ints,
            token_ids,
            logprobs,
            LOGPROBS=step.filters.logprobs,
            VOCAB=self._vocab_size,
            NUM_TILES=self._num_tiles,
            TILES=triton.next_power_of_2(self._num_tiles),
            num_warps=1,
            enable_fp_fusion=False,
        )

    def _shape(self, step: _Step) -> dict[str, Any]:
        return {
            "TOP_K": step.filters.top_k,
            "TOP_P": step.filters.top_p,
            "VOCAB": self._vocab_size,
            "NUM_TILES": self._num_tiles,
            **OPTIONS,
        }

    def _tiled(self, step: _Step) -> dict[str, Any]:
        return self._shape(step) | {"STRIDE": self._stride, "TILE": self._tile}


@triton.jit
def prepare_kernel(
    logits: tl.tensor,
    logits_stride: tl.tensor,
    slots: tl.tensor,
    words: tl.tensor,
    reals: tl.tensor,
    numbers: tl.tensor,
    longs: tl.tensor,
    bias_codes: tl.tensor,
    bias_values: tl.tensor,
    counts: tl.tensor,
    values: tl.tensor,
    maxima: tl.tensor,
    floats: tl.tensor,
    ints: tl.tensor,
    MAX_BIASES: tl.constexpr,
    LOGPROBS: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    VOCAB: tl.constexpr,
    NUM_TILES: tl.constexpr,
    STRIDE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Applies biases and penalties to one tile of one row and finds its largest logits, or scores if nothing filters.

    `floats` has four rows for each row of logits, with a number of each tile: its largest logit, its best score, the
    largest raw logit, and the sum of exponentials relative to that. `ints` has two: the best token, and whether a raw
    logit is not finite.
    """
    row, tile = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    words += slot * WORDS
    reals += slot * WORDS
    number = tl.load(numbers + row)
    ids = tile * TILE + tl.arange(0, TILE)
    inside = ids < VOCAB
    floats += row * 4 * NUM_TILES + tile
    ints += row * 2 * NUM_TILES + tile
    logits_row = logits + row.to(tl.int64) * logits_stride
    raw = tl.load(logits_row + ids, mask=inside, other=0.0).to(tl.float32)
    tl.store(ints + NUM_TILES, tl.max((inside & ((tl.abs(raw) < INFINITY) == 0)).to(tl.int32)))
    if LOGPROBS:
        largest_raw = tl.max(tl.where(inside, raw, -INFINITY))
        tl.store(floats + 2 * NUM_TILES, largest_raw)
        tl.store(floats + 3 * NUM_TILES, tl.sum(tl.where(inside, tl.exp(raw - largest_raw), 0.0)))

    biases = slot * MAX_BIASES * 2
    values_row = values + row.to(tl.int64) * STRIDE
    store_processed_logits(
        logits_row,
        words,
        reals,
        number,
        bias_codes + biases,
        bias_values + biases,
        counts,
        values_row,
        tile,
        VOCAB,
        TILE,
    )
    processed = processed_logits(logits, logits_stride, words, values, row, ids, VOCAB, STRIDE)
    temperature, _, _, is_filtered = filters_of(words, reals, TOP_K, TOP_P, VOCAB)
    if is_filtered:
        tl.store(floats, tl.max(processed))
        if TOP_K:
            largest = tl.max(tl.reshape(processed, (GROUPS, TILE // GROUPS)), 1)
            tl.store(maxima + (row * NUM_TILES + tile).to(tl.int64) * GROUPS + tl.arange(0, GROUPS), largest)
    else:
        scores = processed
        if temperature > 0:
            scores += temperature * gumbel_noise(tl.load(longs + slot * LONGS + AT_STATE), number, ids)
        tl.store(floats + NUM_TILES, tl.max(scores))
        tl.store(ints, tile * TILE + tl.argmax(scores, 0, tie_break_left=True))


@triton.jit
def choose_kernel(
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
    numbers: tl.tensor,
    longs: tl.tensor,
    ints: tl.tensor,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    VOCAB: tl.constexpr,
    NUM_TILES: tl.constexpr,
    STRIDE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Finds the best score in one tile of one row among the tokens that the filters keep."""
    row, tile = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    words += slot * WORDS
    reals += slot * WORDS
    temperature, top_k, has_top_p, is_filtered = filters_of(words, reals, TOP_K, TOP_P, VOCAB)
    if is_filtered:
        peak = tl.load(peaks + row)
        floats += row * 4 * NUM_TILES + tile
        smallest_depth = peak - tl.load(floats)
        best_level = levels_of(smallest_depth, temperature)
        cut = last_kept_level(searches, counts, masses, row, best_level, top_k, has_top_p)
        deepest = tl.load(reals + AT_MIN_P_DEPTH) * temperature
        best = tl.full((), -INFINITY, tl.float32)
        best_id = tl.zeros((), tl.int32)
        if (best_level <= cut) & (smallest_depth <= deepest):
            ids = tile * TILE + tl.arange(0, TILE)
            processed = processed_logits(logits, logits_stride, words, values, row, ids, VOCAB, STRIDE)
            depths = peak - processed
            kept = (levels_of(depths, temperature) <= cut) & (depths <= deepest)
            state = tl.load(longs + slot * LONGS + AT_STATE)
            scores = tl.where(kept, processed, -INFINITY)
            scores += temperature * gumbel_noise(state, tl.load(numbers + row), ids)
            best = tl.max(scores)
            best_id = tile * TILE + tl.argmax(scores, 0, tie_break_left=True)
        tl.store(floats + NUM_TILES, best)
        tl.store(ints + row * 2 * NUM_TILES + tile, best_id)


@triton.jit
def finish_kernel(
    logits: tl.tensor,
    logits_stride: tl.tensor,
    slots: tl.tensor,
    words: tl.tensor,
    counts: tl.tensor,
    floats: tl.tensor,
    ints: tl.tensor,
    token_ids: tl.tensor,
    logprobs: tl.tensor,
    LOGPROBS: tl.constexpr,
    VOCAB: tl.constexpr,
    NUM_TILES: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """Takes the best token of one row's tiles, with its log probability, and counts it."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        tl.store(token_ids + row, -1)
        tl.store(logprobs + row, float("nan"))
        return
    tiles = tl.arange(0, TILES)
    exists = tiles < NUM_TILES
    floats += row * 4 * NUM_TILES + tiles
    ints += row * 2 * NUM_TILES
    scores = tl.load(floats + NUM_TILES, mask=exists, other=-INFINITY)
    bad = tl.max(tl.load(ints + NUM_TILES + tiles, mask=exists, other=0))
    usable = (bad == 0) & (tl.max(scores) > -INFINITY)
    token_id = tl.minimum(tl.load(ints + tl.argmax(scores, 0, tie_break_left=True)), VOCAB - 1)
    logprob = tl.load(logits + row.to(tl.int64) * logits_stride + token_id).to(tl.float32)
    if LOGPROBS:
        largests = tl.load(floats + 2 * NUM_TILES, mask=exists, other=-INFINITY)
        largest = tl.max(largests)
        totals = tl.load(floats + 3 * NUM_TILES, mask=exists, other=0.0)
        logprob = logprob - largest - tl.log(tl.sum(totals * tl.exp(largests - largest)))
    tl.store(token_ids + row, tl.where(usable, token_id, -1))
    tl.store(logprobs + row, tl.where(usable, logprob, float("nan")))
    counts_row = tl.load(words + slot * WORDS + AT_COUNTS_ROW).to(tl.int64)
    if usable & (counts_row >= 0):
        place = counts + counts_row * VOCAB + token_id
        tl.store(place, tl.load(place) + 2)
