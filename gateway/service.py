"""The service: everything around the engine of one served model, on one event loop, and the watch over it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from http import HTTPStatus
from math import inf

from penstock.engine.engine import EngineState, EngineStats
from penstock.engine.planning.embedding import Embedding
from penstock.engine.planning.prefix_index import PRIVATE
from penstock.engine.planning.report import StepReport
from penstock.engine.planning.request import Request
from penstock.engine.planning.state_records import StateUse
from penstock.engine.text.grammars import Grammars
from penstock.engine.text.watermark import Watermark
from penstock.engine.tiers.tiers import TiersUse
from penstock.gateway.access.idempotency import Idempotency
from penstock.gateway.access.keys import Access, Client
from penstock.gateway.access.quotas import Quotas
from penstock.gateway.background import end, meanwhile
from penstock.gateway.dispatch import Dispatch, ServingEngine, Tracing
from penstock.gateway.http.connections import Timeouts
from penstock.gateway.http.descriptors import Descriptors
from penstock.gateway.kv import KvExchange
from penstock.gateway.limits import Limits
from penstock.gateway.metrics import Metrics
from penstock.gateway.sessions.owners import tag_of
from penstock.gateway.sessions.prefixes.sharing import PrefixLocator, PrefixWriter, Warming, WarmUp
from penstock.gateway.sessions.prefixes.tracker import PrefixTracker
from penstock.gateway.sessions.recordings.journal import Replayer
from penstock.gateway.sessions.recordings.kinds import writers_of
from penstock.gateway.sessions.recordings.registry import Recordings
from penstock.gateway.sessions.responses import records, writer
from penstock.gateway.store.interface import Store
from penstock.gateway.tenants import Tenants
from penstock.gateway.tickets import source_asked
from penstock.gateway.watch import Watches
from penstock.gateway.wire.compiling import Compiling
from penstock.gateway.wire.prompts import Prompts
from penstock.gateway.wire.reading import AUTO, Formats
from penstock.gateway.wire.sampling import KeepLimits, SamplingDefaults
from penstock.priority.coverage import Coverage
from penstock.priority.lanes import DEFAULT_POLICIES, Lane, LanePolicy, Tenant
from penstock.priority.queue import LaneQueue
from penstock.priority.routing.state import Load, Role

log = logging.getLogger("penstock.gateway")

PROMISED_TOKENS = (512, 4096)
"""The prompts for which `/metrics` says when a new request would have its first token."""
_SHORT_PROMPT = 64
"""The tokens of the prompt whose forecast stands for a lane in `/v1/events`."""
_RENDERED_S = 0.02
"""The age up to which rendered metrics are sent again: pickers scrape every 50 ms, and there may be several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """The operator's settings, and facts about the served model."""

    models: tuple[str, ...]
    """Names the model answers to; the first is the one it calls itself."""
    created: int = 0
    """The time at which the model was made, in seconds since 1970."""
    num_bytes: int = 0
    """The bytes of the stored weights."""
    block_size: int = 16
    vocab_size: int | None = None
    """The number of the model's tokens; its tokenizer may have more or fewer."""
    eos_token_ids: tuple[int, ...] = ()
    """The model's end tokens, any of which ends an answer."""
    embedding: Embedding = field(default_factory=Embedding)
    """The way in which embeddings are made."""
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    limits: Limits = field(default_factory=Limits)
    timeouts: Timeouts = field(default_factory=Timeouts)
    clients: Mapping[bytes, Client | Tenant] = field(default_factory=dict)
    """SHA-256 digest of each API key (see `gateway.access.keys.digest_of`) to whose it is."""
    promises: Mapping[Lane, float] = field(default_factory=dict)
    """Seconds to the first token that a lane promises, where it does."""
    overload_status: int = HTTPStatus.SERVICE_UNAVAILABLE
    """The status of refusals by load."""
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    """Host names that the server answers to; any if empty."""
    health_is_ready: bool = False
    """Whether /health says what /ready says."""
    metrics_compat: str | None = None
    metrics_elsewhere: bool = False
    """Whether /metrics has a port of its own."""
    replica: str = "local"
    """This process's name among those that share a store."""
    identity: str = ""
    """Identifies model, checkpoint and version; the same for replicas that can stand in for each other."""
    system_fingerprint: str | None = None
    """The `system_fingerprint` of replies: equal values of weights, arithmetic and version give equal texts."""
    policies: Mapping[Lane, LanePolicy] = field(default_factory=lambda: DEFAULT_POLICIES)
    """The policies of the queue's lanes."""
    cluster_secret: str | None = None
    """The secret with which switches ask for this replica's state; without it, nobody can."""
    role: Role = Role.BOTH
    """The part of requests that it is for, behind a switch."""
    warm_up_tokens: int = 0
    """Most prompt tokens of a process before this one that are computed again."""
    tool_parser: str = AUTO
    """The format of the model's tool calls; see `gateway.wire.reading.Formats`."""
    reasoning_parser: str = AUTO
    strict: bool = False
    """Whether fields that would be ignored are refused."""
    watermark: Watermark | None = None
    """The watermark of answers that ask for one; None if they cannot."""
    watermarks_all: bool = False
    """Whether all answers have it."""
    keep: KeepLimits = field(default_factory=KeepLimits)
    """How much of long sequences is kept, and may be."""


