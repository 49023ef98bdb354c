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
REDUCED_ELEMENTS = 8192
"""Elements that one program of the reduction has in registers at a time."""
REDUCTION_WARPS = 8
ZEROED_ELEMENTS = 1024
"""Elements that one program of the reduction makes 0 at a time, in the rows of no sequence."""


@dataclass(frozen=True, slots=True)
class Segments:
    """The work items of a step, each one segment of one sequence; the device fills the tensors in."""

    item_sequences: Tensor
    """[items] The sequence whose segment an item is; -1 for an item without work."""
    first_items: Tensor
    """[S + 1] Sequence s has the items first_items[s] to first_items[s + 1]."""

    @classmethod
    def empty(cls, num_items: int, max_sequences: int, device: torch.device) -> Segments:
        return cls(
            torch.full((num_items,), -1, dtype=torch.int32, device=device),
            torch.zeros(max_sequences + 1, dtype=torch.int32, device=device),
        )


def reduced_segments(group: int, block_d: int) -> int:
    """Segments that one program of the reduction adds up at a time, of all heads of a group."""
    heads: int = triton.next_power_of_2(group)
    return min(32, max(2, REDUCED_ELEMENTS // (heads * block_d)))


@triton.jit(do_not_specialize=["num_sequences", "num_items", "window"])
def plan_segments_kernel(
    query_starts: tl.tensor,
    context_lens: tl.tensor,
    item_sequences: tl.tensor,
    first_items: tl.tensor,
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
    have no items.
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


@triton.jit(do_not_specialize=["num_tokens"])
def reduce_segments_kernel(
    attended: tl.tensor,
    segment_outputs: tl.tensor,
    segment_scales: tl.tensor,
    query_starts: tl.tensor,
    first_items: tl.tensor,
    num_tokens: tl.tensor,
    GROUP: tl.constexpr,
    MAX_DECODE_QUERIES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    SEGMENTS: tl.constexpr,
    ZEROS: tl.constexpr,
) -> None:
    """Reduces the segments of one sequence and key-value head to its result, if there are several.

    All programs together also make the rows after the last sequence 0.
    """
    sequence, kv_head = tl.program_id(0), tl.program_id(1)
    _zero_rows_of_nobody(attended, query_starts, num_tokens, NUM_KV_HEADS * GROUP * HEAD_DIM, ZEROS)
    first_item, end_item = tl.load(first_items + sequence), tl.load(first_items + sequence + 1)
    if end_item - first_item <= 1:
        return
    start = tl.load(query_starts + sequence)
    heads, dims = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    in_head = dims < HEAD_DIM
    inside = (heads < GROUP)[:, None] & in_head[None, :]
    for query in range(0, tl.load(query_starts + sequence + 1) - start):
        top = tl.full([BLOCK_G], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_G], tl.float32)
        summed = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
        for first in range(first_item, end_item, SEGMENTS):
            items = first + tl.arange(0, SEGMENTS)
            exists = (heads < GROUP)[:, None] & (items < end_item)[None, :]
            tiles = (items.to(tl.int64) * NUM_KV_HEADS + kv_head) * (MAX_DECODE_QUERIES * GROUP)
            rows = tiles[None, :] + (query * GROUP + heads)[:, None]
            tops = tl.load(segment_scales + rows * 2, mask=exists, other=-float("inf"))
            totals = tl.load(segment_scales + rows * 2 + 1, mask=exists, other=0.0)
            outputs = tl.load(
                segment_outputs + rows[:, :, None] * HEAD_DIM + dims[None, None, :],
                mask=exists[:, :, None] & in_head[None, None, :],
                other=0.0,
            )
            higher = tl.maximum(top, tl.max(tops, 1))
            base = tl.where(higher == -float("inf"), 0.0, higher)
            weights, fade = tl.exp2(tops - base[:, None]), tl.exp2(top - base)
            total = total * fade + tl.sum(totals * weights, 1)
            summed = summed * fade[:, None] + tl.sum(outputs * weights[:, :, None], 1)
            top = higher
        result = summed / tl.where(total > 0, total, 1.0)[:, None]
        row = (start + query).to(tl.int64) * (NUM_KV_HEADS * GROUP) + kv_head * GROUP
        places = (row + heads)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(attended + places, result.to(attended.dtype.element_ty), mask=inside)


@triton.jit
def _zero_rows_of_nobody(
    attended: tl.tensor,
    query_starts: tl.tensor,
    num_tokens: tl.tensor,
    ROW: tl.constexpr,
    ZEROS: tl.constexpr,
) -> None:
    """Makes the rows after the last sequence's 0; they lie next to each other, and programs take turns."""
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    first = tl.load(query_starts + tl.num_programs(0)).to(tl.int64) * ROW
    end = num_tokens.to(tl.int64) * ROW
    zeros = tl.zeros([ZEROS], attended.dtype.element_ty)
    for place in range(first + program * ZEROS, end, tl.num_programs(0) * tl.num_programs(1) * ZEROS):
        places = place + tl.arange(0, ZEROS)
        tl.store(attended + places, zeros, mask=places < end)
