"""Queries, keys and values between their projection and attention, in one launch: norm, rotation, cache.

Inside a block of the cache, keys and values lie as in the reference: [num_kv_heads, block_size, head_dim]. For a
quantized cache they are rounded as in the reference, too, and their scales stored after them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.kernels.batch import Batch
from penstock.engine.kernels.kv_cache import KVFormat, KVShape, numbers_and_scales
from penstock.engine.kernels.reference import TokenPlaces
from penstock.engine.kernels.triton.norms import rms_norm
from penstock.engine.kernels.triton.numbers import rotated, rotated_back, rounded_to
from penstock.engine.quant.rotation import block_size

HEADS_PER_PROGRAM = 8
OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False, "maxnreg": 64}
"""Without maxnreg, ptxas keeps to 32 registers, and puts off loads until it has room for them."""
_PACKED = OPTIONS | {"maxnreg": 128}
"""Numbers in 4 bits take more; with fewer, some would be spilled."""
ROWS_PER_PROGRAM = 128


def rotate_and_write(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    places: TokenPlaces,
    layer_kv: Tensor | None,
    shape: KVShape,
    *,
    norms_last: bool = False,
    norms_values: bool = False,
    spreads: bool = False,
) -> Tensor:
    """Equals `reference.rotate_and_write`; it allocates nothing but the queries, and the norms of rows.

    A row with place -1 pads the batch: nothing is written to the cache for it, and its queries are of no use.
    """
    num_kv_heads = 0 if layer_kv is None else shape.num_kv_heads
    num_tokens, num_heads = qkv.shape[0], qkv.shape[1] // shape.head_dim - 2 * num_kv_heads
    queries = qkv.new_empty((num_tokens, num_heads, shape.head_dim))
    if q_norm is not None and k_norm is not None and q_norm.numel() != shape.head_dim:
        sizes = [q_norm.numel(), k_norm.numel(), shape.num_kv_heads * shape.head_dim]
        q, k, v = torch.split(qkv, sizes, dim=1)
        qkv = torch.cat((rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps), v), dim=1)
        q_norm = k_norm = None
    if num_tokens:
        assert not norms_values or (q_norm is not None and not norms_last)
        numbers, scales = (None, None) if layer_kv is None else numbers_and_scales(layer_kv)
        values_offset, block_stride = (0, 0) if numbers is None else numbers.stride()[:2]
        format = None if numbers is None else KVFormat.of(numbers.dtype)
        is_packed = format is not None and format.is_packed
        groups = triton.cdiv(num_heads + 2 * num_kv_heads, HEADS_PER_PROGRAM)
        rotate_and_write_kernel[num_tokens, groups](
            qkv.contiguous(),
            q_norm,
            q_norm if k_norm is None else k_norm,
            places.positions,
            places.in_cache,
            places.cos,
            places.sin,
            places.q_scales,
            queries,
            numbers,
            scales,
            values_offset,
            eps,
            NORMS=q_norm is not None,
            NORMS_LAST=norms_last,
            NORMS_VALUES=norms_values,
            SPREAD=block_size(shape.head_dim // 2) if spreads else 0,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=shape.head_dim,
            BLOCK_SIZE=shape.block_size,
            BLOCK_STRIDE=block_stride,
            SHARING=shape.group(format) if is_packed and format is not None else 0,
            GROUP=HEADS_PER_PROGRAM,
            PAIRS=triton.next_power_of_2(shape.head_dim // 2),
            **(_PACKED if is_packed else OPTIONS),
        )
    return queries


def spread_back(attended: Tensor, head_dim: int) -> None:
    """`reference.spread_back` of [T, num_heads * head_dim], in place."""
    half, rows = head_dim // 2, 2 * attended.numel() // head_dim
    if rows:
        spread_back_kernel[(triton.cdiv(rows, 2 * HEADS_PER_PROGRAM),)](
            attended,
            rows,
            SPREAD=block_size(half),
            HALF=half,
            ROWS=2 * HEADS_PER_PROGRAM,
            PAIRS=triton.next_power_of_2(half),
            num_warps=4,
            enable_fp_fusion=False,
        )


def kv_places(batch: Batch, block_size: int) -> Tensor:
    """Equals `reference.kv_places`, in one launch; it allocates nothing but its result.

    Rows after the last sequence's, and rows with a negative position, have place -1. Sequences without rows may be
    anywhere.
    """
    num_tokens, num_sequences = batch.positions.numel(), batch.block_tables.shape[0]
    in_cache = torch.empty_like(batch.positions, dtype=torch.int64)
    if num_tokens:
        kv_places_kernel[(triton.cdiv(num_tokens, ROWS_PER_PROGRAM),)](
            batch.positions,
            batch.query_starts,
            batch.block_tables,
            in_cache,
            num_tokens,
            num_sequences,
            num_sequences.bit_length(),
            batch.block_tables.stride(0),
            BLOCK_SIZE=block_size,
            ROWS=ROWS_PER_PROGRAM,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return in_cache


@triton.jit
def rotate_and_write_kernel(
    qkv: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    positions: tl.tensor,
    in_cache: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q_scales: tl.tensor,
    queries: tl.tensor,
    layer_kv: tl.tensor,
    layer_scales: tl.tensor,
    values_offset: tl.tensor,
    eps: tl.tensor,
    NORMS: tl.constexpr,
    NORMS_LAST: tl.constexpr,
    NORMS_VALUES: tl.constexpr,
    SPREAD: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    SHARING: tl.constexpr,
    GROUP: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    """Rotates GROUP heads of one token, and stores them; masks tell queries, keys and values apart.

    As in the reference, all but the norm's scale is computed in the dtype of the rows, and rounded at each step. All
    loads are issued before the first of them is used, but for the angles, whose offset is loaded first. From block to
    block of the cache there are BLOCK_STRIDE elements. In a cache of 4 bits SHARING neighbours share a scale.
    """
    dtype: tl.constexpr = qkv.dtype.element_ty
    half: tl.constexpr = HEAD_DIM // 2
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * GROUP + tl.arange(0, GROUP)[:, None]
    pairs = tl.arange(0, PAIRS)[None, :]
    is_query = heads < NUM_HEADS
    is_value = heads >= NUM_HEADS + NUM_KV_HEADS
    in_head = pairs < half
    inside = in_head & (heads < NUM_HEADS + 2 * NUM_KV_HEADS)

    # A row that pads a batch may have any position; its angle is of no use, but must be read from somewhere.
    position = tl.maximum(tl.load(positions + row), 0).to(tl.int64)
    angle = position * half + pairs
    stored_at = tl.load(in_cache + row)
    source = qkv + row * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM) + heads * HEAD_DIM + pairs
    first = tl.load(source, mask=inside, other=0.0)
    second = tl.load(source + half, mask=inside, other=0.0)
    if NORMS:
        q_first = tl.load(q_norm + pairs, mask=in_head, other=0.0)
        q_second = tl.load(q_norm + half + pairs, mask=in_head, other=0.0)
        k_first = tl.load(k_norm + pairs, mask=in_head, other=0.0)
        k_second = tl.load(k_norm + half + pairs, mask=in_head, other=0.0)
    cosine = tl.load(cos + angle, mask=in_head, other=0.0).to(dtype)
    sine = tl.load(sin + angle, mask=in_head, other=0.0).to(dtype)

    ready_first, ready_second = first, second
    if NORMS_LAST:
        ready_first, ready_second = first * cosine - second * sine, second * cosine + first * sine
    if NORMS:
        wide_first, wide_second = ready_first.to(tl.float32), ready_second.to(tl.float32)
        squares = wide_first * wide_first + wide_second * wide_second
        scale = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / HEAD_DIM + eps)
        if NORMS_VALUES:
            first, second = (wide_first * scale).to(dtype), (wide_second * scale).to(dtype)
        of_first, of_second = tl.where(is_query, q_first, k_first), tl.where(is_query, q_second, k_second)
        ready_first = (of_first * (wide_first * scale).to(of_first.dtype)).to(dtype)
        ready_second = (of_second * (wide_second * scale).to(of_second.dtype)).to(dtype)
    if not NORMS_LAST:
        turned_first = ready_first * cosine - ready_second * sine
        ready_second = ready_second * cosine + ready_first * sine
        ready_first = turned_first
    if q_scales is not None:
        by = tl.where(is_query, tl.load(q_scales + position), 1.0)
        ready_first = (ready_first.to(tl.float32) * by).to(dtype)
        ready_second = (ready_second.to(tl.float32) * by).to(dtype)

    if SPREAD > 0:
        first, second = first.to(tl.float32), second.to(tl.float32)
        if SHARING > 0:  # values are spread, too
            ready_first = tl.where(is_value, first, ready_first.to(tl.float32))
            ready_second = tl.where(is_value, second, ready_second.to(tl.float32))
        ready_first = rotated(ready_first.to(tl.float32), GROUP, PAIRS, SPREAD)
        ready_second = rotated(ready_second.to(tl.float32), GROUP, PAIRS, SPREAD)
        if SHARING > 0:
            first, second = ready_first, ready_second
    first = tl.where(is_value, first, ready_first)
    second = tl.where(is_value, second, ready_second)

    query = queries + row * (NUM_HEADS * HEAD_DIM) + heads * HEAD_DIM + pairs
    UNSPREAD: tl.constexpr = 1.0 / SPREAD if SPREAD > 0 else 1.0
    tl.store(query, (first * UNSPREAD).to(dtype), mask=inside & is_query)
    tl.store(query + half, (second * UNSPREAD).to(dtype), mask=inside & is_query)

    if layer_kv is not None:
        first_stored = tl.where(stored_at >= 0, NUM_HEADS, NUM_HEADS + 2 * NUM_KV_HEADS)
        is_stored = (heads >= first_stored) & (heads < NUM_HEADS + 2 * NUM_KV_HEADS)
        stored = inside & is_stored
        kv_head = heads - tl.where(is_value, NUM_HEADS + NUM_KV_HEADS, NUM_HEADS)
        NUMBERS: tl.constexpr = NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
        block, token = stored_at // BLOCK_SIZE, kv_head * BLOCK_SIZE + stored_at % BLOCK_SIZE
        kv_dtype: tl.constexpr = layer_kv.dtype.element_ty
        if SHARING > 0:
            place = block * BLOCK_STRIDE + token * half + is_value * values_offset
            SCALES: tl.constexpr = HEAD_DIM // SHARING
            of_token = (
                block * (BLOCK_STRIDE // 2) + NUMBERS // 4 + token * SCALES + is_value * (values_offset // 2)
            )
            _store_packed(
                first, layer_kv + place, layer_scales + of_token, is_stored, half, SHARING, GROUP, PAIRS
            )
            _store_packed(
                second,
                layer_kv + place + half // 2,
                layer_scales + of_token + SCALES // 2,
                is_stored,
                half,
                SHARING,
                GROUP,
                PAIRS,
            )
        else:
            place = block * BLOCK_STRIDE + token * HEAD_DIM + is_value * values_offset
            if layer_scales is not None:
                first, second = first.to(tl.float32), second.to(tl.float32)
                scale = scale_of(first, second)
                first, second = rounded_by(first, scale), rounded_by(second, scale)
                of_token = (
                    block * (BLOCK_STRIDE // 4) + NUMBERS // 4 + token + is_value * (values_offset // 4)
                )
                tl.store(layer_scales + of_token, scale, mask=is_stored)
            tl.store(layer_kv + place + pairs, first.to(kv_dtype), mask=stored)
            tl.store(layer_kv + place + pairs + half, second.to(kv_dtype), mask=stored)


@triton.jit
def _store_packed(
    x: tl.tensor,
    places: tl.tensor,
    scale_places: tl.tensor,
    is_stored: tl.tensor,
    half: tl.constexpr,
    SHARING: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    """Stores halves of heads [ROWS, PAIRS] in 4 bits, and their scales, as `reference.quantize_groups` has them.

    The bytes of a row begin at its place [ROWS, 1], and so do its scales.
    """
    GROUPS: tl.constexpr = PAIRS // SHARING
    x = x.to(tl.float32).reshape(ROWS, GROUPS, SHARING)
    high, low = tl.max(x, axis=2, keep_dims=True), tl.min(x, axis=2, keep_dims=True)
    nans = tl.max((x != x).to(tl.int32), axis=2, keep_dims=True)
    scale = (tl.where(high >= -low, high, low) * -0.125).to(tl.float16)
    scale = tl.where(nans > 0, float("nan"), scale).to(tl.float16)
    scaled = tl.div_rn(x, tl.broadcast_to(scale.to(tl.float32), x.shape))
    numbers = rounded_to(tl.where(scaled == scaled, scaled, 0.0), 8.0, tl.int8)
    numbers = (tl.minimum(numbers.to(tl.int32), 7) + 8).reshape(ROWS, PAIRS // 2, 2)
    even, odd = numbers.split()
    bytes = tl.arange(0, PAIRS // 2)[None, :]
    tl.store(places + bytes, (even | odd << 4).to(tl.uint8), mask=is_stored & (bytes < half // 2))
    groups = tl.arange(0, GROUPS)[None, :]
    tl.store(scale_places + groups, scale.reshape(ROWS, GROUPS), mask=is_stored & (groups < half // SHARING))


@triton.jit(do_not_specialize=["num_rows"])
def spread_back_kernel(
    attended: tl.tensor,
    num_rows: tl.tensor,
    SPREAD: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    """Spreads ROWS halves of heads back, in place."""
    rows, dims = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, PAIRS)[None, :]
    places, inside = attended + rows.to(tl.int64) * HALF + dims, (rows < num_rows) & (dims < HALF)
    x = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    made = rotated_back(x, ROWS, PAIRS, SPREAD) * (1.0 / SPREAD)
    tl.store(places, made.to(attended.dtype.element_ty), mask=inside)


@triton.jit
def scale_of(first: tl.tensor, second: tl.tensor) -> tl.tensor:
    """The scale of each head, whose halves these are: its largest magnitude over 127, or no number."""
    largest = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), axis=1, keep_dims=True)
    nans = tl.max(((first != first) | (second != second)).to(tl.int32), axis=1, keep_dims=True)
    return tl.div_rn(tl.where(nans > 0, float("nan"), largest), 127.0)


@triton.jit
def rounded_by(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Numbers of 8 bits that stand for x, given the scale of each head."""
    scaled = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    return rounded_to(tl.where(scaled == scaled, scaled, 0.0), 127.0, tl.int8)


@triton.jit(do_not_specialize=["num_tokens", "num_sequences", "num_halvings", "table_width"])
def kv_places_kernel(
    positions: tl.tensor,
    query_starts: tl.tensor,
    block_tables: tl.tensor,
    in_cache: tl.tensor,
    num_tokens: tl.tensor,
    num_sequences: tl.tensor,
    num_halvings: tl.tensor,
    table_width: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_tokens
    # The sequence of a row is the first that ends after it.
    low = tl.zeros([ROWS], tl.int32)
    high = low + num_sequences
    for _ in range(num_halvings):
        middle = (low + high) // 2
        ends_after = tl.load(query_starts + 1 + middle, mask=middle < num_sequences, other=0) > rows
        high = tl.where(ends_after, middle, high)
        low = tl.where(ends_after | (low == high), low, middle + 1)
    position = tl.load(positions + rows, mask=inside, other=-1)
    kept = (low < num_sequences) & (position >= 0)
    entry = low.to(tl.int64) * table_width + position // BLOCK_SIZE
    block = tl.load(block_tables + entry, mask=kept, other=0).to(tl.int64)
    tl.store(in_cache + rows, tl.where(kept, block * BLOCK_SIZE + position % BLOCK_SIZE, -1), mask=inside)