class Service:
    """One served model. Everything but the constructor is for the event loop's thread."""

    def __init__(
        self,
        engine: ServingEngine,
        queue: LaneQueue,
        prompts: Prompts,
        options: ServiceOptions,
        *,
        sink: Replayer,
        store: Store,
        grammars: Grammars,
        clock: Callable[[], float] = time.monotonic,
        traces: Tracing | None = None,
        kv: KvExchange | None = None,
    ) -> None:
        """`sink`, `grammars` and `clock` must be the engine's, and `clock` that of `traces`.

        Without `kv`, no blocks are given to other replicas or taken from them.
        """
        self.kv = kv
        self._engine = engine
        self._queue = queue
        self.tokenizer = tokenizer = prompts.tokenizer
        self.compiling = Compiling(grammars)
        self.options = options
        self.clock = clock
        self.prompts = prompts
        self.formats = Formats(tokenizer, options.tool_parser, options.reasoning_parser)
        self.access = Access(options.clients)
        self.metrics = Metrics()
        if options.metrics_compat == "vllm":
            self.metrics.add_compat(options.models[0], self._cache_config)
        self.vocab_size = min(options.vocab_size or tokenizer.vocab_size, tokenizer.vocab_size)
        """Token ids are smaller than this."""
        self.store = store
        self.watches = Watches(clock, lambda: self.metrics.num_output_tokens)
        self.prefixes = PrefixTracker()
        self.locator = PrefixLocator(store.durable, options.replica, options.block_size, engine.find_cached)
        keeping = options.keep.keeping(options.keep.default)
        self.dispatch = Dispatch(engine, queue, self.metrics, clock, options.promises, traces, keeping)
        self.dispatch.on_put = self._expect_blocks
        self.quotas = Quotas(store)
        self.tenants = Tenants(queue, clock)
        self.idempotency = Idempotency(store)
        self.tag = tag_of(options.replica)
        """The prefix of the ids of recorded replies and conversations."""
        self.recordings = Recordings(
            self.dispatch,
            store,
            sink,
            self.formats,
            self.compiling,
            self.idempotency,
            self.metrics.resumes.inc,
            clock,
            watermark=options.watermark,
        )
        self.recordings.writers |= writers_of(tokenizer)
        self.recordings.writers[records.KIND] = partial(writer.make_writer, tokenizer)
        self._descriptors = Descriptors()
        self._warm_up: asyncio.Task[None] | None = None
        self._rendered = -inf, b""
        """When the metrics were rendered last, and their text."""

    def deliver(self, *reports: StepReport) -> None:
        """Takes the report of a step, or of several if the event loop fell behind."""
        for report in reports:
            self.prefixes.take(report.prefix_events)
            self.watches.note(report)
        self.dispatch.deliver(*reports)

    # Watching over

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """While this is entered, waiting requests expire, streams are kept alive and slow readers are cut."""
        try:
            async with (
                meanwhile(self._watch()),
                self.store.running(),
                self._telling_prefixes(),
                self.quotas.running(),
                self.recordings.running(),
            ):
                yield
        finally:
            if self._warm_up is not None:
                await end(self._warm_up)

    def _telling_prefixes(self) -> AbstractAsyncContextManager[None]:
        """Writes prefixes to a durable store; with memory alone it does nothing."""
        if self.store.durable is None:
            return contextlib.nullcontext()
        with_tokens = self.options.warm_up_tokens > 0
        return PrefixWriter(self.prefixes, self.store.durable, with_tokens=with_tokens).running()

    async def _watch(self) -> None:
        tick_s = self.options.timeouts.tick_s
        while True:
            due = self.clock() + tick_s
            await asyncio.sleep(tick_s)
            self.note_loop_lag(max(0.0, self.clock() - due))
            try:
                self.tick(self.clock())
            except Exception:
                log.exception("looking after the streams failed; going on")

    def note_loop_lag(self, lag_s: float) -> None:
        """Notes how late the event loop ran a timer."""
        self.metrics.loop_lag.observe(lag_s)
        self.watches.note_lag(lag_s)

    def warm_up(self) -> None:
        """Begins to compute what the processes before this one had in their caches, while nobody needs the engine."""
        if self.store.durable is None or not self.options.warm_up_tokens:
            return
        warm_up = WarmUp(
            self._warm,
            self._is_idle,
            block_size=self.options.block_size,
            max_tokens=self.options.warm_up_tokens,
        )
        self._warm_up = asyncio.create_task(warm_up.run(self.store.durable, self.prefixes))

    async def _warm(self, token_ids: list[int], salt: bytes) -> None:
        warming = Warming(token_ids, salt, self.clock())
        self.dispatch.submit(warming)
        try:
            await warming.over()
        finally:
            self.dispatch.release(warming)

    def _is_idle(self) -> bool:
        return all(isinstance(stream, Warming) for stream in self.dispatch)

    def tick(self, now: float) -> None:
        """One look at everything that waits. `running` calls it several times a second."""
        self.dispatch.tick(now, self.options.timeouts)
        self.recordings.tick(now)
        self._descriptors.look(now)

    # Health

    @property
    def stalled(self) -> bool:
        """The step loop is up, but ended no turn for too long."""
        silent_s = self.clock() - self._engine.last_progress_s
        return self._engine.state is EngineState.READY and silent_s > self.options.timeouts.engine_stall_s

    @property
    def health(self) -> str:
        """ok, stalled or failed."""
        if self._engine.state in (EngineState.FAILED, EngineState.STOPPED):
            return "failed"
        return "stalled" if self.stalled else "ok"

    @property
    def readiness(self) -> str:
        """ready, or why not: draining, loading, stalled or failed."""
        if self.dispatch.draining:
            return "draining"
        if self._engine.state is EngineState.STARTING:
            return "loading"
        return "ready" if self.health == "ok" else self.health

    def status(self) -> dict[str, object]:
        """Returns the server's status for `/v1/events`: its state, its lanes, and the engine's work and memory."""
        stats, coverage = self._engine.stats(), self._queue.coverage()
        lanes = {
            lane.label: {
                "waiting": depth,
                "forecast_ttft_ms": self._forecast_ms(lane),
                "promised_ttft_ms": _ms(self.options.promises.get(lane)),
                **_coverage(coverage.get(lane)),
            }
            for lane, depth in self._queue.depths().items()
        }
        engine = {
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "steps": stats.num_steps,
            "preemptions": stats.num_preemptions,
            "output_tokens": self.metrics.num_output_tokens,
            "kv_blocks": stats.num_blocks,
            "kv_free_blocks": stats.num_free_blocks,
            "kv_cached_blocks": stats.num_cached_blocks,
            "states": _states(stats.states),
            "tiers": _tiers(stats.tiers),
        }
        return {"state": self.readiness, "streams": len(self.dispatch), "lanes": lanes, "engine": engine}

    def _forecast_ms(self, lane: Lane) -> int | None:
        forecast = self._queue.predict(lane, _SHORT_PROMPT, self.clock())
        return None if forecast is None else _ms(forecast.seconds)

    def engine_stats(self) -> EngineStats:
        return self._engine.stats()

    def load(self) -> Load:
        """Returns the load of this replica, for switches."""
        num_free_kv = self._engine.stats().num_free_tokens
        load = self._queue.load(self.clock(), num_free_kv=num_free_kv, is_draining=self.dispatch.draining)
        return load if self.kv is None else replace(load, pull_rate=self.kv.tokens_per_s)

    def _expect_blocks(self, requests: Sequence[Request]) -> None:
        """Notes where the KV of a request is to be taken from, if the switch that sent it said so."""
        if self.kv is not None and (source := source_asked(self.options.cluster_secret or "")) is not None:
            for request in requests:
                if not request.salt.endswith(PRIVATE):
                    self.kv.expect(source, request.block_hashes)

    def block_map(self) -> dict[str, object] | None:
        """Returns the KV blocks for `/v1/events`, in base64; None before the engine is ready."""
        drawn = self._engine.block_map()
        if drawn is None:
            return None
        values = ((name, getattr(drawn, name)) for name in drawn.__slots__)
        return {
            name: b64encode(value).decode() if isinstance(value, bytes) else value for name, value in values
        }

    def render_metrics(self) -> bytes:
        """Returns the metrics for Prometheus, at most 20 ms old."""
        now = self.clock()
        rendered_s, rendered = self._rendered
        if not rendered_s <= now < rendered_s + _RENDERED_S:
            rendered = self._render_metrics()
            self._rendered = now, rendered
        return rendered

    def _render_metrics(self) -> bytes:
        """Reads what changes without a step, and renders all."""
        self.metrics.streams.set(len(self.dispatch))
        self.metrics.recordings.set(len(self.recordings))
        self.metrics.recording_bytes.set(self.recordings.num_bytes)
        self.metrics.prefix_blocks.set(self.prefixes.num_tracked)
        self.metrics.prefix_depth.set(self.prefixes.deepest)
        self.metrics.up.set(self.readiness in ("ready", "draining"))
        stats = self._engine.stats()
        self.metrics.pool_violations.set(stats.num_pool_violations)
        self.metrics.kv_unfilled.set(self._engine.unfilled_kv())
        self.metrics.note_states(stats.states)
        self.metrics.note_tiers(stats.tiers)
        for name, value in self._queue.step_model().items():
            self.metrics.step_model(name).set(value)
        depths = self._queue.depths()
        for lane, depth in depths.items():
            self.metrics.queued(lane.label).set(depth)
        self.metrics.waiting.set(sum(depths.values()) + self.metrics.preempted.value)
        self.metrics.note_coverage(self._queue.coverage())
        self._note_promised()
        self.metrics.note_store(self.store.stats())
        return self.metrics.render()

    def _note_promised(self) -> None:
        now = self.clock()
        for num_tokens in PROMISED_TOKENS:
            forecast = self._queue.predict(Lane.INTERACTIVE, num_tokens, now)
            if forecast is not None:
                self.metrics.promised(num_tokens).set(forecast.late_s)

    def _cache_config(self) -> dict[str, str]:
        stats = self._engine.stats()
        return {"block_size": str(self.options.block_size), "num_gpu_blocks": str(stats.num_blocks)}

    # The end

    def begin_drain(self) -> None:
        """Turns /ready red and refuses new work; admitted requests continue."""
        self.dispatch.draining = True
        if self._warm_up is not None:
            self._warm_up.cancel()


