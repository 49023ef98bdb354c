"""Attention of long prefill chunks by torch's own kernels, on keys and values gathered from their blocks.

For many queries a copy of their context costs little beside what they compute with it, and kernels written for one
generation of cards (FlashAttention, cuDNN) may compute faster than what Triton makes for all of them. Nobody knows it
of a card before it is measured: `choose` does so once, at load. The other sequences of a step stay with their kernels.

The host must know the lengths of a step for this (`Batch.host_lengths`); nothing here waits for the device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from engine.kv.cache import KVShape
from engine.model.batch import Batch

Attend = Callable[[Tensor, Tensor, int], Tensor]
"""See `ops.Attention`."""
Prepare = Callable[[Batch, KVShape], Attend]
"""One step's attention, see `ops.Kernels.attention`."""
Seconds = Callable[[Callable[[], object]], float]
"""How long a call takes."""

MAX_TRIED_TOKENS, TRIED_CHUNKS = 8192, 4
"""At load: of the chunk that is timed, and chunks of context that it ends."""
NUM_PLANS, PLAN_ALIGNMENT = 8, 128
"""cuDNN makes a plan for each length, in some tenths of a second: so many lengths there are, multiples of that."""


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
    )


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What decides which way is fastest, beside the card."""

    shape: KVShape
    num_heads: int
    dtype: torch.dtype
    """Of queries and KV."""
    device: torch.device
    max_position: int
    min_queries: int
    """Of a long chunk."""
    max_queries: int
    """Of a step."""

    @property
    def longest(self) -> int:
        """Tokens of the longest chunk."""
        return min(self.max_queries, self.max_position)

    def ways(self, whole: Way | None, later: Way | None) -> Ways:
        return Ways(min_queries=self.min_queries, whole=whole, later=later)


@torch.inference_mode()
def choose(model: Model, others: Prepare, seconds: Seconds, say: Callable[[str], None]) -> Ways:
    """Times all ways that there are, for a whole context and for the end of a longer one.

    Args:
        say: is told, in one line, how long each took; nothing, if there is no other way than `others`.
    """
    length = min(model.longest, MAX_TRIED_TOKENS)
    context = min(TRIED_CHUNKS * length, model.max_position)
    there_are = [FLASH, replace(CUDNN, step=_plan_step(model.longest))]
    for_later = [way for way in there_are if way.after_context]
    whole = _time(model, (length, length), there_are, others, seconds)
    later = _time(model, (min(length, context // 2), context), for_later, others, seconds)
    lines = [_line(times, seen) for times, seen in ((whole, length), (later, context)) if len(times) > 1]
    if lines:
        say(f"attention of long prefills, ms a layer: {'; '.join(lines)}")
    ways = model.ways(_fastest(model, whole, others), _fastest(model, later, others))
    torch.cuda.empty_cache()
    return ways


def _plan_step(longest: int) -> int:
    return -(-longest // (NUM_PLANS * PLAN_ALIGNMENT)) * PLAN_ALIGNMENT


Times = dict[Way | None, float]
"""Seconds of each way that there is, and of the other sequences' (None); fastest first."""


def _time(
    model: Model, lengths: tuple[int, int], ways: list[Way], others: Prepare, seconds: Seconds
) -> Times:
    """For a chunk of (tokens, context)."""
    if lengths[0] < model.min_queries:
        return {}
    taken = {way: _seconds(model, lengths, others, way, seconds) for way in (None, *ways)}
    known = [(way, time_s) for way, time_s in taken.items() if time_s is not None]
    return dict(sorted(known, key=lambda pair: pair[1]))


def _seconds(
    model: Model, lengths: tuple[int, int], others: Prepare, way: Way | None, seconds: Seconds
) -> float | None:
    """None: it does not run with this card, dtype or head_dim, of which torch would tell at length, or lacks memory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return seconds(trial(model, lengths, others, way))
        except RuntimeError:
            return None


def _line(times: Times, seen: int) -> str:
    parts = (f"{way.name if way else 'triton'} {time_s * 1000:.2f}" for way, time_s in times.items())
    return f"{', '.join(parts)} ({seen:,} tokens seen)"


def _fastest(model: Model, times: Times, others: Prepare) -> Way | None:
    return next((way for way in times if way is None or _is_ready(model, way, others)), None)


def _is_ready(model: Model, way: Way, others: Prepare) -> bool:
    """Makes the plans of all lengths that steps will have, if it needs plans."""
    if way.step == 1:
        return True
    first = -(-model.min_queries // way.step) * way.step
    lengths = range(first, model.longest + way.step, way.step)
    return all(_seconds(model, (length, length), others, way, _once) is not None for length in lengths)


def _once(run: Callable[[], object]) -> float:
    run()
    return 0.0


def trial(model: Model, lengths: tuple[int, int], others: Prepare, way: Way | None) -> Callable[[], Tensor]:
    """One layer's attention of a chunk of (tokens, context), of random numbers.

    Args:
        way: None is that of `others`.
    """
    num_tokens, context = lengths
    batch = _batch(model, num_tokens, context)
    attend = attention(batch, model.shape, others=others, ways=model.ways(way, way))
    return partial(attend, *_contents(model, num_tokens, context), 0)


def _contents(model: Model, num_tokens: int, context: int) -> tuple[Tensor, Tensor]:
    """Queries, and one layer's KV of blocks for the context and block 0."""
    shape = model.shape
    size = (2, 1 - (-context // shape.block_size), shape.block_elements)
    layer_kv = torch.empty(size, dtype=model.dtype, device=model.device).normal_()
    queries = layer_kv.new_empty(num_tokens, model.num_heads, shape.head_dim).normal_()
    return queries, layer_kv


def _batch(model: Model, num_tokens: int, context: int) -> Batch:
    rows = torch.arange(num_tokens, dtype=torch.int32)
    num_blocks = -(-context // model.shape.block_size)
    return Batch(
        token_ids=torch.zeros_like(rows),
        positions=rows + (context - num_tokens),
        query_starts=torch.tensor([0, num_tokens], dtype=torch.int32),
        context_lens=torch.tensor([context], dtype=torch.int32),
        block_tables=torch.arange(1, num_blocks + 1, dtype=torch.int32)[None],
        sample_rows=rows[:0],
        host_lengths=[(num_tokens, context)],
    ).to(model.device)


def seconds_on_card(run: Callable[[], object], num_runs: int = 3) -> float:
    """The best of some runs, after one that makes what is made on first use."""
    run()
    return min(_elapsed(run) for _ in range(num_runs))


def _elapsed(run: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000
