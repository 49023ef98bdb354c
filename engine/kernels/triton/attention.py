"""Paged attention of one step: prefill, mixed batches, decode and the verifying of drafts.

A sequence with at most a few queries decodes: all its queries are in one tile, so that its keys and values are read
once, and its context is cut into segments for several programs, of which the last to end reduces the results to one. A
sequence with more queries prefills: it has as many tiles as its queries fill, each the work of one program. A mixed
batch has both kinds, in one launch each; a batch without padding that is known to have no sequence of few queries
leaves theirs out.

Latents have one key-value head, whose values are parts of its keys, and so many query heads that their rows fill
several tiles: each is a program's, and what they leave of several segments is reduced by a launch of its own.

A batch may be padded, with sequences that have no queries and no context anywhere, and with rows after the last
sequence's. Such rows become 0, by the launch of decode.

Nothing here waits for the device, and no launch depends on a length that only the device knows: all grids follow from
the number of sequences and tokens, so that they can be captured in a graph and replayed for other lengths.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import triton
from torch import Tensor

from penstock.engine.kernels.batch import Batch
from penstock.engine.kernels.kv_cache import KVFormat, KVShape, numbers_and_scales
from penstock.engine.kernels.triton import attention_segments as segmenting
from penstock.engine.kernels.triton import attention_tiling as tilings
from penstock.engine.kernels.triton.attention_kernels import decode_attention_kernel, prefill_attention_kernel
from penstock.engine.kernels.triton.attention_segments import (
    Segments,
    plan_segments_kernel,
    reduce_segments_kernel,
)
from penstock.engine.kernels.triton.attention_tiling import Chip, KVHead, Tiling
from penstock.engine.kernels.triton.rotary import spread_back


class Workspace:
    """The tensors that the kernels of a step leave for each other.

    All steps and layers of a device share one workspace, since they run one after the other in a stream.
    """

    def __init__(
        self,
        shape: KVShape,
        dtype: torch.dtype,
        num_heads: int,
        max_sequences: int,
        device: torch.device,
        *,
        windows: Iterable[int] = (0,),
        max_decode_queries: int = 1,
        chip: Chip | None = None,
        is_quantized: bool = False,
    ) -> None:
        """
        Args:
            dtype: The type of queries, and of the cache unless it is quantized.
            windows: The windows of all layers, as `reference.PagedAttention` has them.
            max_decode_queries: A sequence with at most so many queries decodes: 1, or a token and the drafts after it.
                The workspace has at most 16, and fewer where these fill more than 128 rows.
            chip: None asks the device.
            is_quantized: Whether the cache is.
        """
        self.shape = shape
        self.max_sequences = max_sequences
        self.group = num_heads // shape.num_kv_heads
        self.value_size = shape.latent_size or shape.head_dim
        rotated = shape.head_dim - self.value_size
        most = 16 if rotated else min(16, tilings.MAX_DECODE_ROWS // self.group)
        self.max_decode_queries = max(1, min(max_decode_queries, most))
        self.block_d = max(16, triton.next_power_of_2(self.value_size))
        self._head = KVHead(self.group, self.block_d, dtype.itemsize, is_quantized, rotated)
        self._chip = Chip.of(device) if chip is None else chip
        lengths = range(1, self.max_decode_queries + 1)
        num_items = max(self.num_items(max_sequences, length) for length in lengths)
        self.segments = {window: Segments.empty(num_items, max_sequences, device) for window in windows}
        rows = num_heads * max(self._num_stored(length) * self.decode_queries(length) for length in lengths)
        self.segment_outputs = torch.empty(rows, self.value_size, dtype=torch.float32, device=device)
        """The values of each row and segment, weighted by the exponentials of their scores."""
        self.segment_scales = torch.empty(rows, 2, dtype=torch.float32, device=device)
        """The largest score of each row and segment, and the sum of the exponentials."""
        self.num_stored = torch.zeros(max_sequences, shape.num_kv_heads, dtype=torch.int32, device=device)
        """How many segments of each sequence and key-value head are stored; 0 between launches."""

    def num_items(self, num_sequences: int, max_query_len: int = 1) -> int:
        """The most segments of so many sequences: one for each, and as many more as decode programs run at once.

        So a long context among short ones is cut as finely as the whole device can use.
        """
        return num_sequences + self._num_more_items(max_query_len)

    def _num_more_items(self, max_query_len: int) -> int:
        programs = tilings.PROGRAMS_PER_SM * self._chip.num_sms
        return max(2, programs // self.programs_of_item(max_query_len))

    def _num_stored(self, max_query_len: int) -> int:
        """The most segments that are stored at once, see `plan_segments_kernel`."""
        most = self.num_items(self.max_sequences, max_query_len)
        return min(2 * self._num_more_items(max_query_len), most)

    def programs_of_item(self, max_query_len: int) -> int:
        """One for each key-value head, or, of latents, for each tile of rows."""
        rows = self.decode_queries(max_query_len) * self.group
        row_tiles: int = triton.cdiv(rows, self.decode_tiling(max_query_len).block_m)
        return self.shape.num_kv_heads * row_tiles

    def decode_queries(self, max_query_len: int) -> int:
        """A sequence with so many queries decodes, in a step where none has more than `max_query_len`."""
        if self.shape.latent_size:
            return min(max_query_len, self.max_decode_queries)
        return self.decode_tiling(max_query_len).block_m // self.group

    def decode_tiling(self, max_query_len: int) -> Tiling:
        """The tiling of decode, in a step where no sequence has more queries than `max_query_len`."""
        return tilings.decode_tiling(self._head, min(max_query_len, self.max_decode_queries), self._chip)

    def reduced_rows(self, num_sequences: int, max_query_len: int) -> int:
        """The rows of latents that a program reduces: so few that all multiprocessors have some."""
        rows = num_sequences * self.group * self.decode_queries(max_query_len)
        each: int = triton.next_power_of_2(triton.cdiv(rows, 4 * self._chip.num_sms))
        return min(8, each)

    def prefill_tiling(self, num_tokens: int, *, is_windowed: bool = False) -> Tiling:
        """The tiling of prefill, in a step of `num_tokens`, for layers with or without a window."""
        return tilings.prefill_tiling(self._head, num_tokens, self._chip, is_windowed=is_windowed)


class TritonAttention:
    """`reference.PagedAttention` by Triton's kernels: it is made once per step, and called once per layer.

    The rows of a sequence without context (an unused place of a graph) become 0, and so do rows of no sequence.
    """

    def __init__(self, batch: Batch, shape: KVShape, workspace: Workspace) -> None:
        """
        Args:
            batch: Its `max_query_len` may exceed all numbers of queries; None is the largest possible.
        """
        self._num_sequences, self._num_tokens = batch.context_lens.numel(), batch.positions.numel()
        if self._num_sequences > workspace.max_sequences:
            raise ValueError(f"{self._num_sequences} sequences, a workspace for {workspace.max_sequences}")
        max_query_len = self._num_tokens if batch.max_query_len is None else batch.max_query_len
        self._batch, self._workspace = batch, workspace
        self._decode = workspace.decode_tiling(max_query_len)
        self._max_decode_queries = workspace.decode_queries(max_query_len)
        self._programs_of_item = workspace.programs_of_item(max_query_len)
        self._reduction = self._reduction_of(
            workspace.reduced_rows(self._num_sequences, max_query_len)
            if shape.latent_size
            else triton.next_power_of_2(workspace.group)
        )
        self._has_prefill = max_query_len > self._max_decode_queries
        self._has_decode = batch.min_query_len <= self._max_decode_queries
        self._num_items = workspace.num_items(self._num_sequences, max_query_len)
        self._constants: dict[str, Any] = {
            "GROUP": workspace.group,
            "MAX_DECODE_QUERIES": self._max_decode_queries,
            "NUM_KV_HEADS": shape.num_kv_heads,
            "HEAD_DIM": workspace.value_size,
            "BLOCK_D": workspace.block_d,
            "enable_fp_fusion": True,
        }
        self._block_size = shape.block_size
        if self._has_decode:
            for window in workspace.segments:
                self._plan_segments(window)

    def __call__(
        self,
        queries: Tensor,
        layer_kv: Tensor,
        window: int,
        scale: float | None = None,
        softcap: float = 0.0,
        block_tables: Tensor | None = None,
        sinks: Tensor | None = None,
        first: int = 0,
    ) -> Tensor:
        """Attends one layer, as `reference.PagedAttention` does; the result is the only tensor that is allocated.

        Args:
            queries: They may be strided from token to token.
            window: One of the workspace's.
        """
        num_tokens, num_heads, head_dim = queries.shape
        assert num_tokens == self._num_tokens
        width = num_heads * self._workspace.value_size
        attended = torch.empty(num_tokens, width, dtype=queries.dtype, device=queries.device)
        batch, workspace, segments = self._batch, self._workspace, self._workspace.segments[window]
        tables = batch.block_tables if block_tables is None else block_tables
        numbers, scales = numbers_and_scales(layer_kv)
        format = KVFormat.of(layer_kv.dtype)
        arguments = (
            *(attended, queries, numbers, scales, sinks, tables, batch.query_starts, batch.context_lens),
            *(queries.stride(0), numbers.stride(0), tables.stride(0)),
        )
        constants = {
            **self._constants,
            "ROTATED": head_dim - workspace.value_size,
            "SCALE": head_dim**-0.5 if scale is None else scale,
            "SOFTCAP": softcap,
            "BLOCK_SIZE": self._block_size,
            "BLOCK_STRIDE": layer_kv.stride(1),
            "SHARING": format.group_of(head_dim) if format.is_packed else 0,
            "WINDOWED": window != 0,
            "CHUNK": max(0, -window),
            "FIRST": first,
        }
        if self._has_decode:
            decode_attention_kernel[(self._num_items, self._programs_of_item)](
                *arguments,
                window,
                workspace.segment_outputs,
                workspace.segment_scales,
                workspace.num_stored,
                segments.item_sequences,
                segments.first_items,
                segments.first_stored,
                self._num_sequences,
                num_tokens,
                **constants,
                **self._reduction,
                **self._decode.options,
            )
            if workspace.shape.latent_size:
                self._reduce(attended, segments)
        if self._has_prefill:
            tiling = workspace.prefill_tiling(self._num_tokens, is_windowed=window != 0)
            row_tiles = triton.cdiv(workspace.group, tiling.block_m)
            block_queries = row_tiles * tiling.block_m // workspace.group
            # Each sequence fills its tiles but one: rounding down and one more for each are always enough.
            num_blocks = self._num_tokens // block_queries + self._num_sequences
            prefill_attention_kernel[(num_blocks, workspace.shape.num_kv_heads * row_tiles)](
                *arguments, self._num_sequences, window, **constants, BLOCK_Q=block_queries, **tiling.options
            )
        if format.is_packed:
            spread_back(attended, head_dim)
        return attended

    def _reduction_of(self, rows: int) -> dict[str, Any]:
        segments = segmenting.reduced_segments(rows, self._workspace.block_d, self._decode.num_warps)
        return {"BLOCK_G": rows, "SEGMENTS": segments}

    def _reduce(self, attended: Tensor, segments: Segments) -> None:
        workspace, rows = self._workspace, self._workspace.group * self._max_decode_queries
        reduce_segments_kernel[(self._num_sequences, triton.cdiv(rows, self._reduction["BLOCK_G"]))](
            attended,
            workspace.segment_outputs,
            workspace.segment_scales,
            self._batch.query_starts,
            segments.first_items,
            segments.first_stored,
            GROUP=workspace.group,
            MAX_DECODE_QUERIES=self._max_decode_queries,
            HEAD_DIM=workspace.value_size,
            BLOCK_D=workspace.block_d,
            **self._reduction,
            num_warps=self._decode.num_warps,
        )

    def _plan_segments(self, window: int) -> None:
        segments, workspace = self._workspace.segments[window], self._workspace
        plan_segments_kernel[(triton.cdiv(self._num_items, segmenting.PLANNED_ITEMS),)](
            self._batch.query_starts,
            self._batch.context_lens,
            segments.item_sequences,
            segments.first_items,
            segments.first_stored,
            self._num_sequences,
            self._num_items,
            window,
            MAX_DECODE_QUERIES=self._max_decode_queries,
            TILE=self._decode.tile,
            MIN_TILES=segmenting.MIN_SEGMENT_TILES,
            BLOCK_S=triton.next_power_of_2(workspace.max_sequences),
            ITEMS=segmenting.PLANNED_ITEMS,
        )
