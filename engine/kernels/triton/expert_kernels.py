"""The products of experts: rows sorted by expert, a tile of rows that share one, sums over each row's choices.

A *pair* is a row and one of its choices, numbered row by row. The device alone knows how many tiles an expert has: the
launch is as large as any step of so many pairs can need, and tiles of no expert end at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.engine.kernels.triton.activation import activate
from penstock.engine.kernels.triton.packed_kernels import add_products, finished

NO_EXPERT = tl.constexpr(-1)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def sort_pairs_kernel(
    ids: tl.tensor,
    order: tl.tensor,
    tile_experts: tl.tensor,
    num_pairs: tl.tensor,
    num_tiles: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> None:
    """Lists the pairs of one expert after the pairs of earlier experts, in order, and its tiles.

    Args:
        order: [num_pairs] the pairs, by expert, without pairs of no expert here.
        tile_experts: [3, num_tiles] the expert of each tile, or NO_EXPERT; where its pairs begin in `order`, and end.
    """
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, num_pairs, BLOCK):
        places = start + tl.arange(0, BLOCK)
        found = tl.load(ids + places, mask=places < num_pairs, other=NO_EXPERT)
        counts += tl.histogram(found, BINS, mask=(found >= 0) & (found < NUM_EXPERTS))
    first = tl.sum(tl.where(bins < expert, counts, 0))
    end = first + tl.sum(tl.where(bins == expert, counts, 0))
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    tile = tl.sum(tl.where(bins < expert, tiles, 0))
    for begin in range(first, end, BLOCK_M):
        tl.store(tile_experts + tile, expert)
        tl.store(tile_experts + num_tiles + tile, begin)
        tl.store(tile_experts + 2 * num_tiles + tile, tl.minimum(begin + BLOCK_M, end))
        tile += 1
    if expert == NUM_EXPERTS - 1:
        for unused in range(tile, num_tiles, BLOCK):
            free = unused + tl.arange(0, BLOCK)
            tl.store(tile_experts + free, NO_EXPERT, mask=free < num_tiles)
    for start in range(0, num_pairs, BLOCK):
        places = start + tl.arange(0, BLOCK)
        found = tl.load(ids + places, mask=places < num_pairs, other=NO_EXPERT)
        is_own = (found == expert).to(tl.int32)
        tl.store(order + first - 1 + tl.cumsum(is_own, 0), places, mask=is_own > 0)
        first += tl.sum(is_own)


@triton.jit(do_not_specialize=["num_tiles"])
def expert_linear_kernel(
    out: tl.tensor,
    x: tl.tensor,
    codes: tl.tensor,
    scale: tl.tensor,
    zero: tl.tensor,
    offset: tl.tensor,
    permutation: tl.tensor,
    bias: tl.tensor,
    pair_weights: tl.tensor,
    ids: tl.tensor,
    order: tl.tensor,
    tile_experts: tl.tensor,
    num_tiles: tl.tensor,
    num_steps: tl.tensor,
    num_outputs: tl.tensor,
    num_rows: tl.tensor,
    out_features: tl.tensor,
    in_features: tl.tensor,
    row_bytes: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    NUM_READERS: tl.constexpr,
    CODE: tl.constexpr,
    SCALES: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    KIND: tl.constexpr,
    IS_GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Multiplies the rows of one tile of pairs with BLOCK_N of the num_rows rows of their expert.

    Sums get their bias, go through the activation, and are multiplied with the weights of their pairs, each where there
    is one, before they are rounded. Without an `order`, every pair is a tile of its own: the pairs of a single row.

    Args:
        out: [pairs, out_features]
        x: [pairs / NUM_READERS, in_features]: so many pairs read one row.
        num_outputs: the rows of all experts.
        KIND: the function of `Activation`, or "" for none.
    """
    tile = tl.program_id(1)
    columns = tl.arange(0, BLOCK_M)[None, :]
    if order is None:
        expert = tl.load(ids + tile)
        is_row = columns < 1
        pairs = tile + tl.zeros([1, BLOCK_M], tl.int32)
    else:
        expert = tl.load(tile_experts + tile)
    if (expert < 0) | (expert >= NUM_EXPERTS):
        return
    if order is not None:
        places = tl.load(tile_experts + num_tiles + tile) + columns
        is_row = places < tl.load(tile_experts + 2 * num_tiles + tile)
        pairs = tl.load(order + places, mask=is_row, other=0)
    rows_of_expert = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    read = expert * num_rows + tl.minimum(rows_of_expert, num_rows - 1)
    own_permutation = None if permutation is None else permutation + expert * in_features
    summed = add_products(
        x + (pairs // NUM_READERS).to(tl.int64) * in_features,
        is_row,
        codes,
        scale,
        zero,
        offset,
        own_permutation,
        None,
        read,
        num_outputs,
        0,
        num_steps,
        in_features,
        row_bytes,
        CODE,
        SCALES,
        GROUP_SIZE,
        BLOCK_N,
        BLOCK_M,
        BLOCK_K,
    )
    made = finished(summed, scale if SCALES == "rows" else None, None, bias, read, pairs, is_row)
    if KIND != "":
        made = _activated(made, KIND, IS_GATED, LIMIT, ALPHA, SHIFT, BLOCK_N, BLOCK_M)
    if pair_weights is not None:
        made *= tl.load(pair_weights + pairs, mask=is_row, other=0.0)
    NUM_MADE: tl.constexpr = BLOCK_N // 2 if IS_GATED else BLOCK_N
    outputs = tl.program_id(0) * NUM_MADE + tl.arange(0, NUM_MADE)[:, None]
    target = out + pairs.to(tl.int64) * out_features + outputs
    tl.store(target, made.to(out.dtype.element_ty), mask=is_row & (outputs < out_features))


@triton.jit
def sum_choices_kernel(
    out: tl.tensor,
    made: tl.tensor,
    ids: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    NUM_CHOICES: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Adds the outputs of the experts of one row, in the order of choice."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(NUM_CHOICES):
        pair = row * NUM_CHOICES + choice
        expert = tl.load(ids + pair)
        end = tl.where((expert >= 0) & (expert < NUM_EXPERTS), SIZE, 0)
        total += tl.load(made + pair * SIZE + columns, mask=columns < end, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + columns, total.to(out.dtype.element_ty), mask=columns < SIZE)


@triton.jit
def _activated(
    made: tl.tensor,
    KIND: tl.constexpr,
    IS_GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> tl.tensor:
    """Applies `Activation` to sums [BLOCK_N, BLOCK_M]; if it is gated, 8 gates and 8 ups alternate."""
    if IS_GATED:
        blocks = made.reshape(BLOCK_N // 16, 2, 8, BLOCK_M).permute(0, 2, 3, 1)
        gate, up = tl.split(blocks)
        gate = gate.reshape(BLOCK_N // 2, BLOCK_M)
        up = up.reshape(BLOCK_N // 2, BLOCK_M)
    else:
        gate = made
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    active = tl.where(gate < 0, 0.0, gate * gate) if KIND == "relu2" else activate(gate, KIND, ALPHA)
    if IS_GATED:
        if LIMIT > 0:
            up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
            up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
        active *= up + SHIFT
    return active
