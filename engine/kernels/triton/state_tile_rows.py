"""The inputs of the tiles of a prompt, see `state_tile_kernels`: rows by heads, convolved, and their gates."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.engine.kernels.triton.state_kernels import inputs_of, softplus

TILE = tl.constexpr(64)
"""Rows of a tile."""
ROWS = tl.constexpr(16)
"""Rows of a tile that a program convolves."""


@triton.jit(do_not_specialize=["num_sequences"])
def convolve_tiles_kernel(
    tiles: tl.tensor,
    heads: tl.tensor,
    values: tl.tensor,
    decays: tl.tensor,
    weights: tl.tensor,
    rows: tl.tensor,
    row_stride: tl.tensor,
    gates: tl.tensor,
    gate_stride: tl.tensor,
    conv: tl.tensor,
    conv_bias: tl.tensor,
    decay: tl.tensor,
    step_bias: tl.tensor,
    history: tl.tensor,
    pending: tl.tensor,
    slot_stride: tl.tensor,
    query_starts: tl.tensor,
    context_lens: tl.tensor,
    slots: tl.tensor,
    num_sequences: tl.tensor,
    least_step: tl.tensor,
    most_step: tl.tensor,
    query_scale: tl.tensor,
    unit_eps: tl.tensor,
    IS_DELTA: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROW_FLOATS: tl.constexpr,
    KERNEL: tl.constexpr,
    FEWEST: tl.constexpr,
    SEQUENCES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
) -> None:
    """One head's queries, keys or values in ROWS rows of a tile, or all gates of the tile. Other rows become zeros.

    Args:
        tiles: [tiles, 2] the sequence of each tile, -1 if it is none's, and the number of its first row.
        heads: [tiles, 2 NUM_KEY_HEADS, TILE, BLOCK_KEYS] queries, then keys.
        values: [tiles, NUM_HEADS, TILE, BLOCK_VALUES]
        decays: [tiles, NUM_HEADS, TILE] float32, G.
        weights: as `decays`, betas or steps.
    """
    part = tl.program_id(0)
    tile = tl.program_id(1).to(tl.int64)
    sequence = tile.to(tl.int32) * 0 - 1
    index = sequence
    total = sequence + 1
    for first in range(0, num_sequences, SEQUENCES):
        numbers = first + tl.arange(0, SEQUENCES)
        counts = num_tiles_of(numbers, query_starts, context_lens, slots, num_sequences, FEWEST)
        ends = total + tl.cumsum(counts, 0)
        is_own = (tile < ends) & (tile >= ends - counts)
        sequence += tl.sum(tl.where(is_own, numbers + 1, 0))
        index += tl.sum(tl.where(is_own, tile.to(tl.int32) - ends + counts + 1, 0))
        total += tl.sum(counts)
    if sequence < 0:
        if part == 0:
            tl.store(tiles + 2 * tile, sequence)
        return
    start = tl.load(query_starts + sequence).to(tl.int64)
    num_rows = (tl.load(query_starts + sequence + 1) - start).to(tl.int32)
    begin = index * TILE - offset_of(sequence, num_rows, context_lens, slots)
    rows += start * row_stride
    gates += start * gate_stride
    if slots is None:
        replayed = 0
        given = rows, None, row_stride, None, None, 0
    else:
        source = tl.load(slots + 4 * sequence).to(tl.int64) * slot_stride
        replayed = tl.load(slots + 4 * sequence + 2)
        pending += source
        given = rows, None, row_stride, history + source, pending, replayed
    fraction = tl.program_id(2)
    first_row = begin + fraction * ROWS
    if (part == 0) & (fraction == 0):
        tl.store(tiles + 2 * tile, sequence)
        tl.store(tiles + 2 * tile + 1, begin)
    if part < 2 * NUM_KEY_HEADS:
        place = tile * (2 * NUM_KEY_HEADS) + part
        is_query = part < NUM_KEY_HEADS
        channel = tl.where(is_query, QUERIES, KEYS - NUM_KEY_HEADS * KEY_DIM) + part * KEY_DIM
        x = _convolved(
            first_row,
            channel,
            num_rows,
            conv,
            conv_bias,
            given,
            KEY_DIM,
            BLOCK_KEYS,
            CHANNELS,
            ROW_FLOATS,
            KERNEL,
        )
        if IS_DELTA:
            scale = tl.where(is_query, query_scale, 1.0)
            x *= (tl.rsqrt(tl.sum(x * x, 1) + unit_eps) * scale)[:, None]
        _store(heads, place * TILE + fraction * ROWS, x, BLOCK_KEYS)
    elif part < 2 * NUM_KEY_HEADS + NUM_HEADS:
        of_values = tile * NUM_HEADS + part - 2 * NUM_KEY_HEADS
        v_channel = VALUES + (part - 2 * NUM_KEY_HEADS) * VALUE_DIM
        v = _convolved(
            first_row,
            v_channel,
            num_rows,
            conv,
            conv_bias,
            given,
            VALUE_DIM,
            BLOCK_VALUES,
            CHANNELS,
            ROW_FLOATS,
            KERNEL,
        )
        _store(values, of_values * TILE + fraction * ROWS, v, BLOCK_VALUES)
    elif fraction == 0:
        numbers = begin + tl.arange(0, TILE)[:, None]
        columns = tl.arange(0, BLOCK_HEADS)[None, :]
        is_head = columns < NUM_HEADS
        mask = (numbers >= -replayed) & (numbers < num_rows) & is_head
        of_gates = gates, gate_stride, pending, replayed
        head_decay = tl.load(decay + columns, mask=is_head, other=0.0)
        head_bias = tl.load(step_bias + columns, mask=is_head, other=0.0)
        gate = _gates(numbers, columns, mask, of_gates, CHANNELS, ROW_FLOATS)
        if IS_DELTA:
            a = _gates(numbers, NUM_HEADS + columns, mask, of_gates, CHANNELS, ROW_FLOATS)
            step = softplus(a + head_bias)
            weight = 1.0 / (1.0 + tl.exp(-gate))
        else:
            step = tl.minimum(tl.maximum(softplus(gate + head_bias), least_step), most_step)
            weight = step
        places = (tile * NUM_HEADS + columns) * TILE + tl.arange(0, TILE)[:, None]
        left = tl.cumsum(tl.where(mask, head_decay * step, 0.0), 0)
        tl.store(decays + places, left, mask=is_head)
        tl.store(weights + places, tl.where(mask, weight, 0.0), mask=is_head)


@triton.jit
def num_tiles_of(
    sequences: tl.tensor,
    query_starts: tl.tensor,
    context_lens: tl.tensor,
    slots: tl.tensor,
    num_sequences: tl.tensor,
    FEWEST: tl.constexpr,
) -> tl.tensor:
    """The tiles of sequences with FEWEST rows or more in the step; 0 of others."""
    inside = sequences < num_sequences
    start = tl.load(query_starts + sequences, mask=inside, other=0)
    num_rows = tl.load(query_starts + sequences + 1, mask=inside, other=0) - start
    is_tiled = inside & (num_rows >= FEWEST)
    end = tl.load(context_lens + sequences, mask=is_tiled, other=0)
    num = num_rows
    if slots is not None:
        num += tl.load(slots + 4 * sequences + 2, mask=is_tiled, other=0)
    return tl.where(is_tiled, (((end - num) & (TILE - 1)) + num + TILE - 1) // TILE, 0)


@triton.jit
def offset_of(
    sequence: tl.tensor, num_rows: tl.tensor, context_lens: tl.tensor, slots: tl.tensor
) -> tl.tensor:
    """The rows between the beginning of a sequence's first tile and its row 0."""
    replayed = 0
    if slots is not None:
        replayed = tl.load(slots + 4 * sequence + 2)
    return ((tl.load(context_lens + sequence) - num_rows - replayed) & (TILE - 1)) + replayed


