"""Generations on their way: into the queue, from the engine's steps to their readers, and out again.

Each is let in or refused, is handed what every step brought for it, and ends once: finished, failed or released.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Protocol

from penstock.engine.engine import EngineState, EngineStats
from penstock.engine.planning.block_map import BlockMap
from penstock.engine.planning.keeping import Keeping
from penstock.engine.planning.report import StepReport
from penstock.engine.planning.request import FinishReason, Output, Request
from penstock.gateway.errors import ApiError, internal, refused, unavailable
from penstock.gateway.http.connections import Timeouts
from penstock.gateway.metrics import Metrics
from penstock.gateway.reply.generation import Generation, joined
from penstock.gateway.tickets import Tickets
from penstock.priority.lanes import Lane, Urgency
from penstock.priority.queue import LaneQueue
from penstock.priority.verdict import Forecast, Refusal

log = logging.getLogger("penstock.gateway")


class ServingEngine(Protocol):
    """The part of `engine.engine.Engine` that the gateway uses."""

    state: EngineState
    error: str | None
    last_progress_s: float

    @property
    def max_sequence_tokens(self) -> int: ...

    def longest(self, keeping: Keeping) -> int: ...

    def wake(self) -> None: ...

    def expect(self, requests: Sequence[Request]) -> None: ...

    def cancel(self, request_id: str) -> None: ...

    def find_cached(self, hashes: Sequence[bytes], token_ids: Sequence[int]) -> tuple[int, int]: ...

    def stats(self) -> EngineStats: ...

    def unfilled_kv(self) -> float: ...

    def block_map(self) -> BlockMap | None: ...


class Tracing(Protocol):
    """The part of `gateway.tracing.Traces` that a dispatch uses."""

    def begin(self, stream: Generation) -> None: ...

    def end(self, stream: Generation) -> None: ...


class Dispatch:
    """All generations of this process that have not ended. For the event loop's thread."""

    def __init__(
        self,
        engine: ServingEngine,
        queue: LaneQueue,
        metrics: Metrics,
        clock: Callable[[], float],
        promises: Mapping[Lane, float],
        traces: Tracing | None = None,
        keeping: Keeping | None = None,
    ) -> None:
        """
        Args:
            promises: the seconds to the first token that a lane promises, where it does.
            keeping: the part of a long sequence that is kept, unless its request wants another.
        """
        self._engine = engine
        self._queue = queue
        self.draining = False
        """Whether new work is refused because the server shuts down."""
        self.tickets = Tickets()
        self.on_put: Callable[[Sequence[Request]], None] = lambda _: None
        """Is told of new requests just before they are queued."""
        self._metrics = metrics
        self._clock = clock
        self._promises = promises
        self._traces = traces
        self._keeping = keeping
        self._streams: dict[Generation, None] = {}
        self._by_request: dict[str, Generation] = {}
        self._by_name: dict[tuple[str, str], dict[Generation, None]] = {}
        """The generations of each tenant's `x-request-id`."""
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[Generation]:
        return iter(self._streams)

    @property
    def context_length(self) -> int:
        """Prompt and output tokens that one sequence can ever have, unless its request says how much is kept of it."""
        return self.longest(self._keeping)

    def longest(self, keeping: Keeping | None) -> int:
        """Prompt and output tokens that a sequence can ever have of which so much is kept; None if all is."""
        return self._engine.max_sequence_tokens if keeping is None else self._engine.longest(keeping)

    @property
    def engine_state(self) -> EngineState:
        return self._engine.state

    def waiting(self, tenant: str, correlation: str) -> dict[str, object] | None:
        """Returns the queue place of the tenant's request with that `x-request-id`; None if it does not wait there."""
        for stream in self._by_name.get((tenant, correlation), ()):
            positions = [self._queue.position(request.request_id) for request in stream.requests]
            if (last := max((one for one in positions if one is not None), default=None)) is not None:
                waited_s = self._clock() - stream.requests[0].arrival_s
                predicted_s = stream.predicted_ttft_s
                left_ms = None if predicted_s is None else round(1000 * max(0.0, predicted_s - waited_s))
                return {"position": last, "waited_ms": round(1000 * waited_s), "first_token_in_ms": left_ms}
        return None

    # Requests come and go

    def check_open(self) -> None:
        """Raises 503 if no work is taken: still loading, draining, or the engine is lost."""
        if self.draining:
            raise unavailable("The server is shutting down.", "server_shutting_down", close=True)
        if self._engine.state is EngineState.STARTING:
            raise unavailable("The model is still loading.", "model_loading")
        if self._engine.state is not EngineState.READY:
            raise unavailable("The engine is not running.", "engine_failed")

    def check_room(self, urgency: Urgency, tenant: str, arrival_s: float, most_tokens: int) -> None:
        """Raises 429 or 503 if no request of at most so many tokens is let in, before any work is spent on it."""
        with self._refusing(urgency.lane):
            self._queue.check_open(urgency, tenant, arrival_s, self._clock(), most_tokens)

    def submit(self, stream: Generation) -> None:
        """Queues all requests of a stream, or none; raises 429 or 503 with Retry-After."""
        self._enter(stream)
        if self._traces is not None:
            self._traces.begin(stream)
        try:
            self.check_open()
            with self._refusing(stream.lane):
                self._put(stream)
        except ApiError as error:
            stream.error = error
            self.release(stream)
            raise
        self.tickets.note_let_in()
        self._engine.wake()

    def resume(self, stream: Generation) -> None:
        """Queues requests that another process admitted and did not finish, without asking for room again."""
        self._enter(stream)
        for request in stream.requests:
            self._queue.readmit(request, self._clock())
            self._by_request[request.request_id] = stream
        self._engine.expect(stream.requests)
        self._engine.wake()

    def release(self, stream: Generation) -> None:
        """Ends a stream whose reader is done or gone, cancelling whatever of it still waits or runs. Idempotent."""
        for request in stream.requests:
            queued = self._by_request.pop(request.request_id, None)
            if queued is not None and stream.num_unfinished(request.request_id):
                self._cancel(stream, request)
        if stream.reservation is not None:
            stream.reservation.end(stream.num_used_tokens)
        if self._traces is not None:
            self._traces.end(stream)
        stream.leave()
        self._streams.pop(stream, None)
        if alike := self._by_name.get(name := _name(stream)):
            alike.pop(stream, None)
            if not alike:
                del self._by_name[name]
        if not self._streams:
            self._empty.set()

    def _enter(self, stream: Generation) -> None:
        self._streams[stream] = None
        self._by_name.setdefault(_name(stream), {})[stream] = None
        self._empty.clear()

    def _cancel(self, stream: Generation, request: Request) -> None:
        if not self._queue.cancel(request.request_id):
            self._engine.cancel(request.request_id)
            stream.was_begun = True
        for _ in range(1 if request.branches else stream.num_unfinished(request.request_id)):
            self._metrics.note_finished(Lane(request.lane), FinishReason.CANCELLED, None)

    def _put(self, stream: Generation) -> None:
        self.on_put(stream.requests)
        cached = [self._cached(request) for request in stream.requests]
        now = self._clock()
        requests, forecast = self._queue.put_all(stream.requests, now, cached)
        stream.note_let_in(requests, forecast, now)
        stream.promised_ttft_s = self._promised_s(stream, forecast)
        self._by_request |= {request.request_id: stream for request in requests}
        self._engine.expect(requests)
        self._metrics.note_admitted(stream.lane, [request.num_prompt_tokens for request in requests])
        if forecast is not None and isfinite(forecast.allowed_s):
            self._metrics.note_forecast(stream.lane, forecast.late_s, forecast.allowed_s)

    def _promised_s(self, stream: Generation, forecast: Forecast | None) -> float | None:
        """Returns what was promised to the stream: more than its lane promises, if its prompt is long."""
        if forecast is not None and isfinite(forecast.allowed_s):
            return forecast.allowed_s
        return stream.requests[0].ttft_s or self._promises.get(stream.lane)

    def _cached(self, request: Request) -> tuple[int, int]:
        if request.reads_prompt:
            return 0, 0
        return self._engine.find_cached(request.block_hashes, request.prompt_token_ids)

    @contextlib.contextmanager
    def _refusing(self, lane: Lane) -> Iterator[None]:
        try:
            yield
        except Refusal as refusal:
            self._metrics.note_refused(lane, refusal.reason)
            raise refused(
                str(refusal), refusal.reason, refusal.retry_after_s, tenant_limit=refusal.tenant_limit
            ) from None

    # Steps come in

    def deliver(self, *reports: StepReport) -> None:
        """Passes on the outputs of a step, or of several in fewer pieces if the event loop fell behind."""
        for report in reports:
            self._metrics.note_step(report, sum(len(output.token_ids) for output in report.outputs))
        for output in reports[0].outputs if len(reports) == 1 else self._joined(reports):
            stream = self._by_request.get(output.request_id)
            # One that was released is counted as cancelled already.
            if stream is not None:
                try:
                    stream.push(output)
                except Exception:
                    log.exception("passing on the output of %s failed", output.request_id)
                    stream.fail(internal("The server could not send the output."))
                if output.finish_reason is not None:
                    self._note_finished(output, stream)

    def _joined(self, reports: Iterable[StepReport]) -> list[Output]:
        outputs = [output for report in reports for output in report.outputs]
        streams = {output.request_id: self._by_request.get(output.request_id) for output in outputs}
        apart = {request_id for request_id, stream in streams.items() if stream and not stream.may_join}
        return [
            *joined(output for output in outputs if output.request_id not in apart),
            *(output for output in outputs if output.request_id in apart),
        ]

    def _note_finished(self, output: Output, stream: Generation) -> None:
        assert output.finish_reason is not None
        if stream.requests[0].branches and not stream.finished:
            return  # all branches are one answer
        lane = stream.lane
        self._metrics.note_finished(lane, output.finish_reason, output.timings)
        if output.timings is not None and output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            ttft_s = output.timings.first_token_s - output.timings.arrival_s
            self._metrics.note_first_token(lane, ttft_s, stream.predicted_ttft_s)

    # Watching over

    def tick(self, now: float, timeouts: Timeouts) -> None:
        """Checks all deadlines and timeouts once."""
        for request in self._queue.expire(now):
            self._expire(request)
        if self._engine.state in (EngineState.FAILED, EngineState.STOPPED):
            self.fail_all("The engine stopped.", code="engine_failed")
        for stream in list(self._streams):
            stream.look_after(now, timeouts)

    def _expire(self, request: Request) -> None:
        lane = Lane(request.lane)
        self._metrics.note_refused(lane, "queue_timeout")
        stream = self._by_request.get(request.request_id)
        if stream is not None:
            message = f"The request waited too long in the {lane.label} lane."
            stream.fail(refused(message, "queue_timeout", 10.0, tenant_limit=False))

    async def drained(self, timeout_s: float) -> bool:
        """Waits until the last stream has ended; False if that took too long."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
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


def _name(stream: Generation) -> tuple[str, str]:
    return stream.requests[0].tenant, stream.correlation
