"""Attention of long prefill chunks by torch's own kernels, on keys and values gathered from their blocks.

For many queries a copy of their context costs little beside what they compute with it, and kernels written for one
generation of cards (FlashAttention, cuDNN) may compute faster than what Triton makes for all of them. Nobody knows it
of a card before it is measured, once, at load (`prefill_choice`). All other sequences stay with paged attention.

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
"""One step's attention, which every layer calls; see `ops.Attention`."""
PrepareAttention = Callable[[Batch, KVShape], Attend]
"""Prepares the attention of one step; see `ops.Kernels.attention`."""

PLAN_ALIGNMENT = 128
"""The lengths that cuDNN makes plans for are multiples of so many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContiguousBackend:
    """One of torch's attention kernels, which take contiguous keys and values."""

    name: str
    backend: SDPBackend
    takes_later_chunks: bool
    """The kernel also serves chunks that have earlier context, without a mask in memory."""
    length_multiple: int = 1
    """Chunks are padded to a multiple of so many tokens."""

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attends one chunk.

        Args:
            queries: [n, num_heads, head_dim], of the last n tokens of the context.
            keys, values: [num_kv_heads, context, head_dim]

        Returns:
            [n, num_heads * head_dim]
        """
        num_queries = queries.shape[0]
        if self.length_multiple > 1:  # the padding comes last: only padding sees it
            queries, keys, values = self._padded(queries, keys, values)
        is_first_chunk = queries.shape[0] == keys.shape[1]
        with sdpa_kernel(self.backend):
            attended = F.scaled_dot_product_attention(
                queries.transpose(0, 1)[None],
                keys[None],
                values[None],
                None if is_first_chunk else causal_lower_right(queries.shape[0], keys.shape[1]),
                is_causal=is_first_chunk,
                enable_gqa=True,
            )
        return attended[0].transpose(0, 1)[:num_queries].flatten(1)

    def _padded(self, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        num_padding = -queries.shape[0] % self.length_multiple
        if not num_padding:
            return queries, keys.contiguous(), values.contiguous()
        keys, values = (F.pad(each, (0, 0, 0, num_padding)) for each in (keys, values))
        return F.pad(queries, (0, 0, 0, 0, 0, num_padding)), keys, values


FLASH = ContiguousBackend(name="flash", backend=SDPBackend.FLASH_ATTENTION, takes_later_chunks=True)
CUDNN = ContiguousBackend(
    name="cuDNN",
    backend=SDPBackend.CUDNN_ATTENTION,
    takes_later_chunks=False,
    length_multiple=PLAN_ALIGNMENT,
)
"""The causal mask of cuDNN is aligned to the first key, so that it takes first chunks only."""
BACKENDS = (FLASH, CUDNN)


@dataclass(frozen=True, slots=True, kw_only=True)
class LongPrefillBackends:
    """The backends that attend long prefill chunks; None is paged attention."""

    min_queries: int
    """A chunk of fewer tokens is not long."""
    first_chunk: ContiguousBackend | None = None
    """Attends chunks without earlier context."""
    later_chunk: ContiguousBackend | None = None
    """Attends chunks with earlier context."""

    def backend_of(self, num_tokens: int, context: int) -> ContiguousBackend | None:
        """The backend of a chunk that ends a context; None if paged attention has it."""
        if num_tokens < self.min_queries:
            return None
        return self.first_chunk if num_tokens == context else self.later_chunk


@dataclass(slots=True)
class _Span:
    """Neighbouring sequences of a batch: one with a long chunk, or several for paged attention."""

    sequences: slice
    rows: slice
    context: int
    """The context of the long chunk."""
    backend: ContiguousBackend | None
    """The backend of the long chunk; None if the span is for paged attention."""

    @property
    def num_rows(self) -> int:
        return int(self.rows.stop - self.rows.start)


def prepare_attention(
    batch: Batch, shape: KVShape, *, prepare_paged: PrepareAttention, backends: LongPrefillBackends
) -> Attend:
    """A step's attention; it is the paged one if no chunk has a backend, or if only the device knows the lengths."""
    spans = _spans(batch.host_lengths or [], backends)
    if any(span.backend for span in spans):
        return GatheredAttention(batch, shape, spans, prepare_paged)
    return prepare_paged(batch, shape)


