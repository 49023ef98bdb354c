"""What the operator sees: counted once per step and once per request, in base units."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from engine.planning.request import FinishReason, Timings
from engine.planning.step import StepReport
from gateway.store.interface import StoreStats
from gateway.wire.frames import seconds_per_output_token
from priority.lanes import Lane

_SHORT = (
    0.0005,
    0.001,
    0.002,
    0.003,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.06,
    0.08,
    0.1,
    0.15,
    0.25,
)
"""Small models take milliseconds a token."""
_SECONDS = (*_SHORT, 0.5, 0.75, 1, 2.5, 5, 10)
_LONG_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    10,
    20,
    40,
    80,
    160,
    640,
)
_RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0)
_TOKENS = tuple(2**exponent for exponent in range(0, 18))


class Metrics:
    """The metrics of one app, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._name_requests()
        self._name_steps()
        self._name_loop()
        self._name_keeping()

    def _name_requests(self) -> None:
        lane, registry = ["lane"], self.registry
        self.ttft = Histogram(
            "penstock_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            lane,
            registry=registry,
            buckets=_LONG_SECONDS,
        )
        self.tpot = Histogram(
            "penstock_time_per_output_token_seconds",
            "Mean time per token after the first, one value a choice.",
            lane,
            registry=registry,
            buckets=_SECONDS,
        )
        self.queue_wait = Histogram(
            "penstock_queue_wait_seconds",
            "From a request's arrival to its first step.",
            lane,
            registry=registry,
            buckets=_LONG_SECONDS,
        )
        self.latency = Histogram(
            "penstock_request_seconds",
            "From a request's arrival to the end of a choice.",
            lane,
            registry=registry,
            buckets=_LONG_SECONDS,
        )
        self.prompt_length = Histogram(
            "penstock_request_prompt_tokens",
            "Prompt tokens of a request.",
            registry=registry,
            buckets=_TOKENS,
        )
        self.output_length = Histogram(
            "penstock_request_output_tokens", "Output tokens of a choice.", registry=registry, buckets=_TOKENS
        )
        self.finished = Counter(
            "penstock_choices",
            "Choices that ended, by how.",
            ["lane", "finish_reason"],
            registry=registry,
        )
        self.admissions = Counter(
            "penstock_admissions",
            "Requests that were let in or refused, and why.",
            ["lane", "decision", "reason"],
            registry=registry,
        )

        self.promises = Counter(
            "penstock_promises",
            "Promises on the time to first token, kept or broken.",
            ["lane", "outcome"],
            registry=registry,
        )
        self.promise_use = Histogram(
            "penstock_promise_use_ratio",
            "Part of the promised time to first token that the forecast of a request let in takes.",
            lane,
            registry=registry,
            buckets=_RATIOS,
        )
        self.forecast_ratio = Histogram(
            "penstock_ttft_forecast_ratio",
            "Time to first token, as a part of what was forecast at admission; 19 in 20 should be below 1.",
            lane,
            registry=registry,
            buckets=_RATIOS,
        )

    def _name_steps(self) -> None:
        registry = self.registry
        self.step_model = Gauge(
            "penstock_step_model_seconds",
            "The fitted step time: alpha, and beta per prefill token, gamma per decode, delta per context token.",
            ["coefficient"],
            registry=registry,
        )
        self.step_seconds = Histogram(
            "penstock_step_seconds", "Duration of a step.", registry=registry, buckets=_SECONDS
        )
        self.step_tokens = Histogram(
            "penstock_step_tokens", "Tokens computed in a step.", registry=registry, buckets=_TOKENS
        )
        self.failed_steps = Counter("penstock_failed_steps", "Steps that failed.", registry=registry)
        self.prefill_tokens = Counter("penstock_prefill_tokens", "Prompt tokens computed.", registry=registry)
        self.output_tokens = Counter(
            "penstock_output_tokens", "Tokens brought to clients.", registry=registry
        )
        self.prompt_tokens = Counter(
            "penstock_prompt_tokens", "Prompt tokens of the requests let in.", registry=registry
        )
        self.preemptions = Counter(
            "penstock_preemptions", "Sequences that made room for others.", registry=registry
        )
        self.prefix_queries = Counter(
            "penstock_prefix_cache_query_tokens", "Prompt tokens looked up in the cache.", registry=registry
        )
        self.prefix_hits = Counter(
            "penstock_prefix_cache_hit_tokens", "Prompt tokens found in the cache.", registry=registry
        )
        self.running = Gauge("penstock_running_sequences", "Sequences in the batch.", registry=registry)
        self.preempted = Gauge(
            "penstock_waiting_sequences",
            "Sequences in the engine that are not in the batch.",
            registry=registry,
        )
        self.blocks = Gauge("penstock_kv_blocks", "KV blocks in the pool.", registry=registry)
        self.free_blocks = Gauge("penstock_kv_free_blocks", "KV blocks that can be taken.", registry=registry)
        self.kv_usage = Gauge("penstock_kv_usage_ratio", "Share of the KV blocks in use.", registry=registry)
        self.inter_token = WeightedHistogram(
            "penstock_inter_token_seconds",
            "From the end of one step to the end of the next, once for every sequence that goes on.",
            _SECONDS,
        )
        registry.register(self.inter_token)
        self._last_step_end_s: float | None = None

    def _name_loop(self) -> None:
        registry = self.registry
        self.loop_lag = Histogram(
            "penstock_event_loop_lag_seconds",
            "How late the event loop ran a timer.",
            registry=registry,
            buckets=_SECONDS,
        )
        self.slow_readers = Counter(
            "penstock_slow_reader_disconnects", "Streams cut because nobody read them.", registry=registry
        )
        self.streams = Gauge("penstock_streams", "Replies in the making.", registry=registry)
        self.queued = Gauge("penstock_queued_requests", "Requests in the queue.", ["lane"], registry=registry)
        self.up = Gauge("penstock_engine_up", "1 if the step loop makes progress.", registry=registry)
        self.pool_violations = Gauge(
            "penstock_pool_violations", "Times the KV pool had to start afresh.", registry=registry
        )

    def _name_keeping(self) -> None:
        registry = self.registry
        self.recordings = Gauge(
            "penstock_recordings", "Replies that can be followed again.", registry=registry
        )
        self.resumes = Counter(
            "penstock_stream_resumes", "Replies taken over from a process that is gone.", registry=registry
        )
        self.follows = Counter(
            "penstock_stream_follows", "Connections that went on with a reply.", registry=registry
        )
        self.prefix_blocks = Gauge(
            "penstock_prefix_blocks", "Blocks whose prefix is known.", registry=registry
        )
        self.prefix_depth = Gauge(
            "penstock_prefix_depth_blocks", "Blocks of the longest known prefix.", registry=registry
        )

        self.draft_tokens = Counter(
            "penstock_draft_tokens",
            "Tokens that were guessed and verified, by their place among those of a step.",
            ["proposer", "position"],
            registry=registry,
        )
        self.accepted_tokens = Counter(
            "penstock_accepted_tokens",
            "Guessed tokens that were right.",
            ["proposer", "position"],
            registry=registry,
        )
        self.failed_proposers = Counter(
            "penstock_failed_proposers",
            "Proposers of drafts that failed and are off.",
            ["proposer"],
            registry=registry,
        )

    def note_step(self, report: StepReport, num_output_tokens: int) -> None:
        """Called once per step, whatever came of it."""
        self._note_pace(report)
        self.step_seconds.observe(report.duration_s)
        self.step_tokens.observe(report.num_prefill_tokens + report.num_decode_tokens)
        self.prefill_tokens.inc(report.num_prefill_tokens)
        self.output_tokens.inc(num_output_tokens)
        for proposer, count in report.drafts.items():
            for position, (drafted, accepted) in enumerate(
                zip(count.drafted, count.accepted, strict=True), 1
            ):
                self.draft_tokens.labels(proposer, position).inc(drafted)
                self.accepted_tokens.labels(proposer, position).inc(accepted)
        for proposer in report.failed_proposers:
            self.failed_proposers.labels(proposer).inc()
        self.preemptions.inc(report.num_preemptions)
        self.prefix_queries.inc(report.num_prefix_query_tokens)
        self.prefix_hits.inc(report.num_prefix_hit_tokens)
        self.running.set(report.num_running)
        self.preempted.set(report.num_waiting)
        self.blocks.set(report.num_blocks)
        self.free_blocks.set(report.num_free_blocks)
        used = report.num_blocks - report.num_free_blocks
        self.kv_usage.set(used / report.num_blocks if report.num_blocks else 0.0)
        if report.error is not None:
            self.failed_steps.inc()

    def _note_pace(self, report: StepReport) -> None:
        ended_s = report.started_s + report.duration_s
        if self._last_step_end_s is not None and report.num_decode_tokens:
            self.inter_token.observe(ended_s - self._last_step_end_s, report.num_decode_tokens)
            num_accepted = sum(count.num_accepted for count in report.drafts.values())
            if num_accepted:
                self.inter_token.observe(0.0, num_accepted)
        self._last_step_end_s = ended_s

    def note_admitted(self, lane: Lane, num_prompt_tokens: int) -> None:
        self.admissions.labels(lane.label, "admitted", "").inc()
        self.prompt_tokens.inc(num_prompt_tokens)
        self.prompt_length.observe(num_prompt_tokens)

    def note_forecast(self, lane: Lane, predicted_s: float, promised_s: float) -> None:
        self.promise_use.labels(lane.label).observe(predicted_s / promised_s)

    def note_refused(self, lane: Lane, reason: str) -> None:
        self.admissions.labels(lane.label, "refused", reason).inc()

    def note_finished(self, lane: Lane, reason: FinishReason, timings: Timings | None) -> None:
        """Called once per choice."""
        self.finished.labels(lane.label, reason.value).inc()
        if timings is None or reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        self.ttft.labels(lane.label).observe(timings.first_token_s - timings.arrival_s)
        self.queue_wait.labels(lane.label).observe(timings.scheduled_s - timings.arrival_s)
        self.latency.labels(lane.label).observe(timings.finished_s - timings.arrival_s)
        self.output_length.observe(timings.num_output_tokens)
        pace = seconds_per_output_token(timings)
        if pace is not None:
            self.tpot.labels(lane.label).observe(pace)

    def note_promise(
        self, lane: Lane, ttft_s: float, promised_s: float | None, predicted_s: float | None
    ) -> None:
        """How the promise and the forecast came out; called once per choice."""
        if promised_s is not None:
            self.promises.labels(lane.label, "kept" if ttft_s <= promised_s else "broken").inc()
        if predicted_s:
            self.forecast_ratio.labels(lane.label).observe(ttft_s / predicted_s)

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def add_compat(self, model: str, cache_config: Callable[[], Mapping[str, str]]) -> None:
        """Shows the same values under vLLM's documented names, too."""
        self.registry.register(_VllmNames(list(_families(self)), model, cache_config))


