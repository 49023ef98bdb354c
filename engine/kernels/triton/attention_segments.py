"""The segments that the contexts of decoding sequences are cut into, and how their results become one.

A decode program reads all keys and values of its segment, so that a batch takes as long as its longest segments. The
plan, made once a step on the device, cuts everything that is seen into about equal lengths. Its size follows from the
number of sequences alone, so that launches can be captured in a graph and replayed for other lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MIN_SEGMENT_TILES = 2
"""A segment of fewer tiles costs more to reduce than it saves."""
PLANNED_ITEMS = 16
"""Work items that one program of the plan deals out."""
REDUCED_ELEMENTS = 1024
"""Elements of segments that each warp has in registers at a time while they are reduced."""


@dataclass(frozen=True, slots=True)
class Segments:
    """The work items of a step, each one segment of one sequence; the device fills the tensors in."""

    item_sequences: Tensor
    """[items] The sequence whose segment an item is; -1 for an item without work."""
    first_items: Tensor
    """[S + 1] Sequence s has the items first_items[s] to first_items[s + 1]."""
    first_stored: Tensor
    """[S] The place of the first of a sequence's segments in the workspace; an only segment has none."""

    @classmethod
    def empty(cls, num_items: int, max_sequences: int, device: torch.device) -> Segments:
        return cls(
            torch.full((num_items,), -1, dtype=torch.int32, device=device),
            torch.zeros(max_sequences + 1, dtype=torch.int32, device=device),
            torch.zeros(max_sequences, dtype=torch.int32, device=device),
        )