class GatheredAttention:
    """`reference.PagedAttention` without windows, in which backends attend the long chunks.

    A long chunk's keys and values of one layer are in memory a second time while it is attended, one chunk's at a time.
    """

    def __init__(
        self, batch: Batch, shape: KVShape, spans: list[_Span], prepare_paged: PrepareAttention
    ) -> None:
        assert spans[-1].rows.stop == batch.positions.numel()
        self._shape, self._spans = shape, spans
        self._places = [_kv_places(batch, span, shape) if span.backend else None for span in spans]
        self._paged_spans = [span for span in spans if span.backend is None]
        self._attend_paged: Attend | None = None
        if self._paged_spans:
            self._attend_paged = prepare_paged(_batch_of(batch, self._paged_spans), shape)

    def __call__(self, queries: Tensor, layer_kv: Tensor, window: int) -> Tensor:
        """Attends one layer, as `reference.PagedAttention` does; `window` is 0."""
        assert not window
        # Long chunks first: then no more is in memory beside their keys and values than in a step of one chunk.
        parts = [
            None if places is None else self._attend_chunk(span, queries[span.rows], layer_kv, places)
            for span, places in zip(self._spans, self._places, strict=True)
        ]
        paged = self._attend_paged_spans(queries, layer_kv)
        return _joined([next(paged) if part is None else part for part in parts])

    def _attend_chunk(self, span: _Span, queries: Tensor, layer_kv: Tensor, places: Tensor) -> Tensor:
        assert span.backend is not None
        keys, values = (self._gather(half, places)[:, : span.context] for half in layer_kv.unbind())
        return span.backend(queries, keys, values)

    def _gather(self, half: Tensor, places: Tensor) -> Tensor:
        """[num_kv_heads, P * block_size, head_dim]"""
        shape = self._shape
        found = half.view(-1, shape.block_size * shape.head_dim).index_select(0, places)
        return found.view(shape.num_kv_heads, -1, shape.head_dim)

    def _attend_paged_spans(self, queries: Tensor, layer_kv: Tensor) -> Iterator[Tensor]:
        """The results of the paged spans, one after the other."""
        if self._attend_paged is None:
            return iter(())
        attended = self._attend_paged(
            _joined([queries[span.rows] for span in self._paged_spans]), layer_kv, 0
        )
        return iter(torch.split(attended, [span.num_rows for span in self._paged_spans]))


def _spans(lengths: Iterable[tuple[int, int]], backends: LongPrefillBackends) -> list[_Span]:
    spans: list[_Span] = []
    row = 0
    for sequence, (num_tokens, context) in enumerate(lengths):
        backend = backends.backend_of(num_tokens, context)
        sequences, rows = slice(sequence, sequence + 1), slice(row, row + num_tokens)
        if backend is None and spans and spans[-1].backend is None:
            before = spans.pop()
            sequences, rows = slice(before.sequences.start, sequence + 1), slice(before.rows.start, rows.stop)
        spans.append(_Span(sequences, rows, context, backend))
        row += num_tokens
    return spans


def _kv_places(batch: Batch, span: _Span, shape: KVShape) -> Tensor:
    """[num_kv_heads * P] The places of a context's blocks in a layer's keys or values, head by head."""
    num_blocks = -(-span.context // shape.block_size)
    blocks = batch.block_tables[span.sequences.start, :num_blocks]
    heads = torch.arange(shape.num_kv_heads, dtype=torch.int32, device=blocks.device)
    return (heads[:, None] + blocks * shape.num_kv_heads).flatten()


def _batch_of(batch: Batch, spans: list[_Span]) -> Batch:
    """The batch of these sequences alone; its tensors are new ones, aligned as kernels like it."""
    assert batch.host_lengths is not None
    lengths = [pair for span in spans for pair in batch.host_lengths[span.sequences]]
    starts, num_rows = [], 0
    for span in spans:
        starts.append(batch.query_starts[span.sequences] - (span.rows.start - num_rows))
        num_rows += span.num_rows
    starts.append(batch.query_starts[-1:] - (batch.positions.numel() - num_rows))
    return Batch(
        token_ids=torch.cat([batch.token_ids[span.rows] for span in spans]),
        positions=torch.cat([batch.positions[span.rows] for span in spans]),
        query_starts=torch.cat(starts),
        context_lens=torch.cat([batch.context_lens[span.sequences] for span in spans]),
        block_tables=torch.cat([batch.block_tables[span.sequences] for span in spans]),
        sample_rows=batch.sample_rows[:0],
        max_query_len=max(num_tokens for num_tokens, _ in lengths),
    )


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
