"""Takes prompts through layers with a state, in tiles: 64 rows of a state all at once.

A tile is the rows of a sequence whose positions have the same quotient by 64: the first and the last of a step may be
parts of one. Rows have the numbers of `state_kernels`: 0 is the first of the step, and replayed rows come before. With
G the logarithm of a state's remaining share, row by row of the tile, and S the state before it:

    A = strictly lower part of b * exp(G - G^T) * (k k^T)      both of a gated delta net: b are its betas,
    U, W = (I + A)^-1 [b * v, b * exp(G) * k]                  and v' = U - W S; of Mamba-2, v' = step * v
    made = exp(G) * (q S) + lower part of (exp(G - G^T) * (q k^T)) v'
    S = exp(G_last) * S + (exp(G_last - G) * k)^T v'

Yang et al., "Gated Delta Networks", 2024, and Dao and Gu, "Transformers are SSMs", 2024, derive it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.engine.kernels.triton.state_kernels import NEVER, next_save
from penstock.engine.kernels.triton.state_tile_rows import TILE, num_tiles_of, offset_of

PART = tl.constexpr(16)
"""Rows of which a triangle is inverted one by one; PARTS of them are a tile."""
PARTS = tl.constexpr(4)


@triton.jit
def solve_tiles_kernel(
    tiles: tl.tensor,
    heads: tl.tensor,
    values: tl.tensor,
    found: tl.tensor,
    decays: tl.tensor,
    weights: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    IS_TILED: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
) -> None:
    """Computes U, in the place of the values of one head in one tile, and W.

    Args:
        found: [tiles, NUM_HEADS, TILE, BLOCK_KEYS] W: times the state, its values for these keys.
    """
    head = tl.program_id(0)
    tile = tl.program_id(1).to(tl.int64)
    if tl.load(tiles + 2 * tile) < 0:
        return
    key_head = head % NUM_KEY_HEADS if IS_TILED else head // (NUM_HEADS // NUM_KEY_HEADS)
    numbers = tl.arange(0, TILE)
    keys = tl.arange(0, BLOCK_KEYS)
    columns = tl.arange(0, BLOCK_VALUES)
    dtype = heads.dtype.element_ty
    of_keys = (tile * (2 * NUM_KEY_HEADS) + NUM_KEY_HEADS + key_head) * TILE + numbers[:, None]
    of_head = (tile * NUM_HEADS + head) * TILE + numbers
    k = tl.load(heads + of_keys * BLOCK_KEYS + keys[None, :])
    left = tl.load(decays + of_head)
    beta = tl.load(weights + of_head)
    is_before = numbers[:, None] > numbers[None, :]
    gaps = tl.where(is_before, left[:, None] - left[None, :], 0.0)
    alike = tl.dot(k, tl.trans(k))
    inverse = _inverse(tl.where(is_before, alike * beta[:, None] * tl.exp(gaps), 0.0))

    places = values + of_head[:, None] * BLOCK_VALUES + columns[None, :]
    v = tl.load(places)
    inverse *= beta[None, :]
    tl.store(places, tl.dot(inverse.to(dtype), v).to(dtype))
    inverse *= tl.exp(left)[None, :]
    w = tl.dot(inverse.to(dtype), k)
    tl.store(found + of_head[:, None] * BLOCK_KEYS + keys[None, :], w.to(dtype))


@triton.jit(do_not_specialize=["num_saves", "num_sequences"])
def carry_state_kernel(
    heads: tl.tensor,
    values: tl.tensor,
    found: tl.tensor,
    decays: tl.tensor,
    weights: tl.tensor,
    befores: tl.tensor,
    state: tl.tensor,
    slot_stride: tl.tensor,
    query_starts: tl.tensor,
    context_lens: tl.tensor,
    slots: tl.tensor,
    saves: tl.tensor,
    num_saves: tl.tensor,
    num_sequences: tl.tensor,
    IS_DELTA: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    IS_TILED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
    COLUMNS: tl.constexpr,
    FEWEST: tl.constexpr,
    SEQUENCES: tl.constexpr,
    SAVES: tl.constexpr,
) -> None:
    """Takes some columns of the state of one head through the tiles of one sequence; no other program has these.

    Where the state after some rows of a tile is wanted, the slot gets that before the tile: `finish_states_kernel` does
    the rest, so that this loop, which is all that takes its time row after row, is the same for all.

    Args:
        values: of a gated delta net, U; v' takes its place.
        befores: [tiles, NUM_HEADS, BLOCK_KEYS, BLOCK_VALUES] the state before each tile.
    """
    sequence = tl.program_id(1)
    start = tl.load(query_starts + sequence)
    num_rows = tl.load(query_starts + sequence + 1) - start
    if num_rows < FEWEST:
        return
    NUM_BLOCKS: tl.constexpr = BLOCK_VALUES // COLUMNS
    head = tl.program_id(0) // NUM_BLOCKS
    key_head = head % NUM_KEY_HEADS if IS_TILED else head // (NUM_HEADS // NUM_KEY_HEADS)
    numbers = tl.arange(0, TILE)
    keys = tl.arange(0, BLOCK_KEYS)
    columns = tl.program_id(0) % NUM_BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    first_tile = num_rows * 0
    for first in range(0, sequence, SEQUENCES):
        others = first + tl.arange(0, SEQUENCES)
        first_tile += tl.sum(num_tiles_of(others, query_starts, context_lens, slots, sequence, FEWEST))
    num_tiles = num_tiles_of(sequence, query_starts, context_lens, slots, num_sequences, FEWEST)
    begin = -offset_of(sequence, num_rows, context_lens, slots)

    of_state = (head * KEY_DIM + keys[:, None]) * VALUE_DIM + columns[None, :]
    inside = (keys < KEY_DIM)[:, None] & (columns < VALUE_DIM)[None, :]
    stop = tl.full((), NEVER, tl.int32)
    certain = num_rows
    if slots is None:
        matrix = tl.zeros([BLOCK_KEYS, COLUMNS], tl.float32)
    else:
        source = tl.load(slots + 4 * sequence).to(tl.int64) * slot_stride
        certain = tl.load(slots + 4 * sequence + 3)
        matrix = tl.load(state + source + of_state, mask=inside, other=0.0)
        stop = tl.minimum(certain, next_save(saves, num_saves, sequence, -1, SAVES))
    tile = num_rows * 0
    while tile < num_tiles:
        if slots is not None:
            while stop <= tl.minimum(begin + (tile + 1) * TILE, num_rows):
                if stop == certain:
                    slot = tl.load(slots + 4 * sequence + 1)
                    if slot > 0:
                        tl.store(state + slot.to(tl.int64) * slot_stride + of_state, matrix, mask=inside)
                for save in range(0, num_saves):
                    if tl.load(saves + 4 * save) == sequence:
                        slot = tl.load(saves + 4 * save + 2)
                        if (tl.load(saves + 4 * save + 1) == stop) & (slot > 0):
                            tl.store(state + slot.to(tl.int64) * slot_stride + of_state, matrix, mask=inside)
                saved = next_save(saves, num_saves, sequence, stop, SAVES)
                stop = tl.minimum(saved, tl.where(certain > stop, certain, NEVER))
        until = (tl.minimum(stop, num_rows + TILE) - begin + TILE - 1) // TILE - 1
        until = tl.maximum(tl.minimum(until, num_tiles), tile + 1)
        for number in range(tile, until):
            of_head = ((first_tile + number) * NUM_HEADS + head).to(tl.int64)
            of_keys = ((first_tile + number) * 2 + 1).to(tl.int64) * NUM_KEY_HEADS + key_head
            k = tl.load(heads + (of_keys * TILE + numbers[:, None]) * BLOCK_KEYS + keys[None, :])
            left = tl.load(decays + of_head * TILE + numbers)
            before = matrix.to(values.dtype.element_ty)
            places = (of_head * BLOCK_KEYS + keys[:, None]) * BLOCK_VALUES + columns[None, :]
            tl.store(befores + places, before)
            places = values + (of_head * TILE + numbers[:, None]) * BLOCK_VALUES + columns[None, :]
            change = tl.load(places)
            if IS_DELTA:
                w = tl.load(found + (of_head * TILE + numbers[:, None]) * BLOCK_KEYS + keys[None, :])
                change = (change.to(tl.float32) - tl.dot(w, before)).to(change.dtype)
                tl.store(places, change)
                weight = None
            else:
                weight = tl.load(weights + of_head * TILE + numbers)
            matrix = _grown(matrix, k, change, weight, left, TILE - 1)
        tile = until


@triton.jit(do_not_specialize=["num_sequences"])
def finish_states_kernel(
    heads: tl.tensor,
    values: tl.tensor,
    decays: tl.tensor,
    weights: tl.tensor,
    state: tl.tensor,
    slot_stride: tl.tensor,
    query_starts: tl.tensor,
    context_lens: tl.tensor,
    slots: tl.tensor,
    saves: tl.tensor,
    num_sequences: tl.tensor,
    IS_DELTA: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    IS_TILED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
    COLUMNS: tl.constexpr,
    FEWEST: tl.constexpr,
    SEQUENCES: tl.constexpr,
) -> None:
    """Takes some columns of the state of one head, in a slot, from before a tile to after the row that is wanted."""
    index = tl.program_id(1)
    if index < num_sequences:
        sequence = index
        slot = tl.load(slots + 4 * index + 1)
        stop = tl.load(slots + 4 * index + 3)
    else:
        save = saves + 4 * (index - num_sequences)
        sequence = tl.load(save)
        stop = tl.load(save + 1)
        slot = tl.load(save + 2)
    if (slot <= 0) | (sequence < 0):
        return
    num_rows = tl.load(query_starts + sequence + 1) - tl.load(query_starts + sequence)
    if num_rows < FEWEST:
        return
    NUM_BLOCKS: tl.constexpr = BLOCK_VALUES // COLUMNS
    head = tl.program_id(0) // NUM_BLOCKS
    key_head = head % NUM_KEY_HEADS if IS_TILED else head // (NUM_HEADS // NUM_KEY_HEADS)
    numbers = tl.arange(0, TILE)
    keys = tl.arange(0, BLOCK_KEYS)
    columns = tl.program_id(0) % NUM_BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    begin = -offset_of(sequence, num_rows, context_lens, slots)
    number = tl.maximum((stop - begin + TILE - 1) // TILE - 1, 0)
    tile = number
    for first in range(0, sequence, SEQUENCES):
        others = first + tl.arange(0, SEQUENCES)
        tile += tl.sum(num_tiles_of(others, query_starts, context_lens, slots, sequence, FEWEST))
    of_head = (tile * NUM_HEADS + head).to(tl.int64)
    of_keys = (tile * 2 + 1).to(tl.int64) * NUM_KEY_HEADS + key_head
    of_state = (head * KEY_DIM + keys[:, None]) * VALUE_DIM + columns[None, :]
    of_state += slot.to(tl.int64) * slot_stride
    inside = (keys < KEY_DIM)[:, None] & (columns < VALUE_DIM)[None, :]
    k = tl.load(heads + (of_keys * TILE + numbers[:, None]) * BLOCK_KEYS + keys[None, :])
    left = tl.load(decays + of_head * TILE + numbers)
    change = tl.load(values + (of_head * TILE + numbers[:, None]) * BLOCK_VALUES + columns[None, :])
    weight = None
    if not IS_DELTA:
        weight = tl.load(weights + of_head * TILE + numbers)
    matrix = tl.load(state + of_state, mask=inside, other=0.0)
    matrix = _grown(matrix, k, change, weight, left, stop - 1 - begin - number * TILE)
    tl.debug_barrier()  # every thread has read by now the memory that others write
    tl.store(state + of_state, matrix, mask=inside)


@triton.jit
def read_tiles_kernel(
    made: tl.tensor,
    tiles: tl.tensor,
    heads: tl.tensor,
    values: tl.tensor,
    decays: tl.tensor,
    weights: tl.tensor,
    befores: tl.tensor,
    skip: tl.tensor,
    query_starts: tl.tensor,
    IS_DELTA: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    IS_TILED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Writes some columns of one head's output for the rows of one tile into `made` of `state_kernel`.

    Args:
        values: v' of a gated delta net, v of Mamba-2.
    """
    NUM_BLOCKS: tl.constexpr = BLOCK_VALUES // COLUMNS
    tile = tl.program_id(1).to(tl.int64)
    sequence = tl.load(tiles + 2 * tile)
    if sequence < 0:
        return
    head = tl.program_id(0) // NUM_BLOCKS
    key_head = head % NUM_KEY_HEADS if IS_TILED else head // (NUM_HEADS // NUM_KEY_HEADS)
    numbers = tl.arange(0, TILE)
    keys = tl.arange(0, BLOCK_KEYS)
    columns = tl.program_id(0) % NUM_BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    dtype = heads.dtype.element_ty
    of_head = tile * NUM_HEADS + head
    of_queries = ((tile * (2 * NUM_KEY_HEADS) + key_head) * TILE + numbers[:, None]) * BLOCK_KEYS + keys[
        None, :
    ]
    q = tl.load(heads + of_queries)
    k = tl.load(heads + NUM_KEY_HEADS * TILE * BLOCK_KEYS + of_queries)
    left = tl.load(decays + of_head * TILE + numbers)
    is_seen = numbers[:, None] >= numbers[None, :]
    gaps = tl.where(is_seen, left[:, None] - left[None, :], 0.0)
    scores = tl.dot(q, tl.trans(k))
    scores = tl.where(is_seen, scores * tl.exp(gaps), 0.0)
    if not IS_DELTA:
        scores *= tl.load(weights + of_head * TILE + numbers)[None, :]
    before = tl.load(befores + (of_head * BLOCK_KEYS + keys[:, None]) * BLOCK_VALUES + columns[None, :])
    v = tl.load(values + (of_head * TILE + numbers[:, None]) * BLOCK_VALUES + columns[None, :])
    out = tl.dot(q, before) * tl.exp(left)[:, None]
    out = tl.dot(scores.to(dtype), v, out)
    if not IS_DELTA:
        out += tl.load(skip + head) * v.to(tl.float32)
    start = tl.load(query_starts + sequence).to(tl.int64)
    end = tl.load(query_starts + sequence + 1)
    begin = tl.load(tiles + 2 * tile + 1)
    rows = start + begin + numbers
    mask = ((begin + numbers >= 0) & (rows < end))[:, None] & (columns < VALUE_DIM)[None, :]
    tl.store(made + (rows[:, None] * NUM_HEADS + head) * VALUE_DIM + columns[None, :], out, mask=mask)