def reduced_segments(rows: int, block_d: int, num_warps: int) -> int:
    """Segments that a program adds up at a time, of so many rows."""
    return min(32, max(2, num_warps * REDUCED_ELEMENTS // (rows * block_d)))


@triton.jit(do_not_specialize=["num_sequences", "num_items", "window"])
def plan_segments_kernel(
    query_starts: tl.tensor,
    context_lens: tl.tensor,
    item_sequences: tl.tensor,
    first_items: tl.tensor,
    first_stored: tl.tensor,
    num_sequences: tl.tensor,
    num_items: tl.tensor,
    window: tl.tensor,
    MAX_DECODE_QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BLOCK_S: tl.constexpr,
    ITEMS: tl.constexpr,
) -> None:
    """Cuts the context of decoding sequences into segments of about equal length, at most as many as there are items.

    The budget is the number of items beyond one for each sequence. If the whole context, `total`, is cut into lengths
    of total / budget, there are at most budget full segments, and one more for each sequence. Sequences without queries
    have no items. Only those that have a full segment and another store any: at most twice the budget.
    """
    rows = tl.arange(0, BLOCK_S)
    known = rows < num_sequences
    starts = tl.load(query_starts + rows, mask=known, other=0)
    num_queries = tl.load(query_starts + rows + 1, mask=known, other=0) - starts
    contexts = tl.load(context_lens + rows, mask=known, other=0)
    decodes = (num_queries > 0) & (num_queries <= MAX_DECODE_QUERIES)
    first_tiles, end_tiles = visible_tiles(contexts - num_queries, contexts, window, TILE)
    tiles = tl.where(decodes, end_tiles - first_tiles, 0)
    budget = num_items - num_sequences
    segments = tl.cdiv(tiles, tl.maximum(tl.cdiv(tl.sum(tiles), budget), MIN_TILES))
    ends = tl.cumsum(tl.where(decodes, tl.maximum(segments, 1), 0), 0)
    if tl.program_id(0) == 0:
        tl.store(first_items + rows + 1, ends, mask=known)
        stored = tl.where(segments > 1, segments, 0)
        tl.store(first_stored + rows, tl.cumsum(stored, 0) - stored, mask=known)
    items = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    owners = tl.sum((ends[None, :] <= items[:, None]).to(tl.int32), 1)
    tl.store(item_sequences + items, tl.where(owners < num_sequences, owners, -1), mask=items < num_items)


@triton.jit
def visible_tiles(
    first_position: tl.tensor, end: tl.tensor, window: tl.tensor, TILE: tl.constexpr
) -> tl.tensor:
    """The first tile that queries from `first_position` up to `end` see, and the one after the last."""
    first_token = tl.where(window > 0, tl.maximum(first_position - window + 1, 0), 0)
    chunk = tl.maximum(-window, 1)
    first_token = tl.where(window < 0, first_position // chunk * chunk, first_token)
    return first_token // TILE, tl.cdiv(end, TILE)


@triton.jit
def is_last_to_store(num_stored: tl.tensor, num_segments: tl.tensor) -> tl.tensor:
    """Counts this program's segment as stored; returns whether it is the last, so that the program may read them all.

    No program waits for another, so they may run in any order. The last leaves the counter at 0 for the next launch.

    Why it sees all segments, by the memory model of PTX (PTX ISA, "Memory Consistency Model", causality order): a
    barrier orders the stores of a block's threads before what any of them does after it, and this order is transitive,
    so the one thread that adds releases the stores of the whole block to the GPU. Additions to a counter read each
    other's results, so the last one, which acquires, synchronizes with all that came before. A second barrier, by which
    Triton hands the old value to the block, orders the loads of all threads after it. The sum in the CUDA C++
    programming guide (memory fence functions) picks its last block in this way; the lock around partial sums in
    Triton's tutorial on layer norms and the fix-up of stream-K (Osama et al., 2023) order stores and loads likewise.
    """
    tl.debug_barrier()  # all threads have stored
    is_last = tl.atomic_add(num_stored, 1, sem="acq_rel", scope="gpu") == num_segments - 1
    if is_last:
        tl.store(num_stored, 0)
    return is_last


@triton.jit
def reduce_segments(
    attended: tl.tensor,
    segment_outputs: tl.tensor,
    segment_scales: tl.tensor,
    start: tl.tensor,
    first_row: tl.tensor,
    end_row: tl.tensor,
    first_stored: tl.tensor,
    end_stored: tl.tensor,
    kv_head: tl.tensor,
    GROUP: tl.constexpr,
    MAX_DECODE_QUERIES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    SEGMENTS: tl.constexpr,
) -> None:
    """Reduces the segments of one sequence, whose first query is at row `start`, and key-value head to its result.

    Its rows from `first_row` up to `end_row` are reduced, BLOCK_G at a time. Loads bypass the first-level cache, which
    other multiprocessors do not write to.
    """
    dims = tl.arange(0, BLOCK_D)
    in_head = dims < HEAD_DIM
    for block in range(first_row, end_row, BLOCK_G):
        rows = block + tl.arange(0, BLOCK_G)
        wanted = rows < end_row
        top = tl.full([BLOCK_G], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_G], tl.float32)
        summed = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
        for first in range(first_stored, end_stored, SEGMENTS):
            places = first + tl.arange(0, SEGMENTS)
            exists = wanted[:, None] & (places < end_stored)[None, :]
            tiles = (places.to(tl.int64) * NUM_KV_HEADS + kv_head) * (MAX_DECODE_QUERIES * GROUP)
            stored = tiles[None, :] + rows[:, None]
            tops = tl.load(
                segment_scales + stored * 2, mask=exists, other=-float("inf"), cache_modifier=".cg"
            )
            totals = tl.load(segment_scales + stored * 2 + 1, mask=exists, other=0.0, cache_modifier=".cg")
            outputs = tl.load(
                segment_outputs + stored[:, :, None] * HEAD_DIM + dims[None, None, :],
                mask=exists[:, :, None] & in_head[None, None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            higher = tl.maximum(top, tl.max(tops, 1))
            base = tl.where(higher == -float("inf"), 0.0, higher)
            weights, fade = tl.exp2(tops - base[:, None]), tl.exp2(top - base)
            total = total * fade + tl.sum(totals * weights, 1)
            summed = summed * fade[:, None] + tl.sum(outputs * weights[:, :, None], 1)
            top = higher
        result = summed / tl.where(total > 0, total, 1.0)[:, None]
        heads = (start + rows // GROUP).to(tl.int64) * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + rows % GROUP
        mask = wanted[:, None] & in_head[None, :]
        tl.store(
            attended + heads[:, None] * HEAD_DIM + dims[None, :],
            result.to(attended.dtype.element_ty),
            mask=mask,
        )


@triton.jit
def reduce_segments_kernel(
    attended: tl.tensor,
    segment_outputs: tl.tensor,
    segment_scales: tl.tensor,
    query_starts: tl.tensor,
    first_items: tl.tensor,
    first_stored: tl.tensor,
    GROUP: tl.constexpr,
    MAX_DECODE_QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    SEGMENTS: tl.constexpr,
) -> None:
    """Reduces the segments of BLOCK_G rows of one sequence, if it has several, for the only key-value head."""
    sequence, first_row = tl.program_id(0), tl.program_id(1) * BLOCK_G
    num_segments = tl.load(first_items + sequence + 1) - tl.load(first_items + sequence)
    start = tl.load(query_starts + sequence)
    num_rows = (tl.load(query_starts + sequence + 1) - start) * GROUP
    place = tl.load(first_stored + sequence)
    if (num_segments > 1) & (first_row < num_rows):
        reduce_segments(
            attended,
            segment_outputs,
            segment_scales,
            start,
            first_row,
            tl.minimum(first_row + BLOCK_G, num_rows),
            place,
            place + num_segments,
            0,
            GROUP,
            MAX_DECODE_QUERIES,
            1,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_G,
            SEGMENTS,
        )