@triton.jit
def _convolved(
    first: tl.tensor,
    channel: tl.tensor,
    num_rows: tl.tensor,
    conv: tl.tensor,
    conv_bias: tl.tensor,
    given: tl.tuple,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROW_FLOATS: tl.constexpr,
    KERNEL: tl.constexpr,
) -> tl.tensor:
    """Returns [ROWS, BLOCK], the convolution and SiLU of DIM channels of some rows; zeros where there are none."""
    rows, factors, stride, _, _, replayed = given
    numbers = first + tl.arange(0, ROWS)[:, None]
    inside = tl.arange(0, BLOCK) < DIM
    columns = channel + tl.arange(0, BLOCK)
    mask = (numbers >= -replayed) & (numbers < num_rows) & inside[None, :]
    x = tl.zeros([ROWS, BLOCK], tl.float32)
    if conv_bias is not None:
        x += tl.load(conv_bias + columns, mask=inside, other=0.0)[None, :]
    is_first = first < KERNEL - 1
    for tap in tl.static_range(KERNEL):
        weights = tl.load(conv + columns * KERNEL + tap, mask=inside, other=0.0)
        before = numbers + (tap - KERNEL + 1)
        if is_first:
            found = inputs_of(before, columns[None, :], mask, given, CHANNELS, ROW_FLOATS, KERNEL)
        else:  # nothing that a slot has
            plain = rows, factors, stride, None, None, 0
            found = inputs_of(before, columns[None, :], mask, plain, CHANNELS, ROW_FLOATS, KERNEL)
        x += found * weights[None, :]
    return tl.where(mask, x / (1.0 + tl.exp(-x)), 0.0)


@triton.jit
def _store(target: tl.tensor, first: tl.tensor, x: tl.tensor, BLOCK: tl.constexpr) -> None:
    rows = first + tl.arange(0, ROWS)[:, None]
    tl.store(target + rows * BLOCK + tl.arange(0, BLOCK)[None, :], x.to(target.dtype.element_ty))


@triton.jit
def _gates(
    numbers: tl.tensor,
    columns: tl.tensor,
    mask: tl.tensor,
    given: tl.tuple,
    CHANNELS: tl.constexpr,
    ROW_FLOATS: tl.constexpr,
) -> tl.tensor:
    """Returns the gates of the rows of these numbers, replayed ones too, in float32."""
    gates, stride, pending, replayed = given
    found = tl.load(
        gates + numbers.to(tl.int64) * stride + columns, mask=mask & (numbers >= 0), other=0.0
    ).to(tl.float32)
    if pending is not None:
        places = pending + (numbers + replayed) * ROW_FLOATS + CHANNELS + columns
        found += tl.load(places, mask=mask & (numbers < 0), other=0.0)
    return found