@triton.jit
def _inverse(triangle: tl.tensor) -> tl.tensor:
    """Returns [TILE, TILE], the inverse of I + a strictly lower triangle.

    Blocks of PART rows on the diagonal are inverted row by row; D is all of these. With N = D times the other blocks,
    the inverse is (I + N)^-1 D, where N^PARTS is 0: (I + N)^-1 = I - N + N^2 - N^3.
    """
    numbers = tl.arange(0, TILE)
    blocks = tl.arange(0, PARTS)
    rows = tl.arange(0, PART)[None, :, None]
    is_diagonal = blocks[:, None, None, None] == blocks[None, None, :, None]
    own = tl.sum(tl.where(is_diagonal, tl.reshape(triangle, [PARTS, PART, PARTS, PART]), 0.0), 2)
    made = tl.where(rows == tl.arange(0, PART)[None, None, :], 1.0, tl.zeros_like(own))
    for number in range(1, PART):
        row = tl.sum(tl.where(rows == number, own, 0.0), 1)
        known = tl.sum(row[:, :, None] * made, 1)
        made -= tl.where(rows == number, known[:, None, :], 0.0)
    diagonal = tl.reshape(tl.where(is_diagonal, made[:, :, None, :], 0.0), [TILE, TILE])
    rest = tl.where(numbers[:, None] // PART > numbers[None, :] // PART, triangle, 0.0)
    once = tl.dot(diagonal, rest, input_precision="tf32")
    twice = tl.dot(once, once, input_precision="tf32")
    other = tl.dot(twice, once, input_precision="tf32")
    identity = tl.where(numbers[:, None] == numbers[None, :], 1.0, 0.0)
    return tl.dot(identity - once + twice - other, diagonal, input_precision="tf32")


@triton.jit
def _grown(
    matrix: tl.tensor,
    k: tl.tensor,
    change: tl.tensor,
    weight: tl.tensor,
    left: tl.tensor,
    last: tl.tensor,
) -> tl.tensor:
    """The state after row `last` of a tile, given the one before the tile; the same if it is before its first row.

    Args:
        change: v' of a gated delta net; v of Mamba-2, with the steps as weights.
    """
    numbers = tl.arange(0, TILE)
    in_all = tl.sum(tl.where(numbers == last, left, 0.0))
    share = tl.where(numbers <= last, tl.exp(tl.minimum(in_all - left, 0.0)), 0.0)
    if weight is not None:
        share *= weight
    grown = (change.to(tl.float32) * share[:, None]).to(k.dtype)
    return tl.dot(tl.trans(k), grown, matrix * tl.exp(in_all))
