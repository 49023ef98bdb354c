"""The attention kernels themselves: decode by segments of contexts, prefill by tiles of queries.

Both fold tiles of keys and values into a running softmax. Row r of a tile is head r % GROUP of the query heads that
share a key-value head, of the tile's token r // GROUP.

With ROTATED, keys are latents [c | r], c of HEAD_DIM numbers and r of ROTATED, and c is the value, too, so that it is
read once for both products. All query heads share them, more than a tile may have rows: the rows of a token, or of
several, are then cut into tiles of several programs, which the second number of a program counts in place of key-value
heads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.engine.kernels.triton.attention_segments import is_last_to_store, reduce_segments, visible_tiles
from penstock.engine.kernels.triton.numbers import of_4_bits, of_int8

FOLDED = tl.constexpr(64.0)
"""The factor of the weights of values in int8, by which their sums are divided.

About half the largest number: the scale of a value becomes about its largest magnitude. Without it, small weights times
small scales would vanish in 16 bits.
"""


@triton.jit(do_not_specialize=["table_stride", "window", "num_sequences", "num_tokens"])
def decode_attention_kernel(
    attended: tl.tensor,
    queries: tl.tensor,
    layer_kv: tl.tensor,
    layer_scales: tl.tensor,
    sinks: tl.tensor,
    block_tables: tl.tensor,
    query_starts: tl.tensor,
    context_lens: tl.tensor,
    query_stride: tl.tensor,
    values_offset: tl.tensor,
    table_stride: tl.tensor,
    window: tl.tensor,
    segment_outputs: tl.tensor,
    segment_scales: tl.tensor,
    num_stored: tl.tensor,
    item_sequences: tl.tensor,
    first_items: tl.tensor,
    first_stored: tl.tensor,
    num_sequences: tl.tensor,
    num_tokens: tl.tensor,
    GROUP: tl.constexpr,
    MAX_DECODE_QUERIES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROTATED: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    SHARING: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
    CHUNK: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK_G: tl.constexpr,
    SEGMENTS: tl.constexpr,
) -> None:
    """Attends the queries of one decoding sequence to one segment of its context, for one key-value head.

    The result of an only segment is final. Results of several go to the workspace, and the program that stores the last
    of them reduces all to one. It reads its own there, too, so that the result does not depend on which program it is.
    Results of latents are too many for one program: a launch of `reduce_segments_kernel` follows.
    All programs together make the rows after the last sequence's 0; those of late items, which seldom have work, begin.
    """
    item = tl.program_id(0)
    kv_head, rows = _rows_of_program(BLOCK_M, ROTATED)
    sequence = tl.load(item_sequences + item)
    first_row = tl.load(query_starts + num_sequences) + (tl.num_programs(0) - 1 - item) * MAX_DECODE_QUERIES
    zeros, no_total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    for row in range(first_row, num_tokens, tl.num_programs(0) * MAX_DECODE_QUERIES):
        unused = rows < (num_tokens - row) * GROUP
        _store_rows(
            attended, zeros, no_total, row, rows, kv_head, unused, GROUP, NUM_KV_HEADS, HEAD_DIM, BLOCK_D
        )
    if sequence < 0:
        return
    start = tl.load(query_starts + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - start
    if ROTATED:  # noqa: SIM102  # known to the compiler
        if tl.program_id(1) * BLOCK_M >= num_queries * GROUP:
            return
    context = tl.load(context_lens + sequence)
    first_item = tl.load(first_items + sequence)
    num_segments = tl.load(first_items + sequence + 1) - first_item
    valid = rows < num_queries * GROUP
    places = _query_offsets(start, rows, kv_head, query_stride, GROUP, HEAD_DIM + ROTATED)
    dims = tl.arange(0, BLOCK_D)[None, :]
    inside = valid[:, None] & (dims < HEAD_DIM)
    query = tl.load(queries + places[:, None] + dims, mask=inside, other=0.0)
    turned = _turned(queries + places[:, None] + HEAD_DIM, valid[:, None], ROTATED)
    first_position = context - num_queries
    first_tile, end_tile = visible_tiles(first_position, context, window, TILE)
    num_tiles, segment = end_tile - first_tile, item - first_item
    top, total = _start_rows(sinks, rows, kv_head, segment == 0, GROUP, BLOCK_M)
    summed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    keys = layer_kv if ROTATED else layer_kv + kv_head * (BLOCK_SIZE * HEAD_DIM // (2 if SHARING else 1))
    key_scales = _scales_of_head(layer_scales, kv_head, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, ROTATED, SHARING)
    summed, top, total = _fold_tiles(
        summed,
        top,
        total,
        query,
        turned,
        first_position + rows // GROUP,
        keys,
        keys + values_offset,
        key_scales,
        _scales_of_values(key_scales, values_offset, ROTATED, SHARING),
        block_tables + sequence.to(tl.int64) * table_stride,
        first_tile + num_tiles * segment // num_segments,
        first_tile + num_tiles * (segment + 1) // num_segments,
        first_position,
        context,
        window,
        SCALE,
        SOFTCAP,
        BLOCK_STRIDE,
        SHARING,
        BLOCK_SIZE,
        HEAD_DIM,
        BLOCK_D,
        ROTATED,
        TILE,
        WINDOWED,
        CHUNK,
        FIRST,
        True,
    )
    if SHARING == 0 and _scales_of_values(key_scales, values_offset, ROTATED, SHARING) is not None:
        summed *= 1 / FOLDED
    if num_segments == 1:
        _store_rows(
            attended, summed, total, start, rows, kv_head, valid, GROUP, NUM_KV_HEADS, HEAD_DIM, BLOCK_D
        )
    else:
        place = tl.load(first_stored + sequence)
        # The segment's number is made anew, or it takes a register while the tiles are read.
        stored = (place + item - tl.load(first_items + sequence)).to(tl.int64) * NUM_KV_HEADS + kv_head
        segment_rows = stored * (MAX_DECODE_QUERIES * GROUP) + rows
        tl.store(segment_outputs + segment_rows[:, None] * HEAD_DIM + dims, summed, mask=inside)
        tl.store(segment_scales + segment_rows * 2, top, mask=valid)
        tl.store(segment_scales + segment_rows * 2 + 1, total, mask=valid)
        if not ROTATED:  # noqa: SIM102  # known to the compiler
            if is_last_to_store(num_stored + sequence * NUM_KV_HEADS + kv_head, num_segments):
                reduce_segments(
                    attended,
                    segment_outputs,
                    segment_scales,
                    start,
                    0,
                    num_queries * GROUP,
                    place,
                    place + num_segments,
                    kv_head,
                    GROUP,
                    MAX_DECODE_QUERIES,
                    NUM_KV_HEADS,
                    HEAD_DIM,
                    BLOCK_D,
                    BLOCK_G,
                    SEGMENTS,
                )


@triton.jit(do_not_specialize=["table_stride", "num_sequences", "window"])
def prefill_attention_kernel(
    attended: tl.tensor,
    queries: tl.tensor,
    layer_kv: tl.tensor,
    layer_scales: tl.tensor,
    sinks: tl.tensor,
    block_tables: tl.tensor,
    query_starts: tl.tensor,
    context_lens: tl.tensor,
    query_stride: tl.tensor,
    values_offset: tl.tensor,
    table_stride: tl.tensor,
    num_sequences: tl.tensor,
    window: tl.tensor,
    GROUP: tl.constexpr,
    MAX_DECODE_QUERIES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROTATED: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    SHARING: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
    CHUNK: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK_Q: tl.constexpr,
) -> None:
    """Attends one tile of queries of a sequence with more than MAX_DECODE_QUERIES to all that they see.

    A block has BLOCK_Q queries; blocks without work end at once. Late queries see most, so that they go first.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head, rows = _rows_of_program(BLOCK_M, ROTATED)
    sequence = _find_sequence(block, query_starts, num_sequences, BLOCK_Q)
    start = tl.load(query_starts + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - start
    first_query = (block - start // BLOCK_Q - sequence) * BLOCK_Q
    if (num_queries <= MAX_DECODE_QUERIES) | (first_query >= num_queries):
        return
    end_query = tl.minimum(first_query + BLOCK_Q, num_queries)
    context = tl.load(context_lens + sequence)
    valid = rows < (end_query - first_query) * GROUP
    places = _query_offsets(start + first_query, rows, kv_head, query_stride, GROUP, HEAD_DIM + ROTATED)
    dims = tl.arange(0, BLOCK_D)[None, :]
    query = tl.load(queries + places[:, None] + dims, mask=valid[:, None] & (dims < HEAD_DIM), other=0.0)
    turned = _turned(queries + places[:, None] + HEAD_DIM, valid[:, None], ROTATED)
    first_position = context - num_queries + first_query
    end = context - num_queries + end_query
    first_tile, end_tile = visible_tiles(first_position, end, window, TILE)
    positions = first_position + rows // GROUP
    top, total = _start_rows(sinks, rows, kv_head, True, GROUP, BLOCK_M)
    summed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    keys = layer_kv if ROTATED else layer_kv + kv_head * (BLOCK_SIZE * HEAD_DIM // (2 if SHARING else 1))
    key_scales = _scales_of_head(layer_scales, kv_head, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, ROTATED, SHARING)
    table = block_tables + sequence.to(tl.int64) * table_stride
    ALL_MASKED: tl.constexpr = WINDOWED or FIRST > 0
    full_tiles = first_tile if ALL_MASKED else tl.maximum(first_position + 1, 0) // TILE
    for masked in tl.static_range(2):
        if masked or not ALL_MASKED:
            summed, top, total = _fold_tiles(
                summed,
                top,
                total,
                query,
                turned,
                positions,
                keys,
                keys + values_offset,
                key_scales,
                _scales_of_values(key_scales, values_offset, ROTATED, SHARING),
                table,
                full_tiles if masked else first_tile,
                end_tile if masked else full_tiles,
                first_position,
                end,
                window,
                SCALE,
                SOFTCAP,
                BLOCK_STRIDE,
                SHARING,
                BLOCK_SIZE,
                HEAD_DIM,
                BLOCK_D,
                ROTATED,
                TILE,
                WINDOWED,
                CHUNK,
                FIRST,
                masked == 1,
            )
    if SHARING == 0 and _scales_of_values(key_scales, values_offset, ROTATED, SHARING) is not None:
        summed *= 1 / FOLDED
    # Read again: the inputs of the queries' places would stay in registers until here, and some spill.
    first_row = tl.load(query_starts + sequence, volatile=True) + first_query
    _store_rows(
        attended, summed, total, first_row, rows, kv_head, valid, GROUP, NUM_KV_HEADS, HEAD_DIM, BLOCK_D
    )


@triton.jit
def _fold_tiles(
    summed: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    query: tl.tensor,
    turned: tl.tensor,
    positions: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    table: tl.tensor,
    first_tile: tl.tensor,
    end_tile: tl.tensor,
    first_position: tl.tensor,
    end: tl.tensor,
    window: tl.tensor,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    SHARING: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROTATED: tl.constexpr,
    TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
    CHUNK: tl.constexpr,
    FIRST: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Adds the tiles from `first_tile` up to `end_tile` to a running softmax (Milakov and Gimelshein, 2018).

    `top` is the largest score so far, as a power of 2; `total` and `summed` are relative to 2 ** top. Only keys and
    values that a query from `first_position` up to `end` may see are read. Without MASKED every row sees all of it, and
    no load is masked.

    This is the only place that knows the layout of keys and values: blocks are BLOCK_STRIDE elements apart. Numbers of
    8 bits become the queries' type where they are loaded, which is exact; the scale of each key then multiplies its
    column of `scores`, and the scale of each value its column of `weights`. Sums of values are then FOLDED times too
    large. Latents, which have several scales, are multiplied by them and rounded before the products.
    """
    # The unit of scores as a power of 2: it is multiplied with where they become exponents.
    UNIT: tl.constexpr = (SOFTCAP if SOFTCAP > 0 else SCALE) * 1.4426950408889634
    dims = tl.arange(0, BLOCK_D)[None, :]
    for tile in range(first_tile, end_tile):
        tokens = tile * TILE + tl.arange(0, TILE)
        exists = tokens < end
        if CHUNK:
            exists &= tokens >= first_position // CHUNK * CHUNK
        elif WINDOWED:
            exists &= tokens > first_position - window
        if MASKED:
            blocks = tl.load(table + tokens // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
        else:
            blocks = tl.load(table + tokens // BLOCK_SIZE).to(tl.int64)
        if SHARING > 0:
            first = blocks * (BLOCK_STRIDE // 2) + tokens % BLOCK_SIZE * (HEAD_DIM // SHARING)
            rows = blocks * BLOCK_STRIDE + tokens % BLOCK_SIZE * (HEAD_DIM // 2)
            key = _unpacked(
                keys, key_scales, rows, first, exists, query.dtype, HEAD_DIM, BLOCK_D, SHARING, TILE, MASKED
            )
            value = _unpacked(
                values,
                value_scales,
                rows,
                first,
                exists,
                query.dtype,
                HEAD_DIM,
                BLOCK_D,
                SHARING,
                TILE,
                MASKED,
            )
        else:
            rows = blocks * BLOCK_STRIDE + tokens % BLOCK_SIZE * (HEAD_DIM + ROTATED)
            places = rows[:, None] + dims
            if HEAD_DIM < BLOCK_D:
                wanted = exists[:, None] & (dims < HEAD_DIM)
                key = tl.load(keys + places, mask=wanted, other=0.0)
                value = key if ROTATED else tl.load(values + places, mask=wanted, other=0.0)
            elif MASKED:
                key = tl.load(keys + places, mask=exists[:, None], other=0.0)
                value = key if ROTATED else tl.load(values + places, mask=exists[:, None], other=0.0)
            else:
                key = tl.load(keys + places)
                value = key if ROTATED else tl.load(values + places)
        if ROTATED:
            turned_key = _turned(keys + rows[:, None] + HEAD_DIM, exists[:, None], ROTATED, MASKED)
            if key_scales is not None:
                SCALES: tl.constexpr = HEAD_DIM // ROTATED + 1
                of_tokens = key_scales + blocks * (BLOCK_STRIDE // 4) + tokens % BLOCK_SIZE * SCALES
                key = _scaled_latents(key, of_tokens, exists, query.dtype, HEAD_DIM, BLOCK_D, ROTATED, TILE)
                turned_scale = tl.load(of_tokens + (SCALES - 1), mask=exists, other=0.0)
                turned_key = (turned_key.to(tl.float32) * turned_scale[:, None]).to(query.dtype)
                value = key
            scores = tl.dot(turned.to(key.dtype), tl.trans(turned_key), input_precision="ieee")
            scores = tl.dot(query.to(key.dtype), tl.trans(key), scores, input_precision="ieee")
        else:
            if SHARING == 0 and key_scales is not None:
                of_tokens = blocks * (BLOCK_STRIDE // 4) + tokens % BLOCK_SIZE
                if MASKED:
                    key_scale = tl.load(key_scales + of_tokens, mask=exists, other=0.0)
                    value_scale = tl.load(value_scales + of_tokens, mask=exists, other=0.0)
                else:
                    key_scale, value_scale = (
                        tl.load(key_scales + of_tokens),
                        tl.load(value_scales + of_tokens),
                    )
                key = of_int8(key, query.dtype)
            scores = tl.dot(query.to(key.dtype), tl.trans(key), input_precision="ieee")
            if SHARING == 0 and key_scales is not None:
                scores *= key_scale[None, :]
        if SOFTCAP > 0:  # the hyperbolic tangent
            scores = 1.0 - 2.0 / (1.0 + tl.exp(scores * (2.0 * SCALE / SOFTCAP)))
        if MASKED:
            visible = tokens[None, :] <= positions[:, None]
            if FIRST > 0:
                visible &= (tokens[None, :] >= FIRST) | (tokens[None, :] == positions[:, None])
            if CHUNK:
                visible &= tokens[None, :] >= (positions // CHUNK * CHUNK)[:, None]
            elif WINDOWED:
                visible &= tokens[None, :] > positions[:, None] - window
            scores = tl.where(visible, scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1) * UNIT)
        base = tl.where(higher == -float("inf"), 0.0, higher) if MASKED else higher
        weights, fade = tl.exp2(scores * UNIT - base[:, None]), tl.exp2(top - base)
        total = total * fade + tl.sum(weights, 1)
        if SHARING == 0 and value_scales is not None:
            weights *= (value_scale * FOLDED)[None, :]
            value = of_int8(value, query.dtype)
        summed = tl.dot(weights.to(value.dtype), value, summed * fade[:, None], input_precision="ieee")
        top = higher
    return summed, top, total


@triton.jit
def _rows_of_program(BLOCK_M: tl.constexpr, ROTATED: tl.constexpr) -> tl.tensor:
    """The key-value head of this program, and its rows."""
    second, rows = tl.program_id(1), tl.arange(0, BLOCK_M)
    if ROTATED:
        kv_head, rows = second * 0, rows + second * BLOCK_M
    else:
        kv_head = second
    return kv_head, rows


@triton.jit
def _start_rows(
    sinks: tl.tensor,
    rows: tl.tensor,
    kv_head: tl.tensor,
    is_first: tl.tensor,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> tl.tensor:
    """Returns the largest score of each row and the sum of exponentials before any key: nothing, or the head's sink.

    Of several segments of a row, the first has the sink.
    """
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:
        scores = tl.load(sinks + kv_head * GROUP + rows % GROUP) * 1.4426950408889634
        top = tl.where(is_first, scores, top)
        total = tl.where(is_first, 1.0, total)
    return top, total


@triton.jit
def _scales_of_head(
    layer_scales: tl.tensor,
    kv_head: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    SHARING: tl.constexpr,
) -> tl.tensor:
    """Where the scales of a head's keys, or of latents, lie in the first block; None if there are none."""
    if layer_scales is None:
        scales = None
    elif ROTATED:
        scales = layer_scales + BLOCK_SIZE * (HEAD_DIM + ROTATED) // 4
    elif SHARING > 0:
        SCALES: tl.constexpr = HEAD_DIM // SHARING
        scales = layer_scales + (NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM // 4 + kv_head * (BLOCK_SIZE * SCALES))
    else:
        scales = layer_scales + (NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM // 4 + kv_head * BLOCK_SIZE)
    return scales


@triton.jit
def _scales_of_values(
    key_scales: tl.tensor, values_offset: tl.tensor, ROTATED: tl.constexpr, SHARING: tl.constexpr
) -> tl.tensor:
    """Where the scales of a head's values lie; None if there are none, or values are parts of keys."""
    return None if key_scales is None or ROTATED else key_scales + values_offset // (2 if SHARING else 4)


@triton.jit
def _unpacked(
    pairs: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,
    first_scales: tl.tensor,
    exists: tl.tensor,
    dtype: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SHARING: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Numbers of 4 bits [TILE, BLOCK_D], times their scales, rounded once to `dtype`.

    The bytes of a token begin at `pairs + rows`, and its scales at `scales + first_scales`, both [TILE].
    """
    GROUPS: tl.constexpr = BLOCK_D // SHARING
    bytes, groups = tl.arange(0, BLOCK_D // 2)[None, :], tl.arange(0, GROUPS)[None, :]
    places, scale_places = pairs + rows[:, None] + bytes, scales + first_scales[:, None] + groups
    if HEAD_DIM < BLOCK_D:
        both = tl.load(places, mask=exists[:, None] & (bytes < HEAD_DIM // 2), other=0)
        scale = tl.load(scale_places, mask=exists[:, None] & (groups < HEAD_DIM // SHARING), other=0.0)
    elif MASKED:
        both = tl.load(places, mask=exists[:, None], other=0)
        scale = tl.load(scale_places, mask=exists[:, None], other=0.0)
    else:
        both, scale = tl.load(places), tl.load(scale_places)
    both = both.reshape(TILE, GROUPS, SHARING // 2)
    even, odd = of_4_bits(both & 15, -8.0, dtype), of_4_bits(both >> 4, -8.0, dtype)
    if dtype != tl.float16:  # there the product of such numbers is rounded once, too
        scale = scale.to(tl.float32)
    even, odd = (even * scale[:, :, None]).to(dtype), (odd * scale[:, :, None]).to(dtype)
    return tl.join(even, odd).reshape(TILE, BLOCK_D)


@triton.jit
def _turned(
    heads: tl.tensor, exists: tl.tensor, ROTATED: tl.constexpr, MASKED: tl.constexpr = True
) -> tl.tensor:
    """The rotated numbers of queries or latents, which begin at `heads` [n, 1]; None if there are none."""
    if ROTATED:
        BLOCK_R: tl.constexpr = max(16, triton.next_power_of_2(ROTATED))
        dims = tl.arange(0, BLOCK_R)[None, :]
        if MASKED or ROTATED < BLOCK_R:
            turned = tl.load(heads + dims, mask=exists & (dims < ROTATED), other=0.0)
        else:
            turned = tl.load(heads + dims)
    else:
        turned = None
    return turned


@triton.jit
def _scaled_latents(
    numbers: tl.tensor,
    scales: tl.tensor,
    exists: tl.tensor,
    dtype: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROTATED: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Latents [TILE, BLOCK_D] of 8 bits, times the scales of groups of ROTATED, which begin at `scales` [TILE]."""
    GROUPS: tl.constexpr = BLOCK_D // ROTATED
    groups = tl.arange(0, GROUPS)[None, :]
    known = exists[:, None] & (groups < HEAD_DIM // ROTATED)
    of_groups = tl.load(scales[:, None] + groups, mask=known, other=0.0)
    products = numbers.to(tl.float32).reshape(TILE, GROUPS, ROTATED) * of_groups[:, :, None]
    return products.reshape(TILE, BLOCK_D).to(dtype)


@triton.jit
def _find_sequence(
    block: tl.tensor, query_starts: tl.tensor, num_sequences: tl.tensor, BLOCK_Q: tl.constexpr
) -> tl.tensor:
    """Finds the last sequence whose blocks start at `block` or before, by bisection.

    Sequence s starts at block query_starts[s] // BLOCK_Q + s. So each has blocks enough wherever its queries start, and
    one without queries has a block or two without work.
    """
    low, high = num_sequences * 0, num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) // BLOCK_Q + middle <= block:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _query_offsets(
    first_token: tl.tensor,
    rows: tl.tensor,
    kv_head: tl.tensor,
    query_stride: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
) -> tl.tensor:
    """Where the queries of the rows of a tile lie in memory; the tile starts at `first_token`."""
    tokens = (first_token + rows // GROUP).to(tl.int64)
    return tokens * query_stride + (kv_head * GROUP + rows % GROUP) * HEAD_DIM


@triton.jit
def _store_rows(
    attended: tl.tensor,
    summed: tl.tensor,
    total: tl.tensor,
    first_token: tl.tensor,
    rows: tl.tensor,
    kv_head: tl.tensor,
    valid: tl.tensor,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Stores the results of a tile's rows; a row that saw nothing becomes 0."""
    dims = tl.arange(0, BLOCK_D)[None, :]
    places = _query_offsets(first_token, rows, kv_head, NUM_KV_HEADS * GROUP * HEAD_DIM, GROUP, HEAD_DIM)
    result = summed / tl.where(total > 0, total, 1.0)[:, None]
    mask = valid[:, None] & (dims < HEAD_DIM)
    tl.store(attended + places[:, None] + dims, result.to(attended.dtype.element_ty), mask=mask)