class StoreMetrics(Collector):
    """What a store says of itself, read when somebody asks."""

    def __init__(self, stats: Callable[[], StoreStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        up = GaugeMetricFamily("penstock_store_up", "0 while Redis is gone and memory stands in for it.")
        up.add_metric([], stats.state == "ok")
        failures = CounterMetricFamily(
            "penstock_store_failures", "Calls to Redis that failed, by how.", labels=["kind"]
        )
        for kind, number in stats.failures.items():
            failures.add_metric([kind], number)
        yield from (up, failures)
        yield CounterMetricFamily("penstock_store_calls", "Calls to Redis.", stats.num_calls)
        yield CounterMetricFamily(
            "penstock_store_rejected", "Calls not tried: Redis was known to be gone.", stats.num_rejected
        )
        yield GaugeMetricFamily(
            "penstock_store_unwritten", "Changes that Redis does not know of yet.", stats.num_dirty
        )
        yield CounterMetricFamily(
            "penstock_store_dropped", "Changes that Redis will never know of.", stats.num_dropped
        )
        yield CounterMetricFamily(
            "penstock_store_corrupt", "Values in Redis that could not be read.", stats.num_corrupt
        )
        yield GaugeMetricFamily("penstock_store_records", "Records in memory.", stats.num_records)
        yield GaugeMetricFamily("penstock_store_bytes", "Memory that they take.", stats.num_bytes)


class WeightedHistogram(Collector):
    """A histogram that takes one value many times at the price of once: a step is the same for all of its batch."""

    def __init__(self, name: str, documentation: str, buckets: Iterable[float]) -> None:
        self._name = name
        self._documentation = documentation
        self._bounds = [*buckets, math.inf]
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float, times: int) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterator[Metric]:
        names = map(floatToGoString, self._bounds)
        buckets = list(zip(names, map(float, accumulate(self._counts)), strict=True))
        yield HistogramMetricFamily(self._name, self._documentation, buckets=buckets, sum_value=self._sum)


class _Alias(NamedTuple):
    name: str
    documentation: str


_VLLM = {
    "penstock_running_sequences": _Alias("vllm:num_requests_running", "Requests in the batch."),
    "penstock_kv_usage_ratio": _Alias("vllm:kv_cache_usage_perc", "KV cache usage; 1 is all of it."),
    "penstock_prompt_tokens": _Alias("vllm:prompt_tokens", "Prompt tokens."),
    "penstock_output_tokens": _Alias("vllm:generation_tokens", "Generated tokens."),
    "penstock_preemptions": _Alias("vllm:num_preemptions", "Preemptions."),
    "penstock_prefix_cache_query_tokens": _Alias("vllm:prefix_cache_queries", "Tokens looked up."),
    "penstock_prefix_cache_hit_tokens": _Alias("vllm:prefix_cache_hits", "Tokens found."),
    "penstock_choices": _Alias("vllm:request_success", "Finished requests."),
    "penstock_time_to_first_token_seconds": _Alias("vllm:time_to_first_token_seconds", "TTFT."),
    "penstock_inter_token_seconds": _Alias("vllm:inter_token_latency_seconds", "Inter-token latency."),
    "penstock_time_per_output_token_seconds": _Alias("vllm:request_time_per_output_token_seconds", "TPOT."),
    "penstock_request_seconds": _Alias("vllm:e2e_request_latency_seconds", "End-to-end latency."),
    "penstock_queue_wait_seconds": _Alias("vllm:request_queue_time_seconds", "Time in the queue."),
    "penstock_request_prompt_tokens": _Alias("vllm:request_prompt_tokens", "Prompt length."),
    "penstock_request_output_tokens": _Alias("vllm:request_generation_tokens", "Output length."),
    "penstock_step_tokens": _Alias("vllm:iteration_tokens_total", "Tokens per step."),
}


class _VllmNames(Collector):
    """Reads the metrics it is given and says them again under other names."""

    def __init__(
        self, sources: list[Collector], model: str, cache_config: Callable[[], Mapping[str, str]]
    ) -> None:
        self._sources = sources
        self._labels = {"model_name": model, "engine": "0"}
        self._cache_config = cache_config

    def collect(self) -> Iterator[Metric]:
        waiting = 0.0
        for source in self._sources:
            for metric in source.collect():
                if metric.name in ("penstock_queued_requests", "penstock_waiting_sequences"):
                    waiting += sum(sample.value for sample in metric.samples)
                if metric.name in _VLLM:
                    yield self._renamed(metric, _VLLM[metric.name])
        yield self._single("vllm:num_requests_waiting", "Requests that wait.", waiting, {})
        config = dict(self._cache_config())
        yield self._single("vllm:cache_config_info", "The KV cache.", 1.0, config)

    def _renamed(self, metric: Metric, alias: _Alias) -> Metric:
        renamed = Metric(alias.name, alias.documentation, metric.type)
        renamed.samples = [
            sample._replace(
                name=alias.name + sample.name.removeprefix(metric.name),
                labels={**sample.labels, **self._labels},
            )
            for sample in metric.samples
        ]
        return renamed

    def _single(self, name: str, documentation: str, value: float, labels: dict[str, str]) -> Metric:
        metric = Metric(name, documentation, "gauge")
        metric.add_sample(name, {**labels, **self._labels}, value)
        return metric


_KINDS = (Counter, Gauge, Histogram, WeightedHistogram)


def _families(metrics: Metrics) -> Iterable[Collector]:
    return (value for value in vars(metrics).values() if isinstance(value, _KINDS))
