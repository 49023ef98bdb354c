"""Attention of long prefill chunks by torch's own kernels, on keys and values gathered from their blocks.

For many queries a copy of their context costs little beside what they compute with it, and kernels written for one
generation of cards (FlashAttention, cuDNN) may compute faster than what Triton makes for all of them. Nobody knows it
of a card before it is measured, once, at load (`prefill_choice`). The other sequences stay with their kernels.

The host must know the lengths of a step for this (`Batch.host_lengths`); nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from engine.kernels.batch import Batch
from engine.kernels.kv_cache import KVShape

Attend = Callable[[Tensor, Tensor, int], Tensor]
"""See `ops.Attention`."""
Prepare = Callable[[Batch, KVShape], Attend]
"""One step's attention, see `ops.Kernels.attention`."""

PLAN_ALIGNMENT = 128
"""Tokens: cuDNN's lengths are multiples of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One of torch's kernels."""

    name: str
    backend: SDPBackend
    after_context: bool
    """It serves chunks that have earlier context, too, without a mask in memory."""
    step: int = 1
    """Chunks are padded to a multiple of it."""

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """
        Args:
            queries: [n, num_heads, head_dim], of the last n tokens of the context.
            keys, values: [num_kv_heads, context, head_dim]

        Returns:
            [n, num_heads * head_dim]
        """
        num_queries = queries.shape[0]
        if self.step > 1:  # what is added comes last: only what is added sees it
            queries, keys, values = self._padded(queries, keys, values)
        is_whole = queries.shape[0] == keys.shape[1]
        with sdpa_kernel(self.backend):
            attended = F.scaled_dot_product_attention(
                queries.transpose(0, 1)[None],
                keys[None],
                values[None],
                None if is_whole else causal_lower_right(queries.shape[0], keys.shape[1]),
                is_causal=is_whole,
                enable_gqa=True,
            )
        return attended[0].transpose(0, 1)[:num_queries].flatten(1)

    def _padded(self, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        more = -queries.shape[0] % self.step
        if not more:
            return queries, keys.contiguous(), values.contiguous()
        keys, values = (F.pad(each, (0, 0, 0, more)) for each in (keys, values))
        return F.pad(queries, (0, 0, 0, 0, 0, more)), keys, values


FLASH = Way(name="flash", backend=SDPBackend.FLASH_ATTENTION, after_context=True)
CUDNN = Way(name="cuDNN", backend=SDPBackend.CUDNN_ATTENTION, after_context=False, step=PLAN_ALIGNMENT)
"""Its causal mask is aligned to the first key, so that it takes whole contexts only."""
WAYS = (FLASH, CUDNN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """Which way long chunks go; None is that of the other sequences."""

    min_queries: int
    """Chunks of fewer are not long."""
    whole: Way | None = None
    """For those that are their whole context."""
    later: Way | None = None
    """For those with earlier context."""

    def of(self, num_tokens: int, context: int) -> Way | None:
        if num_tokens < self.min_queries:
            return None
        return self.whole if num_tokens == context else self.later


@dataclass(slots=True)
class _Run:
    """Neighbours in a batch: one long chunk, or sequences that are none."""

    sequences: slice
    rows: slice
    context: int
    """Of a long chunk."""
    way: Way | None
    """None: it is no long chunk."""

    @property
    def num_rows(self) -> int:
        return int(self.rows.stop - self.rows.start)


def attention(batch: Batch, shape: KVShape, *, others: Prepare, ways: Ways) -> Attend:
    """A step's attention: that of `others` if the step has no long chunk, or if only the device knows."""
    runs = _runs(batch.host_lengths or [], ways)
    if any(run.way for run in runs):
        return GatheredAttention(batch, shape, runs, others)
    return others(batch, shape)


class GatheredAttention:
    """`reference.PagedAttention` without windows: every long chunk in its way, all other sequences by `others`.

    A long chunk's keys and values of one layer are in memory a second time while it is attended, one chunk's at a time.
    """

    def __init__(self, batch: Batch, shape: KVShape, runs: list[_Run], others: Prepare) -> None:
        assert runs[-1].rows.stop == batch.positions.numel()
        self._shape, self._runs = shape, runs
        self._tiles = [_tiles(batch, run, shape) if run.way else None for run in runs]
        self._rest = [run for run in runs if run.way is None]
        self._others = others(_rest_of(batch, self._rest), shape) if self._rest else None

    def __call__(self, queries: Tensor, layer_kv: Tensor, window: int) -> Tensor:
        """As `reference.PagedAttention`; `window` is 0."""
        assert not window
        # Long chunks first: then no more is in memory beside their keys and values than in a step of one chunk.
        pieces = [
            None if tiles is None else self._attend(run, queries[run.rows], layer_kv, tiles)
            for run, tiles in zip(self._runs, self._tiles, strict=True)
        ]
        rest = self._attend_rest(queries, layer_kv)
        return _joined([next(rest) if piece is None else piece for piece in pieces])

    def _attend(self, run: _Run, queries: Tensor, layer_kv: Tensor, tiles: Tensor) -> Tensor:
        assert run.way is not None
        keys, values = (self._gather(half, tiles)[:, : run.context] for half in layer_kv.unbind())
        return run.way(queries, keys, values)

    def _gather(self, half: Tensor, tiles: Tensor) -> Tensor:
        """[num_kv_heads, P * block_size, head_dim]"""
        shape = self._shape
        found = half.view(-1, shape.block_size * shape.head_dim).index_select(0, tiles)
        return found.view(shape.num_kv_heads, -1, shape.head_dim)

    def _attend_rest(self, queries: Tensor, layer_kv: Tensor) -> Iterator[Tensor]:
        """Run by run."""
        if self._others is None:
            return iter(())
        attended = self._others(_joined([queries[run.rows] for run in self._rest]), layer_kv, 0)
        return iter(torch.split(attended, [run.num_rows for run in self._rest]))


def _runs(lengths: Iterable[tuple[int, int]], ways: Ways) -> list[_Run]:
    runs: list[_Run] = []
    row = 0
    for sequence, (num_tokens, context) in enumerate(lengths):
        way = ways.of(num_tokens, context)
        sequences, rows = slice(sequence, sequence + 1), slice(row, row + num_tokens)
        if way is None and runs and runs[-1].way is None:
            before = runs.pop()
            sequences, rows = slice(before.sequences.start, sequence + 1), slice(before.rows.start, rows.stop)
        runs.append(_Run(sequences, rows, context, way))
        row += num_tokens
    return runs


def _tiles(batch: Batch, run: _Run, shape: KVShape) -> Tensor:
    """[num_kv_heads * P] where a chunk's tiles of one head and block are in a layer's keys or values, head by head."""
    num_blocks = -(-run.context // shape.block_size)
    blocks = batch.block_tables[run.sequences.start, :num_blocks]
    heads = torch.arange(shape.num_kv_heads, dtype=torch.int32, device=blocks.device)
    return (heads[:, None] + blocks * shape.num_kv_heads).flatten()


def _rest_of(batch: Batch, runs: list[_Run]) -> Batch:
    """The batch of these sequences alone; its tensors are new ones, aligned as kernels like it."""
    assert batch.host_lengths is not None
    lengths = [pair for run in runs for pair in batch.host_lengths[run.sequences]]
    starts, num_rows = [], 0
    for run in runs:
        starts.append(batch.query_starts[run.sequences] - (run.rows.start - num_rows))
        num_rows += run.num_rows
    starts.append(batch.query_starts[-1:] - (batch.positions.numel() - num_rows))
    return Batch(
        token_ids=torch.cat([batch.token_ids[run.rows] for run in runs]),
        positions=torch.cat([batch.positions[run.rows] for run in runs]),
        query_starts=torch.cat(starts),
        context_lens=torch.cat([batch.context_lens[run.sequences] for run in runs]),
        block_tables=torch.cat([batch.block_tables[run.sequences] for run in runs]),
        sample_rows=batch.sample_rows[:0],
        max_query_len=max(num_tokens for num_tokens, _ in lengths),
    )


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
