"""Which way long prefill chunks are attended, found out by timing them once on the card, at load."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from engine.kernels.batch import Batch, blank_batch
from engine.kernels.gathered import CUDNN, FLASH, PLAN_ALIGNMENT, Prepare, Way, Ways, attention
from engine.kernels.kv_cache import KVShape

Seconds = Callable[[Callable[[], object]], float]
"""How long a call takes."""

MAX_TRIED_TOKENS, TRIED_CHUNKS = 8192, 4
"""Of the chunk that is timed, and chunks of context that it ends."""
NUM_PLANS = 8
"""cuDNN makes a plan for each length, in some tenths of a second: so many lengths there are."""


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
    num_blocks = -(-context // model.shape.block_size)
    tables = torch.arange(1, num_blocks + 1, dtype=torch.int32)[None]
    return blank_batch([num_tokens], [context], tables).to(model.device)


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
