"""Paged attention of one step: prefill, mixed batches, decode and the verifying of drafts.

The heads that share a key-value head are rows of one tile, BLOCK_M of them: a token of 4 such heads is 4 rows.
A sequence with few queries has them all in one tile, so that its keys and values are read once, and its context is cut
into segments for several programs, whose results are merged. One with more queries has as many tiles as they fill, each
the work of one program. A mixed batch has both kinds, in launches of their own.

Nothing here waits for the device, and no launch depends on a length that only the device knows: all grids follow from
the number of sequences and tokens, so they can be captured in a graph and replayed for other lengths.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.batch import Batch
from engine.kernels.kv_cache import KVShape

TILE_BYTES = 16 << 10
"""Keys of one head that a program fetches at a time, and as many bytes of values; two of both are in flight."""
PROGRAMS_PER_SM = 2
"""Of decode with one token each: two fit beside each other, and one reads while the other computes."""
MIN_ROWS = 16
"""The fewest that tensor cores multiply."""
MIN_SEGMENT_TILES = 2
"""Less work than this in a segment costs more to merge than it saves."""
FIXED_SEGMENT_TILES, MAX_FIXED_SEGMENTS = 4, 8
"""Of a batch-invariant sequence: tiles in each, and how many at most, for the workspace grows with them."""
MAX_FEW_ROWS = 128
"""Of the few queries of one sequence; what more of them add up no longer fits the registers."""
MANY_ROWS = 128
"""Prefill computes more than it reads: as many rows share a key as the registers hold."""
MANY_TOKENS = 512
"""In a step of fewer, half the rows, for more programs."""
PLANNED_ITEMS, MERGED_SEGMENTS = 16, 32
"""By one program at a time."""
# No figure above comes from a measurement yet: they follow from sizes of registers, shared memory and waves.


@dataclass(frozen=True, slots=True)
class Chip:
    """What the sizes of programs depend on."""

    num_sms: int
    has_wgmma: bool
    """Multiplies from shared memory (Hopper and later), where its forerunners first need all of it in registers."""
    has_tensor_memory: bool = False
    """Keeps the products apart from the registers (Blackwell); compiled for it, a wide tile no longer fits these."""

    @classmethod
    def of(cls, device: torch.device) -> Chip:
        if device.type != "cuda":
            return cls(num_sms=4, has_wgmma=False)
        properties = torch.cuda.get_device_properties(device)
        return cls(properties.multi_processor_count, properties.major >= 9, properties.major >= 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How a kernel is cut."""

    block_m: int
    """Rows of queries in a program."""
    tile: int
    """Tokens of context that it attends to at a time."""
    num_warps: int
    num_stages: int = 5
    """Triton counts the loads of block tables, too: two each for tables, for keys and values, and one to compute."""


