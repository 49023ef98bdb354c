"""One row in the sampling kernels: its parameters, its logits after biases and penalties, its noise."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.engine import hashing
from penstock.engine.sampling import reference
from penstock.engine.sampling.tables import ROW


def _place(name: str) -> tl.constexpr:
    """Index of a field of a seat's parameters, in units of its own size."""
    dtype, offset = ROW.fields[name][:2]  # type: ignore[index]
    return tl.constexpr(offset // dtype.itemsize)


WORDS = tl.constexpr(ROW.itemsize // 4)
"""The int32 numbers of a seat's parameters."""
TOP_P_AT, MIN_P_DEPTH_AT, COUNTS_ROW_AT = _place("top_p"), _place("min_p_depth"), _place("counts_row")
_TEMPERATURE, _TOP_K, _MIN_TOKENS = _place("temperature"), _place("top_k"), _place("min_tokens")
_REPETITION, _PRESENCE, _FREQUENCY = _place("repetition"), _place("presence"), _place("frequency")
_NUM_BIASES = _place("num_biases")
_BIASES = tl.constexpr(128)
"""Biased tokens that a program reads at a time."""
INFINITY = tl.constexpr(float("inf"))
_LARGEST = tl.constexpr(reference.LARGEST)
_GAMMA, _MIX_1, _MIX_2 = (tl.constexpr(n) for n in (hashing.GAMMA, hashing.MIX_1, hashing.MIX_2))
_HASH_1, _HASH_2 = tl.constexpr(hashing.HASH_1), tl.constexpr(hashing.HASH_2)


@triton.jit
def real_at(words: tl.tensor, AT: tl.constexpr) -> tl.tensor:
    """The float32 parameter at a place of the seat that is pointed to."""
    return tl.load(words + AT).to(tl.float32, bitcast=True)


@triton.jit
def filters_of(words: tl.tensor, TOP_K: tl.constexpr, TOP_P: tl.constexpr, VOCAB: tl.constexpr) -> tl.tensor:
    """(temperature, top_k or 0 if it keeps everything, has top-p, has any filter) of the seat that is pointed to."""
    temperature = real_at(words, _TEMPERATURE)
    top_k = tl.load(words + _TOP_K)
    top_k = tl.where((temperature > 0) & (top_k < VOCAB) & TOP_K, tl.maximum(top_k, 0), 0)
    has_top_p = (temperature > 0) & (real_at(words, TOP_P_AT) < 1) & TOP_P
    has_min_p = (temperature > 0) & (real_at(words, MIN_P_DEPTH_AT) < INFINITY) & (TOP_K | TOP_P)
    return temperature, top_k, has_top_p, (top_k > 0) | has_top_p | has_min_p


@triton.jit
def store_processed_logits(
    logits_row: tl.tensor,
    words: tl.tensor,
    number: tl.tensor,
    biases: tl.tensor,
    counts: tl.tensor,
    mask_row: tl.tensor,
    values_row: tl.tensor,
    first: tl.tensor,
    MASKED: tl.constexpr,
    END: tl.constexpr,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Writes one tile of a row after biases, penalties and its mask to `values_row`, if the row has any.

    Both rows are where token 0 would be; there are logits of tokens below END.
    """
    counts_row = tl.load(words + COUNTS_ROW_AT).to(tl.int64)
    num_biases = tl.load(words + _NUM_BIASES)
    if (counts_row >= 0) | (num_biases > 0) | MASKED:
        ids = first + tl.arange(0, TILE)
        raw = tl.load(logits_row + ids, mask=ids < END, other=0.0).to(tl.float32)
        tl.store(values_row + ids, raw, mask=ids < END)
        is_early = number < tl.load(words + _MIN_TOKENS)
        tl.debug_barrier()
        for start in range(0, num_biases, _BIASES):
            places = start + tl.arange(0, _BIASES)
            code = tl.load(biases + 2 * places, mask=places < num_biases, other=END)
            value = tl.load(biases + 2 * places + 1, mask=places < num_biases, other=0)
            at = tl.where(code < 0, -1 - code, code)
            here = (at >= first) & (at < first + TILE) & (at < END)
            bias = tl.where((code < 0) & is_early, -INFINITY, value.to(tl.float32, bitcast=True))
            unbiased = tl.load(logits_row + at, mask=here, other=0.0).to(tl.float32)
            tl.store(values_row + at, unbiased + bias, mask=here)
        tl.debug_barrier()
        if counts_row >= 0:
            codes = tl.load(counts + counts_row * VOCAB + ids, mask=ids < END, other=0)
            biased = tl.load(values_row + ids, mask=ids < END, other=0.0)
            tl.store(values_row + ids, _penalised(biased, codes, words), mask=ids < END)
            tl.debug_barrier()
        if MASKED:
            word = tl.load(mask_row + (ids >> 5), mask=ids < END, other=0)
            unmasked = tl.load(values_row + ids, mask=ids < END, other=0.0)
            masked = tl.where(((word >> (ids & 31)) & 1) == 0, -INFINITY, unmasked)
            tl.store(values_row + ids, masked, mask=ids < END)
            tl.debug_barrier()


@triton.jit
def rows_of(
    logits: tl.tensor, logits_stride: tl.tensor, values: tl.tensor, row: tl.tensor, VOCAB: tl.constexpr
) -> tl.tensor:
    """(a row of logits, where it stands after biases and penalties)."""
    row = row.to(tl.int64)
    return logits + row * logits_stride, values + row * ((VOCAB + 15) // 16 * 16)


@triton.jit
def processed_logits(
    logits_row: tl.tensor,
    words: tl.tensor,
    values_row: tl.tensor,
    ids: tl.tensor,
    MASKED: tl.constexpr,
    END: tl.constexpr,
) -> tl.tensor:
    """Logits as `store_processed_logits` left them, minus infinity beyond the vocabulary."""
    if (tl.load(words + COUNTS_ROW_AT) >= 0) | (tl.load(words + _NUM_BIASES) > 0) | MASKED:
        loaded = tl.load(values_row + ids, mask=ids < END, other=-INFINITY)
    else:
        loaded = tl.load(logits_row + ids, mask=ids < END, other=-INFINITY).to(tl.float32)
    return loaded


@triton.jit
def gumbel_noise(words: tl.tensor, number: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """`noise.gumbel` of the hashes of token ids, under noise key `number` of the seat that is pointed to.

    The generator's state comes first in a seat's parameters.

    log(1 - u) is log(y) + r, where r is the part lost when 1 - u was rounded to y: this is exact within half a unit in
    the last place of the result, and saves the reference's division.
    """
    state = tl.load(words).to(tl.uint32, bitcast=True).to(tl.uint64)
    state |= tl.load(words + 1).to(tl.uint32, bitcast=True).to(tl.uint64) << 32
    key = state + (number.to(tl.uint64) + 1) * _GAMMA
    key = (key ^ (key >> 30)) * _MIX_1
    key = (key ^ (key >> 27)) * _MIX_2
    key = key ^ (key >> 31)
    low, high = (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32)
    bits = _finalized(_finalized(ids.to(tl.uint32) ^ low) ^ high)
    is_low = bits < 0x80000000
    u = (tl.where(is_low, bits, 0xFFFFFFFF - bits).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    y = tl.where(is_low, 1.0 - u, u)
    lost = tl.where(is_low, (1.0 - y) - u, 0.0)
    return -tl.log(-(tl.log(y) + lost))


@triton.jit
def _penalised(values: tl.tensor, codes: tl.tensor, words: tl.tensor) -> tl.tensor:
    """`codes` are as in SamplingTables.counts; `words` points to the seat's row."""
    counts = codes >> 1
    repetition = real_at(words, _REPETITION)
    result = tl.where(values > 0, tl.div_rn(values, repetition), values * repetition)
    presence = tl.where(counts > 0, real_at(words, _PRESENCE), 0.0)
    result -= real_at(words, _FREQUENCY) * counts.to(tl.float32) + presence
    result = tl.minimum(tl.maximum(result, -_LARGEST), _LARGEST)
    return tl.where((codes > 0) & (values > -INFINITY), result, values)


@triton.jit
def _finalized(values: tl.tensor) -> tl.tensor:
    """`noise._finalized`, of uint32."""
    mixed = values ^ (values >> 16)
    mixed = mixed * _HASH_1
    mixed = mixed ^ (mixed >> 13)
    mixed = mixed * _HASH_2
    return mixed ^ (mixed >> 16)
