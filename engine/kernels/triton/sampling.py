"""Sampling, as `engine/sampling/device.py` specifies it, in a few passes over the logits and without a sort.

A row of logits is cut into tiles, one program each; the launch that comes next adds up what the tiles found, each of
its programs for itself and in one fixed order, so that a row's token depends on nothing but the row.

What top-k and top-p keep is found by value. Scaled logits lie at or below 0, and their float32 bits, read as an
integer, order them; a search narrows an interval of such keys to a sixteenth with every launch. Top-k's cut is the
smallest key that fewer than k logits exceed; top-p's is the smallest, not below top-k's, that less than p of the mass
that top-k kept exceeds. What ties with a cut is kept.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.sampling.device import ROW, Needs, SlotTables

WAYS = 16
"""Parts that a search divides its interval into."""
PASSES = 8
"""Launches until one key is left: there are fewer than WAYS ** PASSES at or below 0."""
BIAS_BLOCK = 128
OPTIONS: dict[str, Any] = {"num_warps": 16, "enable_fp_fusion": False}
"""Products and sums are rounded one by one, as torch rounds them."""
ROOMY_OPTIONS = OPTIONS | {"maxnreg": 128}
"""All the registers there are for so many threads: ptxas would spill a few rather than take more than 64."""


def _place(name: str) -> tl.constexpr:
    """Index of a field of a slot's row, in units of its own size."""
    dtype, offset = ROW.fields[name][:2]  # type: ignore[index]
    return tl.constexpr(offset // dtype.itemsize)


_WORDS = tl.constexpr(ROW.itemsize // 4)
_LONGS = tl.constexpr(ROW.itemsize // 8)
_KEY, _LOG_MIN_P = _place("key"), _place("log_min_p")
_TEMPERATURE, _TOP_P, _TOP_K = _place("temperature"), _place("top_p"), _place("top_k")
_REPETITION, _PRESENCE, _FREQUENCY = _place("repetition"), _place("presence"), _place("frequency")
_MIN_TOKENS, _NUM_BIASES, _COUNTS_ROW = _place("min_tokens"), _place("num_biases"), _place("counts_row")
_LOWEST_KEY = tl.constexpr(-2139095041)
"""Of minus infinity."""
_INFINITY = tl.constexpr(float("inf"))


class TritonChoose:
    """`device.choose` for up to `max_rows` rows at a time, with all of its memory taken at the start.

    One step at a time: the workspace is shared by all calls.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device, tile: int = 4096) -> None:
        self._vocab_size = vocab_size
        self._tile = tile
        self._num_tiles = num_tiles = triton.cdiv(vocab_size, tile)
        self._stride = triton.cdiv(vocab_size, 16) * 16

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        self._values = empty(max_rows, self._stride, dtype=torch.float32)
        self._floats = empty(max_rows, 3, num_tiles, dtype=torch.float32)
        self._ints = empty(max_rows, 2, num_tiles, dtype=torch.int32)
        self._intervals = empty(2, max_rows, 3, dtype=torch.float64)
        self._above = empty(2, max_rows, num_tiles, WAYS, dtype=torch.float64)
        self._masses = empty(max_rows, num_tiles, dtype=torch.float64)

    @property
    def num_bytes(self) -> int:
        held = (self._values, self._floats, self._ints, self._intervals, self._above, self._masses)
        return sum(tensor.nbytes for tensor in held)

    def __call__(
        self, logits: Tensor, tables: SlotTables, slots: Tensor, numbers: Tensor, needs: Needs
    ) -> tuple[Tensor, Tensor]:
        num_rows = logits.shape[0]
        if num_rows > self._values.shape[0]:
            raise ValueError(f"{num_rows} rows of logits; there is room for {self._values.shape[0]}")
        token_ids = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
        logprobs = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
        if num_rows:
            logits = logits if logits.stride(1) == 1 else logits.contiguous()
            self._prepare(logits, tables, slots, numbers)
            num_searches = self._search(num_rows, tables, slots, needs)
            self._choose(logits, tables, slots, numbers, num_searches, token_ids, logprobs)
        return token_ids, logprobs

    def _prepare(self, logits: Tensor, tables: SlotTables, slots: Tensor, numbers: Tensor) -> None:
        prepare_kernel[(logits.shape[0], self._num_tiles)](
            logits,
            logits.stride(0),
            slots,
            numbers,
            tables.view(torch.int32),
            tables.view(torch.float32),
            tables.biases,
            tables.biases.view(torch.float32),
            tables.counts,
            self._values,
            self._floats,
            self._ints,
            MAX_BIASES=tables.biases.shape[1],
            VOCAB=self._vocab_size,
            STRIDE=self._stride,
            NUM_TILES=self._num_tiles,
            TILE=self._tile,
            BLOCK=BIAS_BLOCK,
            **OPTIONS,
        )

    def _search(self, num_rows: int, tables: SlotTables, slots: Tensor, needs: Needs) -> int:
        """Narrows every row's interval; returns the number of launches, whose last left the result."""
        by_count = [True] * (PASSES * needs.top_k) + [False] * (PASSES * needs.top_p)
        for number, counts in enumerate(by_count):
            search_kernel[(num_rows, self._num_tiles)](
                slots,
                tables.view(torch.int32),
                tables.view(torch.float32),
                self._values,
                self._floats,
                self._intervals[1 - number % 2],
                self._above[1 - number % 2],
                self._intervals[number % 2],
                self._above[number % 2],
                BY_COUNT=counts,
                PASS=min(number % PASSES, 2),  # all later ones are alike, and compiled once
                CONTINUES=number > 0,
                VOCAB=self._vocab_size,
                STRIDE=self._stride,
                NUM_TILES=self._num_tiles,
                TILES=triton.next_power_of_2(self._num_tiles),
                TILE=self._tile,
                PARTS=WAYS,
                **ROOMY_OPTIONS,
            )
        return len(by_count)

    def _choose(
        self,
        logits: Tensor,
        tables: SlotTables,
        slots: Tensor,
        numbers: Tensor,
        num_searches: int,
        token_ids: Tensor,
        logprobs: Tensor,
    ) -> None:
        shape = {
            "SEARCHED": num_searches > 0,
            "VOCAB": self._vocab_size,
            "STRIDE": self._stride,
            "NUM_TILES": self._num_tiles,
            "TILES": triton.next_power_of_2(self._num_tiles),
            "TILE": self._tile,
            "PARTS": WAYS,
        }
        parameters = [tables.view(dtype) for dtype in (torch.float32, torch.float64)]
        last = (num_searches + 1) % 2
        found = (self._intervals[last], self._above[last])
        workspace = (self._values, self._floats, *found, self._masses)
        num_rows = logits.shape[0]
        mass_kernel[(num_rows, self._num_tiles)](slots, *parameters, *workspace, **shape, **OPTIONS)
        choose_kernel[(num_rows,)](
            slots,
            *parameters,
            *workspace,
            tables.view(torch.int32),
            tables.view(torch.int64),
            logits,
            logits.stride(0),
            numbers,
            tables.counts,
            self._ints,
            token_ids,
            logprobs,
            **shape,
            **ROOMY_OPTIONS,
        )


@triton.jit
def prepare_kernel(
    logits: tl.tensor,
    logits_stride: tl.tensor,
    slots: tl.tensor,
    numbers: tl.tensor,
    words: tl.tensor,
    reals: tl.tensor,
    bias_codes: tl.tensor,
    bias_values: tl.tensor,
    counts: tl.tensor,
    values: tl.tensor,
    floats: tl.tensor,
    ints: tl.tensor,
    MAX_BIASES: tl.constexpr,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    NUM_TILES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One tile of one row with biases and penalties, and what has to be known of it."""
    row, tile = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    words += slot * _WORDS
    reals += slot * _WORDS
    logits += row.to(tl.int64) * logits_stride
    values += row.to(tl.int64) * STRIDE
    ids = tile * TILE + tl.arange(0, TILE)
    inside = ids < VOCAB
    raw = tl.load(logits + ids, mask=inside, other=0.0).to(tl.float32)
    counts_row = tl.load(words + _COUNTS_ROW).to(tl.int64)
    counts += counts_row * VOCAB
    processed = raw
    if counts_row >= 0:
        processed = _penalised(raw, tl.load(counts + ids, mask=inside, other=0), reals)
    tl.store(values + ids, processed, mask=inside)

    num_biases = tl.load(words + _NUM_BIASES)
    if num_biases > 0:
        early = tl.load(numbers + row) < tl.load(words + _MIN_TOKENS)
        tl.debug_barrier()
        for start in range(0, num_biases, BLOCK):
            places = start + tl.arange(0, BLOCK)
            entries = slot * MAX_BIASES * 2 + 2 * places
            code = tl.load(bias_codes + entries, mask=places < num_biases, other=VOCAB)
            bias = tl.load(bias_values + entries + 1, mask=places < num_biases, other=0.0)
            at = tl.where(code < 0, -1 - code, code)
            here = (at >= tile * TILE) & (at < tile * TILE + TILE) & (at < VOCAB)
            bias = tl.where((code < 0) & early, -_INFINITY, bias)
            biased = tl.load(logits + at, mask=here, other=0.0).to(tl.float32) + bias
            if counts_row >= 0:
                biased = _penalised(biased, tl.load(counts + at, mask=here, other=0), reals)
            tl.store(values + at, biased, mask=here)
        tl.debug_barrier()
        processed = tl.load(values + ids, mask=inside, other=0.0)

    finite = tl.abs(raw) < _INFINITY
    largest = tl.max(tl.where(inside, raw, -_INFINITY))
    total = tl.sum(tl.where(inside, tl.exp(raw - largest), 0.0))
    processed = tl.where(inside, processed, -_INFINITY)
    floats += row * 3 * NUM_TILES + tile
    tl.store(floats, tl.max(processed))
    tl.store(floats + NUM_TILES, largest)
    tl.store(floats + 2 * NUM_TILES, total)
    ints += row * 2 * NUM_TILES + tile
    tl.store(ints, tile * TILE + tl.argmax(processed, 0, tie_break_left=True))
    tl.store(ints + NUM_TILES, tl.max((inside & (finite == 0)).to(tl.int32)))


@triton.jit
def search_kernel(
    slots: tl.tensor,
    words: tl.tensor,
    reals: tl.tensor,
    values: tl.tensor,
    floats: tl.tensor,
    old_interval: tl.tensor,
    old_above: tl.tensor,
    interval: tl.tensor,
    above: tl.tensor,
    BY_COUNT: tl.constexpr,
    PASS: tl.constexpr,
    CONTINUES: tl.constexpr,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    NUM_TILES: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """One tile's number of logits, or their mass, above each of the keys that divide the row's interval.

    An interval is (low, high, limit): the key sought is in [low, high], and what lies above it is less than limit.
    """
    row, tile = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    temperature = tl.load(reals + slot * _WORDS + _TEMPERATURE)
    if temperature <= 0:
        return
    low = _LOWEST_KEY
    high = 0
    limit = tl.full((), 0.0, tl.float64)
    if CONTINUES:
        low, high, limit = _narrowed(
            old_interval, old_above, row, (PASS == 1) & (BY_COUNT == 0), NUM_TILES, TILES, PARTS
        )
    if PASS == 0:
        if BY_COUNT:
            top_k = tl.load(words + slot * _WORDS + _TOP_K)
            limit = top_k.to(tl.float64)
            high = tl.where((top_k > 0) & (top_k < VOCAB), 0, low)
        else:
            top_p = tl.load(reals + slot * _WORDS + _TOP_P)
            limit = top_p.to(tl.float64)
            high = tl.where(top_p < 1, 0, low)
    if tile == 0:
        tl.store(interval + row * 3, tl.cast(low, tl.float64))
        tl.store(interval + row * 3 + 1, tl.cast(high, tl.float64))
        tl.store(interval + row * 3 + 2, limit)
    if high > low:
        peak = _peak(floats, row, NUM_TILES, TILES)
        scaled = _scaled(values, row, tile, peak, temperature, VOCAB, STRIDE, TILE)
        keys = _keys(scaled)
        above += (row * NUM_TILES + tile).to(tl.int64) * PARTS
        if tl.max(keys) >= low:
            step = _step(low, high, PARTS)
            threshold = low - 1
            weights = tl.full((TILE,), 1.0, tl.float64) if BY_COUNT else tl.exp(scaled.to(tl.float64))
            for part in range(PARTS - 1):
                threshold += step
                tl.store(above + part, tl.sum(tl.where(keys > threshold, weights, 0.0)))
            if PASS == 0 and not BY_COUNT:
                tl.store(above + PARTS - 1, tl.sum(tl.where(keys >= low, weights, 0.0)))
        else:
            tl.store(above + tl.arange(0, PARTS), tl.zeros((PARTS,), tl.float64))


@triton.jit
def mass_kernel(
    slots: tl.tensor,
    reals: tl.tensor,
    doubles: tl.tensor,
    values: tl.tensor,
    floats: tl.tensor,
    interval: tl.tensor,
    above: tl.tensor,
    masses: tl.tensor,
    SEARCHED: tl.constexpr,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    NUM_TILES: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """What one tile of one row weighs, of what is kept."""
    row, tile = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    temperature = tl.load(reals + slot * _WORDS + _TEMPERATURE)
    if temperature <= 0:
        return
    low = _LOWEST_KEY
    if SEARCHED:
        low, _, _ = _narrowed(interval, above, row, False, NUM_TILES, TILES, PARTS)
    peak = _peak(floats, row, NUM_TILES, TILES)
    scaled = _scaled(values, row, tile, peak, temperature, VOCAB, STRIDE, TILE)
    weights = _weights(scaled, low, tl.load(doubles + slot * _LONGS + _LOG_MIN_P))
    tl.store(masses + row * NUM_TILES + tile, tl.sum(weights))


@triton.jit
def choose_kernel(
    slots: tl.tensor,
    reals: tl.tensor,
    doubles: tl.tensor,
    values: tl.tensor,
    floats: tl.tensor,
    interval: tl.tensor,
    above: tl.tensor,
    masses: tl.tensor,
    words: tl.tensor,
    longs: tl.tensor,
    logits: tl.tensor,
    logits_stride: tl.tensor,
    numbers: tl.tensor,
    counts: tl.tensor,
    ints: tl.tensor,
    token_ids: tl.tensor,
    logprobs: tl.tensor,
    SEARCHED: tl.constexpr,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    NUM_TILES: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """One row's token: the largest, or the one in which the running mass passes the target."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        tl.store(token_ids + row, -1)
        tl.store(logprobs + row, float("nan"))
        return
    tiles = tl.arange(0, TILES)
    exists = tiles < NUM_TILES
    floats_of_row = floats + row * 3 * NUM_TILES + tiles
    ints_of_row = ints + row * 2 * NUM_TILES + tiles
    peaks = tl.load(floats_of_row, mask=exists, other=-_INFINITY)
    peak = tl.max(peaks)
    bad = tl.max(tl.load(ints_of_row + NUM_TILES, mask=exists, other=0))
    token_id = tl.load(ints + row * 2 * NUM_TILES + tl.argmax(peaks, 0, tie_break_left=True))

    temperature = tl.load(reals + slot * _WORDS + _TEMPERATURE)
    if temperature > 0:
        low = _LOWEST_KEY
        if SEARCHED:
            low, _, _ = _narrowed(interval, above, row, False, NUM_TILES, TILES, PARTS)
        of_tiles = tl.load(masses + row * NUM_TILES + tiles, mask=exists, other=0.0)
        ends = tl.cumsum(of_tiles, 0)
        number = tl.load(numbers + row)
        target = _uniform(tl.load(longs + slot * _LONGS + _KEY), number) * tl.max(ends)
        passed = tl.min(tl.where((ends > target) & (of_tiles > 0), tiles, NUM_TILES))
        last = tl.max(tl.where(of_tiles > 0, tiles, 0))
        tile = tl.minimum(passed, last)
        before = tl.sum(tl.where(tiles < tile, of_tiles, 0.0))
        scaled = _scaled(values, row, tile, peak, temperature, VOCAB, STRIDE, TILE)
        weights = _weights(scaled, low, tl.load(doubles + slot * _LONGS + _LOG_MIN_P))
        running = before + tl.cumsum(weights, 0)
        ids = tile * TILE + tl.arange(0, TILE)
        found = tl.min(tl.where((running > target) & (weights > 0), ids, VOCAB))
        token_id = tl.minimum(found, tl.max(tl.where(weights > 0, ids, 0)))

    token_id = tl.minimum(token_id, VOCAB - 1)
    usable = (bad == 0) & (peak > -_INFINITY)
    largests = tl.load(floats_of_row + NUM_TILES, mask=exists, other=-_INFINITY)
    largest = tl.max(largests)
    totals = tl.load(floats_of_row + 2 * NUM_TILES, mask=exists, other=0.0)
    total = tl.sum(tl.where(exists, totals * tl.exp(largests - largest), 0.0))
    raw = tl.load(logits + row.to(tl.int64) * logits_stride + token_id).to(tl.float32)
    tl.store(token_ids + row, tl.where(usable, token_id, -1))
    tl.store(logprobs + row, tl.where(usable, raw - largest - tl.log(total), float("nan")))
    counts_row = tl.load(words + slot * _WORDS + _COUNTS_ROW).to(tl.int64)
    if usable & (counts_row >= 0):
        place = counts + counts_row * VOCAB + token_id
        tl.store(place, tl.load(place) + 2)


@triton.jit
def _penalised(values: tl.tensor, codes: tl.tensor, reals: tl.tensor) -> tl.tensor:
    """`codes` as in SlotTables.counts; `reals` points to the slot's row."""
    counts = codes >> 1
    repetition = tl.load(reals + _REPETITION)
    penalised = tl.where(values > 0, tl.div_rn(values, repetition), values * repetition)
    penalised -= tl.load(reals + _FREQUENCY) * counts.to(tl.float32) + tl.where(
        counts > 0, tl.load(reals + _PRESENCE), 0.0
    )
    return tl.where(codes > 0, penalised, values)


@triton.jit
def _peak(floats: tl.tensor, row: tl.tensor, NUM_TILES: tl.constexpr, TILES: tl.constexpr) -> tl.tensor:
    """The row's largest logit after biases and penalties."""
    tiles = tl.arange(0, TILES)
    return tl.max(tl.load(floats + row * 3 * NUM_TILES + tiles, mask=tiles < NUM_TILES, other=-_INFINITY))


@triton.jit
def _scaled(
    values: tl.tensor,
    row: tl.tensor,
    tile: tl.tensor,
    peak: tl.tensor,
    temperature: tl.tensor,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """[TILE] relative to the row's largest and divided by the temperature: at most 0, and never -0."""
    ids = tile * TILE + tl.arange(0, TILE)
    loaded = tl.load(values + row.to(tl.int64) * STRIDE + ids, mask=ids < VOCAB, other=-_INFINITY)
    scaled = tl.div_rn(loaded - peak, temperature)
    return tl.where(scaled == 0, 0.0, scaled)


@triton.jit
def _keys(scaled: tl.tensor) -> tl.tensor:
    """Integers in the order of the floats."""
    bits = scaled.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _weights(scaled: tl.tensor, low: tl.tensor, log_min_p: tl.tensor) -> tl.tensor:
    """Relative to the most likely token's; 0 for what is not kept."""
    exact = scaled.to(tl.float64)
    return tl.where((_keys(scaled) >= low) & (exact >= log_min_p), tl.exp(exact), 0.0)


@triton.jit
def _step(low: tl.tensor, high: tl.tensor, PARTS: tl.constexpr) -> tl.tensor:
    """Keys in each part of [low, high]."""
    return (high - low) // PARTS + 1


@triton.jit
def _narrowed(
    interval: tl.tensor,
    above: tl.tensor,
    row: tl.tensor,
    SCALES: tl.constexpr,
    NUM_TILES: tl.constexpr,
    TILES: tl.constexpr,
    PARTS: tl.constexpr,
) -> tl.tensor:
    """(low, high, limit) after a pass. If it SCALES, the limit is a share of all that is at or above low."""
    low = tl.load(interval + row * 3).to(tl.int32)
    high = tl.load(interval + row * 3 + 1).to(tl.int32)
    limit = tl.load(interval + row * 3 + 2)
    if high > low:
        tiles, parts = tl.arange(0, TILES), tl.arange(0, PARTS)
        places = above + (row.to(tl.int64) * NUM_TILES + tiles[:, None]) * PARTS + parts[None, :]
        sums = tl.sum(tl.load(places, mask=tiles[:, None] < NUM_TILES, other=0.0), axis=0)
        if SCALES:
            limit *= tl.sum(tl.where(parts == PARTS - 1, sums, 0.0))
        step = _step(low, high, PARTS)
        thresholds = low + (parts + 1) * step - 1
        beyond = (sums >= limit) & (thresholds < high) & (parts < PARTS - 1)
        low += tl.sum(beyond.to(tl.int32)) * step
        high = tl.minimum(high, low + step - 1)
    return low, high, limit


@triton.jit
def _uniform(key: tl.tensor, number: tl.tensor) -> tl.tensor:
    """`batch.uniform` for one row."""
    mixed = key.to(tl.uint64, bitcast=True) + (number.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    mixed = mixed ^ (mixed >> 31)
    return (mixed >> 11).to(tl.float64) * 1.1102230246251565e-16
