"""The service: everything between a checked request and the engine, on one event loop.

It submits and cancels, hands every step's outputs to the streams they belong to, watches over those that wait, and
ends them all when the server does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Protocol

from engine.engine import EngineState, EngineStats
from engine.planning.request import FinishReason, Output, Request
from engine.planning.step import StepReport
from gateway.access import Access, Client
from gateway.connections import Timeouts
from gateway.errors import ApiError, internal, refused, unavailable
from gateway.idempotency import Idempotency
from gateway.limits import Limits
from gateway.metrics import Metrics, StoreMetrics
from gateway.prefixes import PrefixLocator, PrefixTracker, PrefixWriter, WarmUp
from gateway.prompts import Prompts, Tokenizer
from gateway.quotas import Quotas
from gateway.recordings.registry import Recordings, Replayer
from gateway.store.interface import Store
from gateway.streams import Generation, joined
from gateway.warming import Warming
from priority.admission import Forecast
from priority.lanes import Lane, Tenant
from priority.queue import Refusal

log = logging.getLogger("penstock.gateway")


class Engine(Protocol):
    """What the service needs of `engine.engine.Engine`."""

    state: EngineState
    error: str | None
    last_progress_s: float

    @property
    def max_sequence_tokens(self) -> int: ...

    def wake(self) -> None: ...

    def cancel(self, request_id: str) -> None: ...

    def num_cached_tokens(self, token_ids: Sequence[int], salt: bytes) -> int: ...

    def stats(self) -> EngineStats: ...


class Queue(Protocol):
    """What the service needs of `priority.queue.LaneQueue`."""

    def put(self, request: Request, now: float, num_cached: int = 0) -> Forecast | None: ...

    def readmit(self, request: Request, now: float) -> None: ...

    def check_open(self, lane: Lane, tenant: str, now: float) -> None: ...

    def cancel(self, request_id: str) -> bool: ...

    def expire(self, now: float) -> list[Request]: ...

    def depths(self) -> dict[Lane, int]: ...

    def step_model(self) -> dict[str, float]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What a request that does not say gets; a checkpoint's generation_config may say otherwise than OpenAI."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """What the operator sets."""

    models: tuple[str, ...]
    """Names the model answers to; the first is the one it calls itself."""
    created: int = 0
    """When the model was made, in seconds since 1970."""
    block_size: int = 16
    vocab_size: int | None = None
    """Of the model; its tokenizer may have more or fewer."""
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    limits: Limits = field(default_factory=Limits)
    timeouts: Timeouts = field(default_factory=Timeouts)
    clients: Mapping[bytes, Client | Tenant] = field(default_factory=dict)
    """SHA-256 digest of each API key (see `gateway.access.digest_of`) to whose it is."""
    promises: Mapping[Lane, float] = field(default_factory=dict)
    """Seconds to the first token that a lane promises, where it does."""
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    """Names that the server answers to; none is any."""
    metrics_compat: str | None = None
    replica: str = "local"
    """This process's name among those that share a store."""
    warm_up_tokens: int = 0
    """Most prompt tokens of a process before this one that are computed again."""