def _coverage(coverage: Coverage | None) -> dict[str, object]:
    """Returns a lane's coverage for `/v1/events`."""
    if coverage is None or not coverage.num:
        return {"attainment": None, "coverage": None}
    low, high = coverage.interval
    return {
        "attainment": coverage.num_kept / coverage.num,
        "coverage": {"promised": coverage.num, "kept": coverage.num_kept, "low": low, "high": high},
    }


def _states(use: StateUse) -> dict[str, int] | None:
    """State slots, those that sequences have, and snapshots; None if no layer has a state."""
    return (
        {"slots": use.num_slots, "held": use.num_held, "snapshots": use.num_snapshots}
        if use.num_slots
        else None
    )


def _tiers(use: TiersUse) -> dict[str, dict[str, int]] | None:
    """By tier, what is in it and what was read from it; None if there are none."""
    told = {
        name: {
            "blocks": tier.num_blocks,
            "bytes": tier.num_bytes,
            "max_bytes": tier.max_bytes,
            "hits": tier.num_hits,
            "read_bytes": tier.bytes_read,
            "written_bytes": tier.bytes_written,
        }
        for name, tier in use.tiers.items()
    }
    return told or None


def _ms(seconds: float | None) -> int | None:
    return None if seconds is None else round(1000 * seconds)