def few_tiling(group: int, num_queries: int, row_bytes: int) -> Tiling:
    """For sequences of at most `num_queries`; `row_bytes` are of one head's key, padded to a power of two."""
    block_m = max(MIN_ROWS, triton.next_power_of_2(group * num_queries))
    tile = min(128, max(16, TILE_BYTES // row_bytes))
    return Tiling(block_m=block_m, tile=tile, num_warps=4 if block_m <= 32 else 8)


def many_tiling(group: int, num_tokens: int, row_bytes: int, chip: Chip) -> Tiling:
    """For all other sequences, in a step of `num_tokens`."""
    wide = row_bytes > 256  # twice the registers for each row
    rows = MANY_ROWS if num_tokens >= MANY_TOKENS and not wide else MANY_ROWS // 2
    block_m = max(rows, triton.next_power_of_2(group))
    # 64 x 64 products by wgmma read as much shared memory as they can while they multiply; 64 x 128 leave some of it.
    is_wide_tile = chip.has_wgmma and not chip.has_tensor_memory and rows == MANY_ROWS
    most = 128 if is_wide_tile else 64 if chip.has_wgmma else 32
    tile = min(most, max(16, (2 if is_wide_tile else 1) * TILE_BYTES // row_bytes))
    return Tiling(block_m=block_m, tile=tile, num_warps=block_m // 8 if wide else block_m // 16)


@dataclass(frozen=True, slots=True)
class _Segments:
    """Which segments of which sequences the items of work are; the device fills it in, once a step."""

    item_sequences: Tensor
    """[items] whose segment it is; -1 is nobody's."""
    first_items: Tensor
    """[S + 1] sequence s has the items first_items[s] to first_items[s + 1]."""


class Workspace:
    """What the kernels of a step leave for each other; one for all steps and layers of a device, in stream order."""

    def __init__(
        self,
        shape: KVShape,
        kv_dtype: torch.dtype,
        num_heads: int,
        max_sequences: int,
        device: torch.device,
        *,
        windows: Iterable[int] = (0,),
        max_few_queries: int = 1,
        batch_invariant: bool = False,
        chip: Chip | None = None,
    ) -> None:
        """
        Args:
            windows: of all layers; 0 is none.
            max_few_queries: the most tokens of a sequence whose context is split among programs: 1, or a draft and the
                token before it. At most 16, and less where these fill more than 128 rows.
            batch_invariant: a sequence's result has the same bits whatever else is in the batch; decode is slower.
            chip: None asks the device.
        """
        self.shape = shape
        self.max_sequences = max_sequences
        self.batch_invariant = batch_invariant
        self.group = num_heads // shape.num_kv_heads
        self.max_few_queries = max(1, min(max_few_queries, 16, MAX_FEW_ROWS // self.group))
        self.block_d = max(16, triton.next_power_of_2(shape.head_dim))
        self.row_bytes = self.block_d * kv_dtype.itemsize
        self._chip = Chip.of(device) if chip is None else chip
        self._wave = max(2, PROGRAMS_PER_SM * self._chip.num_sms // shape.num_kv_heads)
        num_items = self.num_items(max_sequences)
        self.segments = {window: _no_segments(num_items, max_sequences, device) for window in windows}
        rows = num_items * num_heads * (self.few_tiling(self.max_few_queries).block_m // self.group)
        self.partial_sums = torch.empty(rows, shape.head_dim, dtype=torch.float32, device=device)
        self.partial_scales = torch.empty(rows, 2, dtype=torch.float32, device=device)
        """The largest score of each row, and the sum of the exponentials."""

    @property
    def num_bytes(self) -> int:
        """Of device memory."""
        tables = (tensor for s in self.segments.values() for tensor in (s.item_sequences, s.first_items))
        return sum(tensor.nbytes for tensor in (self.partial_sums, self.partial_scales, *tables))

    def num_items(self, num_sequences: int) -> int:
        """How many segments so many sequences may have between them.

        As many as run at once, or one each and a reserve for those that are much longer than the others.
        """
        if self.batch_invariant:
            return num_sequences * MAX_FIXED_SEGMENTS
        return max(self._wave, num_sequences + self._wave // 2)

    def few_tiling(self, max_queries: int) -> Tiling:
        """For the sequences with few queries, in a step where none has more than `max_queries`."""
        if self.batch_invariant or max_queries > self.max_few_queries:
            max_queries = self.max_few_queries
        return few_tiling(self.group, max_queries, self.row_bytes)

    def many_tiling(self, num_tokens: int) -> Tiling:
        """For those with more, in a step of `num_tokens`."""
        num_tokens = MANY_TOKENS if self.batch_invariant else num_tokens
        return many_tiling(self.group, num_tokens, self.row_bytes, self._chip)


def _no_segments(num_items: int, max_sequences: int, device: torch.device) -> _Segments:
    return _Segments(
        torch.full((num_items,), -1, dtype=torch.int32, device=device),
        torch.zeros(max_sequences + 1, dtype=torch.int32, device=device),
    )


class TritonAttention:
    """`reference.PagedAttention` by the kernels below: made once per step, called once per layer.

    The rows of a sequence without context (an unused slot of a graph) become 0, and those of no sequence, too.
    """

    def __init__(
        self,
        batch: Batch,
        shape: KVShape,
        workspace: Workspace,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
    ) -> None:
        """
        Args:
            scale: of the scores; None is head_dim ** -0.5.
            softcap: c in c * tanh(score / c); 0 is none.
        """
        self._num_sequences, self._num_tokens = batch.context_lens.numel(), batch.positions.numel()
        if self._num_sequences > workspace.max_sequences:
            raise ValueError(f"{self._num_sequences} sequences, a workspace for {workspace.max_sequences}")
        max_queries = batch.max_query_len
        if max_queries is None:
            max_queries = self._num_tokens - self._num_sequences + 1  # none is without
        self._batch, self._workspace = batch, workspace
        self._few = workspace.few_tiling(max_queries)
        self._few_queries = self._few.block_m // workspace.group
        self._has_many = max_queries > self._few_queries
        self._num_items = workspace.num_items(self._num_sequences)
        self._constants: dict[str, Any] = {
            "GROUP": workspace.group,
            "FEW": self._few_queries,
            "NUM_KV_HEADS": shape.num_kv_heads,
            "HEAD_DIM": shape.head_dim,
            "BLOCK_D": workspace.block_d,
        }
        self._scoring: dict[str, Any] = {
            "SCALE": shape.head_dim**-0.5 if scale is None else scale,
            "SOFTCAP": softcap,
            "BLOCK_SIZE": shape.block_size,
        }
        for window, segments in workspace.segments.items():
            self._plan(window, segments)

    def __call__(self, queries: Tensor, layer_kv: Tensor, window: int) -> Tensor:
        """As `reference.PagedAttention`; queries may be strided from token to token. `window` is the workspace's.

        The result is the only tensor that is allocated.
        """
        num_tokens, num_heads, head_dim = queries.shape
        assert num_tokens == self._num_tokens
        attended = torch.empty(num_tokens, num_heads * head_dim, dtype=queries.dtype, device=queries.device)
        self._attend_few(attended, queries, layer_kv, window)
        if self._has_many:
            self._attend_many(attended, queries, layer_kv, window)
        return attended

    def _plan(self, window: int, segments: _Segments) -> None:
        plan_segments_kernel[(triton.cdiv(self._num_items, PLANNED_ITEMS),)](
            self._batch.query_starts,
            self._batch.context_lens,
            segments.item_sequences,
            segments.first_items,
            self._num_sequences,
            self._num_items,
            window,
            FEW=self._few_queries,
            TILE=self._few.tile,
            MIN_TILES=MIN_SEGMENT_TILES,
            FIXED_TILES=FIXED_SEGMENT_TILES if self._workspace.batch_invariant else 0,
            MAX_FIXED=MAX_FIXED_SEGMENTS,
            BLOCK_S=triton.next_power_of_2(self._workspace.max_sequences),
            ITEMS=PLANNED_ITEMS,
        )

    def _attend_few(self, attended: Tensor, queries: Tensor, layer_kv: Tensor, window: int) -> None:
        batch, workspace, segments = self._batch, self._workspace, self._workspace.segments[window]
        num_kv_heads = workspace.shape.num_kv_heads
        attend_few_kernel[(self._num_items, num_kv_heads)](
            attended,
            workspace.partial_sums,
            workspace.partial_scales,
            queries,
            layer_kv,
            batch.block_tables,
            batch.query_starts,
            batch.context_lens,
            segments.item_sequences,
            segments.first_items,
            queries.stride(0),
            layer_kv.stride(0),
            batch.block_tables.stride(0),
            window,
            **self._constants,
            **self._scoring,
            BLOCK_M=self._few.block_m,
            TILE=self._few.tile,
            WINDOWED=window > 0,
            num_warps=self._few.num_warps,
            num_stages=self._few.num_stages,
            enable_fp_fusion=True,
        )
        merge_segments_kernel[(self._num_sequences + 1, num_kv_heads * workspace.group)](
            attended,
            workspace.partial_sums,
            workspace.partial_scales,
            batch.query_starts,
            segments.first_items,
            self._num_sequences,
            self._num_tokens,
            **self._constants,
            SEGMENTS=MERGED_SEGMENTS,
            num_warps=4,
            enable_fp_fusion=True,
        )

    def _attend_many(self, attended: Tensor, queries: Tensor, layer_kv: Tensor, window: int) -> None:
        batch, workspace = self._batch, self._workspace
        tiling = workspace.many_tiling(self._num_tokens)
        block_queries = tiling.block_m // workspace.group
        # Each sequence fills its tiles but one: rounding down and one more for each are always enough.
        num_blocks = self._num_tokens // block_queries + self._num_sequences
        attend_many_kernel[(num_blocks, workspace.shape.num_kv_heads)](
            attended,
            queries,
            layer_kv,
            batch.block_tables,
            batch.query_starts,
            batch.context_lens,
            queries.stride(0),
            layer_kv.stride(0),
            batch.block_tables.stride(0),
            self._num_sequences,
            window,
            **self._constants,
            **self._scoring,
            BLOCK_M=tiling.block_m,
            TILE=tiling.tile,
            WINDOWED=window > 0,
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
            enable_fp_fusion=True,
        )


@triton.jit(do_not_specialize=["num_sequences", "num_items", "window"])
def plan_segments_kernel(
    query_starts: tl.tensor,
    context_lens: tl.tensor,
    item_sequences: tl.tensor,
    first_items: tl.tensor,
    num_sequences: tl.tensor,
    num_items: tl.tensor,
    window: tl.tensor,
    FEW: tl.constexpr,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    FIXED_TILES: tl.constexpr,
    MAX_FIXED: tl.constexpr,
    BLOCK_S: tl.constexpr,
    ITEMS: tl.constexpr,
) -> None:
    """Cuts what sequences with few queries see into segments of about equal length, as many as there are items.

    Cutting everything that is seen, `total`, into lengths of total / budget leaves at most budget full segments and one
    more for each sequence. With FIXED_TILES lengths follow from nothing but the sequence's own.
    """
    rows = tl.arange(0, BLOCK_S)
    known = rows < num_sequences
    starts = tl.load(query_starts + rows, mask=known, other=0)
    num_queries = tl.load(query_starts + rows + 1, mask=known, other=0) - starts
    contexts = tl.load(context_lens + rows, mask=known, other=0)
    mine = (num_queries > 0) & (num_queries <= FEW)
    first_tiles, last_tiles = _visible_tiles(contexts - num_queries, contexts, window, TILE)
    tiles = tl.where(mine, last_tiles - first_tiles, 0)
    if FIXED_TILES > 0:
        segments = tl.minimum(tl.cdiv(tiles, FIXED_TILES), MAX_FIXED)
    else:
        budget = num_items - num_sequences
        segments = tl.cdiv(tiles, tl.maximum(tl.cdiv(tl.sum(tiles), budget), MIN_TILES))
    ends = tl.cumsum(tl.where(mine, tl.maximum(segments, 1), 0), 0)
    if tl.program_id(0) == 0:
        tl.store(first_items + rows + 1, ends, mask=known)
    items = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    owners = tl.sum((ends[None, :] <= items[:, None]).to(tl.int32), 1)
    tl.store(item_sequences + items, tl.where(owners < num_sequences, owners, -1), mask=items < num_items)


@triton.jit(do_not_specialize=["table_stride", "window"])
def attend_few_kernel(
    attended: tl.tensor,
    partial_sums: tl.tensor,
    partial_scales: tl.tensor,
    queries: tl.tensor,
    layer_kv: tl.tensor,
    block_tables: tl.tensor,
    query_starts: tl.tensor,
    context_lens: tl.tensor,
    item_sequences: tl.tensor,
    first_items: tl.tensor,
    query_stride: tl.tensor,
    values_offset: tl.tensor,
    table_stride: tl.tensor,
    window: tl.tensor,
    GROUP: tl.constexpr,
    FEW: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
) -> None:
    """One segment of one sequence, for all its queries; an only segment is the result, others go to be merged."""
    item, kv_head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(item_sequences + item)
    if sequence < 0:
        return
    start = tl.load(query_starts + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - start
    context = tl.load(context_lens + sequence)
    first_item = tl.load(first_items + sequence)
    num_segments = tl.load(first_items + sequence + 1) - first_item
    rows = tl.arange(0, BLOCK_M)
    valid = rows < num_queries * GROUP
    places = _query_places(start, rows, kv_head, query_stride, GROUP, HEAD_DIM)
    dims = tl.arange(0, BLOCK_D)[None, :]
    inside = valid[:, None] & (dims < HEAD_DIM)
    query = tl.load(queries + places[:, None] + dims, mask=inside, other=0.0)
    first_position = context - num_queries
    first_seen, end_seen = _visible_tiles(first_position, context, window, TILE)
    seen, segment = end_seen - first_seen, item - first_item
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    summed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    head_kv = layer_kv + kv_head * (BLOCK_SIZE * HEAD_DIM)
    summed, top, total = _fold_tiles(
        summed,
        top,
        total,
        query,
        first_position + rows // GROUP,
        head_kv,
        head_kv + values_offset,
        block_tables + sequence.to(tl.int64) * table_stride,
        first_seen + seen * segment // num_segments,
        first_seen + seen * (segment + 1) // num_segments,
        first_position,
        context,
        window,
        SCALE,
        SOFTCAP,
        NUM_KV_HEADS,
        BLOCK_SIZE,
        HEAD_DIM,
        BLOCK_D,
        TILE,
        WINDOWED,
        True,
    )
    if num_segments == 1:
        _store_rows(
            attended, summed, total, start, rows, kv_head, valid, GROUP, NUM_KV_HEADS, HEAD_DIM, BLOCK_D
        )
    else:
        parts = (item.to(tl.int64) * NUM_KV_HEADS + kv_head) * (FEW * GROUP) + rows
        tl.store(partial_sums + parts[:, None] * HEAD_DIM + dims, summed, mask=inside)
        tl.store(partial_scales + parts * 2, top, mask=valid)
        tl.store(partial_scales + parts * 2 + 1, total, mask=valid)


@triton.jit(do_not_specialize=["num_sequences", "num_tokens"])
def merge_segments_kernel(
    attended: tl.tensor,
    partial_sums: tl.tensor,
    partial_scales: tl.tensor,
    query_starts: tl.tensor,
    first_items: tl.tensor,
    num_sequences: tl.tensor,
    num_tokens: tl.tensor,
    GROUP: tl.constexpr,
    FEW: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SEGMENTS: tl.constexpr,
) -> None:
    """The segments of one sequence and head become its result; one more sequence is the rows that belong to none."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(query_starts + sequence)
    dims = tl.arange(0, BLOCK_D)
    results = attended + (start.to(tl.int64) * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM + dims
    if sequence == num_sequences:
        for _ in range(start, num_tokens):
            tl.store(results, tl.zeros([BLOCK_D], attended.dtype.element_ty), mask=dims < HEAD_DIM)
            results += NUM_KV_HEADS * GROUP * HEAD_DIM
        return
    first_item, end_item = tl.load(first_items + sequence), tl.load(first_items + sequence + 1)
    if end_item - first_item <= 1:
        return
    row = head % GROUP
    for _ in range(start, tl.load(query_starts + sequence + 1)):
        top, total = -float("inf"), 0.0
        summed = tl.zeros([BLOCK_D], tl.float32)
        for first in range(first_item, end_item, SEGMENTS):
            items = first + tl.arange(0, SEGMENTS)
            exists = items < end_item
            parts = (items.to(tl.int64) * NUM_KV_HEADS + head // GROUP) * (FEW * GROUP) + row
            tops = tl.load(partial_scales + parts * 2, mask=exists, other=-float("inf"))
            totals = tl.load(partial_scales + parts * 2 + 1, mask=exists, other=0.0)
            sums = tl.load(
                partial_sums + parts[:, None] * HEAD_DIM + dims[None, :],
                mask=exists[:, None] & (dims < HEAD_DIM)[None, :],
                other=0.0,
            )
            higher = tl.maximum(top, tl.max(tops, 0))
            base = tl.where(higher == -float("inf"), 0.0, higher)
            weights, fade = tl.exp2(tops - base), tl.exp2(top - base)
            total = total * fade + tl.sum(totals * weights, 0)
            summed = summed * fade + tl.sum(sums * weights[:, None], 0)
            top = higher
        result = summed / tl.where(total > 0, total, 1.0)
        tl.store(results, result.to(attended.dtype.element_ty), mask=dims < HEAD_DIM)
        results += NUM_KV_HEADS * GROUP * HEAD_DIM
        row += GROUP


@triton.jit(do_not_specialize=["table_stride", "num_sequences", "window"])
def attend_many_kernel(
    attended: tl.tensor,
    queries: tl.tensor,
    layer_kv: tl.tensor,
    block_tables: tl.tensor,
    query_starts: tl.tensor,
    context_lens: tl.tensor,
    query_stride: tl.tensor,
    values_offset: tl.tensor,
    table_stride: tl.tensor,
    num_sequences: tl.tensor,
    window: tl.tensor,
    GROUP: tl.constexpr,
    FEW: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
) -> None:
    """One tile of queries of a sequence that has more than FEW; blocks without work end at once.

    Late queries see most, so that they go first.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    block, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    sequence = _sequence_of_block(block, query_starts, num_sequences, BLOCK_Q)
    start = tl.load(query_starts + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - start
    first_query = (block - start // BLOCK_Q - sequence) * BLOCK_Q
    if (num_queries <= FEW) | (first_query >= num_queries):
        return
    end_query = tl.minimum(first_query + BLOCK_Q, num_queries)
    context = tl.load(context_lens + sequence)
    rows = tl.arange(0, BLOCK_M)
    valid = rows < (end_query - first_query) * GROUP
    places = _query_places(start + first_query, rows, kv_head, query_stride, GROUP, HEAD_DIM)
    dims = tl.arange(0, BLOCK_D)[None, :]
    query = tl.load(queries + places[:, None] + dims, mask=valid[:, None] & (dims < HEAD_DIM), other=0.0)
    first_position = context - num_queries + first_query
    end = context - num_queries + end_query
    first_tile, end_tile = _visible_tiles(first_position, end, window, TILE)
    positions = first_position + rows // GROUP
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    summed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    keys = layer_kv + kv_head * (BLOCK_SIZE * HEAD_DIM)
    values = keys + values_offset
    table = block_tables + sequence.to(tl.int64) * table_stride
    full_tiles = first_tile
    if not WINDOWED:
        full_tiles = tl.maximum(first_position + 1, 0) // TILE
        summed, top, total = _fold_tiles(
            summed,
            top,
            total,
            query,
            positions,
            keys,
            values,
            table,
            first_tile,
            full_tiles,
            first_position,
            end,
            window,
            SCALE,
            SOFTCAP,
            NUM_KV_HEADS,
            BLOCK_SIZE,
            HEAD_DIM,
            BLOCK_D,
            TILE,
            WINDOWED,
            False,
        )
    summed, top, total = _fold_tiles(
        summed,
        top,
        total,
        query,
        positions,
        keys,
        values,
        table,
        full_tiles,
        end_tile,
        first_position,
        end,
        window,
        SCALE,
        SOFTCAP,
        NUM_KV_HEADS,
        BLOCK_SIZE,
        HEAD_DIM,
        BLOCK_D,
        TILE,
        WINDOWED,
        True,
    )
    # Read again: what the places of the queries were computed from would stay in registers until here, and some spill.
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
    positions: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    first_tile: tl.tensor,
    end_tile: tl.tensor,
    first_position: tl.tensor,
    end: tl.tensor,
    window: tl.tensor,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Adds the tiles from `first_tile` to `end_tile` to a running softmax (Milakov and Gimelshein, 2018).

    `top` is the largest score so far, as a power of 2; `total` and `summed` are relative to 2 ** top. Only what a query
    from `first_position` up to `end` may see is read. Without MASKED every row sees all of it, and no load is masked.

    This is the only place that knows what keys and values look like. KV of 8 bits becomes the queries' type where it
    is loaded; the scale of each key then multiplies its column of `scores`, that of each value its column of `weights`.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    dims = tl.arange(0, BLOCK_D)[None, :]
    for tile in range(first_tile, end_tile):
        tokens = tile * TILE + tl.arange(0, TILE)
        exists = tokens < end
        if WINDOWED:
            exists &= tokens > first_position - window
        if MASKED:
            blocks = tl.load(table + tokens // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
        else:
            blocks = tl.load(table + tokens // BLOCK_SIZE).to(tl.int64)
        rows = blocks * (NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM) + tokens % BLOCK_SIZE * HEAD_DIM
        places = rows[:, None] + dims
        if HEAD_DIM < BLOCK_D:
            wanted = exists[:, None] & (dims < HEAD_DIM)
            key = tl.load(keys + places, mask=wanted, other=0.0)
            value = tl.load(values + places, mask=wanted, other=0.0)
        elif MASKED:
            key = tl.load(keys + places, mask=exists[:, None], other=0.0)
            value = tl.load(values + places, mask=exists[:, None], other=0.0)
        else:
            key, value = tl.load(keys + places), tl.load(values + places)
        scores = tl.dot(query.to(key.dtype), tl.trans(key), input_precision="ieee")
        unit = SCALE * LOG2_E  # of scores, as a power of 2; it is multiplied with where they become exponents
        if SOFTCAP > 0:
            doubled = tl.exp2(scores * (2 * LOG2_E * SCALE / SOFTCAP))
            scores = 1 - 2 / (doubled + 1)
            unit = SOFTCAP * LOG2_E
        if MASKED:
            visible = tokens[None, :] <= positions[:, None]
            if WINDOWED:
                visible &= tokens[None, :] > positions[:, None] - window
            scores = tl.where(visible, scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1) * unit)
        base = tl.where(higher == -float("inf"), 0.0, higher) if MASKED else higher
        weights, fade = tl.exp2(scores * unit - base[:, None]), tl.exp2(top - base)
        total = total * fade + tl.sum(weights, 1)
        summed = tl.dot(weights.to(value.dtype), value, summed * fade[:, None], input_precision="ieee")
        top = higher
    return summed, top, total


@triton.jit
def _visible_tiles(
    first_position: tl.tensor, end: tl.tensor, window: tl.tensor, TILE: tl.constexpr
) -> tl.tensor:
    """The first tile and one past the last that queries from `first_position` up to `end` see."""
    first_token = tl.where(window > 0, tl.maximum(first_position - window + 1, 0), 0)
    return first_token // TILE, tl.cdiv(end, TILE)


@triton.jit
def _sequence_of_block(
    block: tl.tensor, query_starts: tl.tensor, num_sequences: tl.tensor, BLOCK_Q: tl.constexpr
) -> tl.tensor:
    """The last sequence that starts at `block` or before; s starts at query_starts[s] // BLOCK_Q + s."""
    low, high = num_sequences * 0, num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) // BLOCK_Q + middle <= block:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _query_places(
    first_token: tl.tensor,
    rows: tl.tensor,
    kv_head: tl.tensor,
    query_stride: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
) -> tl.tensor:
    """Where the queries of the rows are: row r is head r % GROUP of the group, of token r // GROUP."""
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
    """Stores the results of the rows, 0 where nothing was seen."""
    dims = tl.arange(0, BLOCK_D)[None, :]
    places = _query_places(first_token, rows, kv_head, NUM_KV_HEADS * GROUP * HEAD_DIM, GROUP, HEAD_DIM)
    result = summed / tl.where(total > 0, total, 1.0)[:, None]
    mask = valid[:, None] & (dims < HEAD_DIM)
    tl.store(attended + places[:, None] + dims, result.to(attended.dtype.element_ty), mask=mask)
