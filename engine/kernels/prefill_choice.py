"""Which backends attend long prefill chunks, found out by timing them once on the card, at load."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from engine.kernels.batch import Batch, blank_batch
from engine.kernels.gathered import (
    CUDNN,
    FLASH,
    PLAN_ALIGNMENT,
    ContiguousBackend,
    LongPrefillBackends,
    PrepareAttention,
    prepare_attention,
)
from engine.kernels.kv_cache import KVShape

Timer = Callable[[Callable[[], object]], float]
"""Says how many seconds a call takes."""

MAX_TRIED_TOKENS, TRIED_CHUNKS = 8192, 4
"""The chunk that is timed has at most so many tokens, and ends a context of so many chunks."""
NUM_PLANS = 8
"""There are so many lengths that cuDNN makes a plan for; each takes it some tenths of a second."""
_NOT_OFFERED = ("No available kernel", "No viable backend")
"""So torch begins to say that it has no such kernel for this card, dtype or head_dim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What decides, beside the card, which backend is fastest."""

    shape: KVShape
    num_heads: int
    dtype: torch.dtype
    """The dtype of queries and KV."""
    device: torch.device
    max_position: int
    min_queries: int
    """A chunk of fewer tokens is not long."""
    max_queries: int
    """A step has no more tokens."""

    @property
    def longest(self) -> int:
        """Tokens of the longest chunk."""
        return min(self.max_queries, self.max_position)

    def backends(
        self, first_chunk: ContiguousBackend | None, later_chunk: ContiguousBackend | None
    ) -> LongPrefillBackends:
        return LongPrefillBackends(
            min_queries=self.min_queries, first_chunk=first_chunk, later_chunk=later_chunk
        )


@torch.inference_mode()
def choose(
    model: Model, prepare_paged: PrepareAttention, timer: Timer, say: Callable[[str], None]
) -> LongPrefillBackends:
    """Times all backends that there are, for a prompt's first chunk and for one that ends a longer context.

    A backend that fails is left out. Nothing of the trials stays on the device.

    Args:
        say: It is told, in one line, how long each took, unless there is none but `prepare_paged`; and in a line each,
            which failed and why.

    Raises:
        torch.AcceleratorError: The device is lost.
    """
    backends = _choose(model, _Trials(model, prepare_paged, timer, say), say)
    gc.collect()  # an error that is part of a reference cycle keeps the tensors of the frames that it came through
    torch.cuda.empty_cache()
    return backends


Times = dict[ContiguousBackend | None, float]
"""Seconds of each backend that runs, and of paged attention (None); fastest first."""


def _choose(model: Model, trials: _Trials, say: Callable[[str], None]) -> LongPrefillBackends:
    length = min(model.longest, MAX_TRIED_TOKENS)
    context = min(TRIED_CHUNKS * length, model.max_position)
    backends = [FLASH, replace(CUDNN, length_multiple=_plan_multiple(model.longest))]
    first = trials.times((length, length), backends)
    later_backends = [backend for backend in backends if backend.takes_later_chunks]
    later = trials.times((min(length, context // 2), context), later_backends)
    lines = [_line(times, seen) for times, seen in ((first, length), (later, context)) if len(times) > 1]
    if lines:
        say(f"attention of long prefills, ms a layer: {'; '.join(lines)}")
    return model.backends(trials.fastest(first), trials.fastest(later))


def _plan_multiple(longest: int) -> int:
    return -(-longest // (NUM_PLANS * PLAN_ALIGNMENT)) * PLAN_ALIGNMENT


def _line(times: Times, seen: int) -> str:
    parts = (f"{_name(backend)} {time_s * 1000:.2f}" for backend, time_s in times.items())
    return f"{', '.join(parts)} ({seen:,} tokens seen)"


def _name(backend: ContiguousBackend | None) -> str:
    return backend.name if backend else "triton"


@dataclass(frozen=True, slots=True)
class _Trials:
    """Runs backends on chunks of random numbers."""

    model: Model
    prepare_paged: PrepareAttention
    timer: Timer
    say: Callable[[str], None]

    def times(self, lengths: tuple[int, int], backends: list[ContiguousBackend]) -> Times:
        """The times of a chunk of (tokens, context)."""
        if lengths[0] < self.model.min_queries:
            return {}
        taken = {backend: self._seconds(lengths, backend, self.timer) for backend in (None, *backends)}
        known = [(backend, time_s) for backend, time_s in taken.items() if time_s is not None]
        return dict(sorted(known, key=lambda pair: pair[1]))

    def fastest(self, times: Times) -> ContiguousBackend | None:
        return next((backend for backend in times if backend is None or self._is_ready(backend)), None)

    def _is_ready(self, backend: ContiguousBackend) -> bool:
        """Makes the plans of all lengths that steps will have, if the backend needs plans."""
        multiple, model = backend.length_multiple, self.model
        if multiple == 1:
            return True
        first = -(-model.min_queries // multiple) * multiple
        lengths = range(first, model.longest + multiple, multiple)
        return all(self._seconds((length, length), backend, _once) is not None for length in lengths)

    def _seconds(
        self, lengths: tuple[int, int], backend: ContiguousBackend | None, timer: Timer
    ) -> float | None:
        """The time of a chunk of (tokens, context); None if the backend does not run."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch tells at length why it has no such kernel
            try:
                return timer(trial(self.model, lengths, self.prepare_paged, backend))
            except torch.AcceleratorError:
                raise
            except Exception as error:  # Triton has errors of its own, and asserts
                self._report(error, lengths, backend)
                return None

    def _report(self, error: Exception, lengths: tuple[int, int], backend: ContiguousBackend | None) -> None:
        """Tells why a backend is left out, unless torch just does not offer it here, or memory is short."""
        reason = str(error).partition("\n")[0]
        if isinstance(error, torch.OutOfMemoryError) or reason.startswith(_NOT_OFFERED):
            return
        of = f"{lengths[0]:,} of {lengths[1]:,} tokens"
        cause = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
        self.say(f"attention of long prefills is not by {_name(backend)}, which fails at {of} ({cause})")


def _once(run: Callable[[], object]) -> float:
    run()
    return 0.0


def trial(
    model: Model,
    lengths: tuple[int, int],
    prepare_paged: PrepareAttention,
    backend: ContiguousBackend | None,
) -> Callable[[], Tensor]:
    """One layer's attention of a chunk of (tokens, context), of random numbers.

    Args:
        backend: None is that of `prepare_paged`.
    """
    num_tokens, context = lengths
    batch, backends = _batch(model, num_tokens, context), model.backends(backend, backend)
    attend = prepare_attention(batch, model.shape, prepare_paged=prepare_paged, backends=backends)
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