class Service:
    """One served model. Everything but the constructor is for the event loop's thread."""

    def __init__(
        self,
        engine: Engine,
        queue: Queue,
        tokenizer: Tokenizer,
        options: ServiceOptions,
        *,
        sink: Replayer,
        store: Store,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`sink` and `clock` must be the engine's."""
        self.engine = engine
        self.queue = queue
        self.tokenizer = tokenizer
        self.options = options
        self.clock = clock
        self.prompts = Prompts(tokenizer)
        self.access = Access(options.clients)
        self.metrics = Metrics()
        if options.metrics_compat == "vllm":
            self.metrics.add_compat(options.models[0], self._cache_config)
        self.vocab_size = min(options.vocab_size or tokenizer.vocab_size, tokenizer.vocab_size)
        """Token ids are smaller than this."""
        self.store = store
        self.metrics.registry.register(StoreMetrics(store.stats))
        self.prefixes = PrefixTracker()
        self.locator = PrefixLocator(store, options.replica, options.block_size, engine.num_cached_tokens)
        self._prefix_writer = PrefixWriter(self.prefixes, store, with_tokens=options.warm_up_tokens > 0)
        self.quotas = Quotas(store)
        self.idempotency = Idempotency(store)
        self.recordings = Recordings(self, store, sink, clock)
        self.recordings.on_resume = self.metrics.resumes.inc
        self.draining = False
        self._warm_up: asyncio.Task[None] | None = None
        self._streams: dict[Generation, None] = {}
        self._by_request: dict[str, Generation] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def context_length(self) -> int:
        """Prompt and output tokens that one sequence can ever have."""
        return self.engine.max_sequence_tokens

    @property
    def engine_state(self) -> EngineState:
        return self.engine.state

    # Requests come and go

    def check_open(self) -> None:
        """Raises 503 if no work is taken: still loading, draining, or the engine is lost."""
        if self.draining:
            raise unavailable("The server is shutting down.", "server_shutting_down", close=True)
        if self.engine.state is EngineState.STARTING:
            raise unavailable("The model is still loading.", "model_loading")
        if self.engine.state is not EngineState.READY:
            raise unavailable("The engine is not running.", "engine_failed")

    def check_room(self, lane: Lane, tenant: str) -> None:
        """Raises 429 or 503 if the lane is full, before any work is spent on the request."""
        with self._refusing(lane):
            self.queue.check_open(lane, tenant, self.clock())

    def submit(self, stream: Generation) -> None:
        """Queues all requests of a stream, or none.

        Raises:
            ApiError: 429 or 503 with Retry-After.
        """
        self.check_open()
        self._streams[stream] = None
        self._empty.clear()
        try:
            for request in stream.requests:
                stream.note_forecast(self._put(request), self.clock())
                self._by_request[request.request_id] = stream
        except ApiError:
            self.release(stream)
            raise
        self.engine.wake()

    def resume(self, stream: Generation) -> None:
        """Queues what another process let in and did not finish: it is not asked again whether there is room."""
        self._streams[stream] = None
        self._empty.clear()
        for request in stream.requests:
            self.queue.readmit(request, self.clock())
            self._by_request[request.request_id] = stream
        self.engine.wake()

    def release(self, stream: Generation) -> None:
        """The reader is done with its stream, or gone: whatever of it still waits or runs is cancelled. Idempotent."""
        for request in stream.requests:
            known = self._by_request.pop(request.request_id, None)
            if known is not None and stream.num_unfinished(request.request_id):
                self._cancel(request, stream.num_unfinished(request.request_id))
        if stream.reservation is not None:
            stream.reservation.end(stream.num_used_tokens)
        stream.leave()
        self._streams.pop(stream, None)
        if not self._streams:
            self._empty.set()

    def _cancel(self, request: Request, num_choices: int) -> None:
        if not self.queue.cancel(request.request_id):
            self.engine.cancel(request.request_id)
        for _ in range(num_choices):
            self.metrics.note_finished(Lane(request.lane), FinishReason.CANCELLED, None)

    def _put(self, request: Request) -> Forecast | None:
        lane = Lane(request.lane)
        num_cached = self.engine.num_cached_tokens(request.prompt_token_ids, request.salt)
        with self._refusing(lane):
            forecast = self.queue.put(request, self.clock(), num_cached)
        self.metrics.note_admitted(lane, len(request.prompt_token_ids))
        if forecast is not None and isfinite(forecast.allowed_s):
            self.metrics.note_forecast(lane, forecast.seconds, forecast.allowed_s)
        return forecast

    @contextlib.contextmanager
    def _refusing(self, lane: Lane) -> Iterator[None]:
        try:
            yield
        except Refusal as refusal:
            self.metrics.note_refused(lane, refusal.reason)
            raise refused(
                str(refusal), refusal.reason, refusal.retry_after_s, tenant_limit=refusal.tenant_limit
            ) from None

    # Steps come in

    def deliver(self, *reports: StepReport) -> None:
        """What a step brought, or several steps while the event loop had no time: then it is sent in fewer pieces."""
        for report in reports:
            self.metrics.note_step(report, sum(len(output.token_ids) for output in report.outputs))
            self.prefixes.take(report.prefix_events)
        for output in reports[0].outputs if len(reports) == 1 else self._joined(reports):
            stream = self._by_request.get(output.request_id)
            # One that was released is counted as cancelled already.
            if stream is not None:
                self._push(stream, output)

    def _joined(self, reports: Iterable[StepReport]) -> list[Output]:
        outputs = [output for report in reports for output in report.outputs]
        streams = {output.request_id: self._by_request.get(output.request_id) for output in outputs}
        apart = {request_id for request_id, stream in streams.items() if stream and not stream.may_join}
        return [
            *joined(output for output in outputs if output.request_id not in apart),
            *(output for output in outputs if output.request_id in apart),
        ]

    def _push(self, stream: Generation, output: Output) -> None:
        try:
            stream.push(output)
        except Exception:
            log.exception("passing on the output of %s failed", output.request_id)
            stream.fail(internal("The server could not send the output."))
        if output.finish_reason is not None:
            self._note_finished(output, stream)

    def _note_finished(self, output: Output, stream: Generation) -> None:
        assert output.finish_reason is not None
        lane = Lane(stream.requests[0].lane)
        self.metrics.note_finished(lane, output.finish_reason, output.timings)
        self._note_promise(lane, output, stream)

    def _note_promise(self, lane: Lane, output: Output, stream: Generation) -> None:
        if output.timings is None or output.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        ttft_s = output.timings.first_token_s - output.timings.arrival_s
        self.metrics.note_promise(lane, ttft_s, self.options.promises.get(lane), stream.predicted_ttft_s)

    # Watching over

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """While this is entered, waiting requests expire, streams are kept alive and slow readers are cut."""
        task = asyncio.create_task(self._watch())
        try:
            async with (
                self.store.running(),
                self._prefix_writer.running(),
                self.quotas.running(),
                self.recordings.running(),
            ):
                yield
        finally:
            await _end(task)
            await _end(self._warm_up)

    async def _watch(self) -> None:
        tick_s = self.options.timeouts.tick_s
        while True:
            due = self.clock() + tick_s
            await asyncio.sleep(tick_s)
            self.metrics.loop_lag.observe(max(0.0, self.clock() - due))
            try:
                self.tick(self.clock())
            except Exception:
                log.exception("looking after the streams failed; going on")

    def warm_up(self) -> None:
        """Begins to compute what the processes before this one had in their caches, while nobody needs the engine."""
        if not self.store.durable or not self.options.warm_up_tokens:
            return
        warm_up = WarmUp(
            self._warm,
            self._is_idle,
            block_size=self.options.block_size,
            max_tokens=self.options.warm_up_tokens,
        )
        self._warm_up = asyncio.create_task(warm_up.run(self.store, self.prefixes))

    async def _warm(self, token_ids: list[int], salt: bytes) -> None:
        warming = Warming(token_ids, salt, self.clock())
        self.submit(warming)
        try:
            await warming.over()
        finally:
            self.release(warming)

    def _is_idle(self) -> bool:
        return all(isinstance(stream, Warming) for stream in self._streams)

    def tick(self, now: float) -> None:
        """One look at everything that waits. `running` calls it several times a second."""
        for request in self.queue.expire(now):
            self._expire(request)
        if self.engine.state in (EngineState.FAILED, EngineState.STOPPED):
            self.fail_all("The engine stopped.", code="engine_failed")
        for stream in list(self._streams):
            stream.look_after(now, self.options.timeouts)
        self.recordings.tick(now)

    def _expire(self, request: Request) -> None:
        lane = Lane(request.lane)
        self.metrics.note_refused(lane, "queue_timeout")
        stream = self._by_request.get(request.request_id)
        if stream is not None:
            message = f"The request waited too long in the {lane.label} lane."
            stream.fail(refused(message, "queue_timeout", 10.0, tenant_limit=False))

    # Health

    @property
    def stalled(self) -> bool:
        """The step loop is up, but ended no turn for too long."""
        silent_s = self.clock() - self.engine.last_progress_s
        return self.engine.state is EngineState.READY and silent_s > self.options.timeouts.engine_stall_s

    @property
    def health(self) -> str:
        """ok, stalled or failed."""
        if self.engine.state in (EngineState.FAILED, EngineState.STOPPED):
            return "failed"
        return "stalled" if self.stalled else "ok"

    @property
    def readiness(self) -> str:
        """ready, or why not: draining, loading, stalled or failed."""
        if self.draining:
            return "draining"
        if self.engine.state is EngineState.STARTING:
            return "loading"
        return "ready" if self.health == "ok" else self.health

    def render_metrics(self) -> bytes:
        """The metrics; what changes without a step is read now."""
        self.metrics.streams.set(len(self._streams))
        self.metrics.recordings.set(len(self.recordings))
        self.metrics.prefix_blocks.set(self.prefixes.num_tracked)
        self.metrics.prefix_depth.set(self.prefixes.deepest)
        self.metrics.up.set(self.readiness in ("ready", "draining"))
        self.metrics.pool_violations.set(self.engine.stats().num_pool_violations)
        for name, value in self.queue.step_model().items():
            self.metrics.step_model.labels(name).set(value)
        for lane, depth in self.queue.depths().items():
            self.metrics.queued.labels(lane.label).set(depth)
        return self.metrics.render()

    def _cache_config(self) -> dict[str, str]:
        stats = self.engine.stats()
        return {"block_size": str(self.options.block_size), "num_gpu_blocks": str(stats.num_blocks)}

    # The end

    def begin_drain(self) -> None:
        """From now on /ready is red and new work is refused; what was let in goes on."""
        self.draining = True
        if self._warm_up is not None:
            self._warm_up.cancel()

    async def drained(self, timeout_s: float) -> bool:
        """Waits until the last stream has ended; False if that took too long."""
        try:
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def fail_all(
        self, message: str = "The server is shutting down.", code: str = "server_shutting_down"
    ) -> None:
        """Ends every stream with an error; each is answered or gets its error frame and [DONE]."""
        error = unavailable(message, code, close=True)
        for stream in list(self._streams):
            stream.fail(error)


async def _end(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
