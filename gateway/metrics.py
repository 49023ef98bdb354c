"""Metrics for the operator: counted once per step and once per request, in base units."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate
from operator import attrgetter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from penstock.engine.planning.request import FinishReason, Timings
from penstock.engine.planning.states import StateUse
from penstock.engine.planning.step import ExpertUse, StepReport
from penstock.gateway.store.interface import StoreStats
from penstock.gateway.wire.frames import seconds_per_output_token
from penstock.priority.lanes import Lane

_SHORT = tuple(ms / 1000 for ms in (0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 40, 60, 80, 100, 150, 250))
"""The bounds of short times: small models take milliseconds a token."""
_SECONDS = (*_SHORT, 0.5, 0.75, 1, 2.5, 5, 10)
_LONG = (
    *(ms / 1000 for ms in (1, 5, 10, 20, 40, 60, 80, 100, 250, 500, 750)),
    *(1, 2.5, 5, 10, 20, 40, 80, 160, 640),
)
_RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0)
_TOKENS = tuple(2**exponent for exponent in range(0, 18))
_SPANS = {
    "time_to_first_token_seconds": (
        "From a request's arrival to its first token.",
        "arrival_s",
        "first_token_s",
    ),
    "queue_wait_seconds": ("From a request's arrival to its first step.", "arrival_s", "scheduled_s"),
    "prefill_seconds": ("From a request's first step to its first token.", "scheduled_s", "first_token_s"),
    "decode_seconds": ("From the first token to the end of a choice.", "first_token_s", "finished_s"),
    "inference_seconds": ("From a request's first step to the end of a choice.", "scheduled_s", "finished_s"),
    "request_seconds": ("From a request's arrival to the end of a choice.", "arrival_s", "finished_s"),
}
"""The times measured for every choice that ended well, each with the two `Timings` that it lies between."""


class Metrics:
    """The metrics of one app, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._registries = [self.registry]
        """The registries to render; another server's names for the same values have a registry of their own."""
        self.num_output_tokens = 0
        self._name_requests()
        self._name_steps()
        self._name_the_rest()

    def _counter(self, name: str, documentation: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(f"penstock_{name}", documentation, labels, registry=self.registry)

    def _gauge(self, name: str, documentation: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(f"penstock_{name}", documentation, labels, registry=self.registry)

    def _histogram(
        self, name: str, documentation: str, buckets: Sequence[float], labels: Sequence[str] = ()
    ) -> Histogram:
        return Histogram(f"penstock_{name}", documentation, labels, registry=self.registry, buckets=buckets)

    # Metrics with labels are looked up once: prometheus_client takes a microsecond for it.

    def _counters(self, name: str, documentation: str, labels: Sequence[str]) -> Callable[..., Counter]:
        """Returns a function from labels to their counter."""
        return cache(self._counter(name, documentation, labels).labels)

    def _histograms(
        self, name: str, documentation: str, buckets: Sequence[float]
    ) -> Callable[[str], Histogram]:
        """Returns a function from a lane's label to its histogram."""
        return cache(self._histogram(name, documentation, buckets, ["lane"]).labels)

    def _name_requests(self) -> None:
        histogram, counters, histograms = self._histogram, self._counters, self._histograms
        self.spans = [
            (histograms(name, documentation, _LONG), attrgetter(start, end))
            for name, (documentation, start, end) in _SPANS.items()
        ]
        self.tpot = histograms(
            "time_per_output_token_seconds", "Mean time per token after the first, per choice.", _SECONDS
        )
        self.prompt_length = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.output_length = histogram("request_output_tokens", "Output tokens of a choice.", _TOKENS)
        self.finished = counters("choices", "Choices that ended, by reason.", ["lane", "finish_reason"])
        self.admissions = counters(
            "admissions", "Requests that were admitted or refused, and why.", ["lane", "decision", "reason"]
        )
        self.promise_use = histograms(
            "promise_use_ratio",
            "Forecast of an admitted request as a part of the promised time to first token.",
            _RATIOS,
        )
        self.forecast_ratio = histograms(
            "ttft_forecast_ratio",
            "Time to first token divided by the forecast at admission; 2 in 3 should be below 1.",
            _RATIOS,
        )

    def _name_steps(self) -> None:
        histogram, gauge = self._histogram, self._gauge
        counter, counters = self._counter, self._counters
        self.step_model = gauge(
            "step_model_seconds",
            "The fitted step time: alpha, plus beta per prefill token, gamma per decode, delta per context token, "
            "epsilon per pair of a prefill token and a token that it attends to, and zeta for all experts of a model.",
            ["coefficient"],
        )
        self.step_seconds = histogram("step_seconds", "Duration of a step.", _SECONDS)
        self.step_tokens = histogram("step_tokens", "Tokens computed in a step.", _TOKENS)
        self.failed_steps = counter("failed_steps", "Steps that failed.")
        self.prefill_tokens = counter("prefill_tokens", "Prompt tokens computed.")
        self.output_tokens = counter("output_tokens", "Output tokens of all choices.")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of admitted requests.")
        self.preemptions = counter("preemptions", "Sequences that were preempted to make room for others.")
        self.prefix_queries = counter("prefix_cache_query_tokens", "Prompt tokens looked up in the cache.")
        self.prefix_hits = counter("prefix_cache_hit_tokens", "Prompt tokens found in the cache.")
        self.running = gauge("running_sequences", "Sequences in the batch.")
        self.preempted = gauge("waiting_sequences", "Sequences in the engine that wait to go on.")
        self.blocks = gauge("kv_blocks", "KV blocks in the pool.")
        self.free_blocks = gauge("kv_free_blocks", "KV blocks that are free or can be evicted.")
        self.kv_usage = gauge("kv_usage_ratio", "Share of the KV blocks in use.")
        self.state_slots = gauge("state_slots", "Slots for the states of sequences and snapshots; 0 without.")
        self.held_states = gauge("state_held_slots", "State slots held by sequences.")
        self.snapshots = gauge("state_snapshots", "Snapshots of states that prompts can reuse.")
        self.expert_imbalance = gauge(
            "expert_imbalance_ratio",
            "Tokens of a layer's most chosen expert, or of the busiest rank, divided by the mean; CPU only.",
            ["among"],
        )
        self.experts_touched = counter(
            "experts_touched",
            "Experts chosen by the tokens of a step, each counted once per layer and step; CPU only.",
        )
        self.expert_layers = counter(
            "expert_layers", "Layers with experts that steps ran, where chosen experts were counted."
        )
        places = ["proposer", "position"]
        self.draft_tokens = counters(
            "draft_tokens",
            "Draft tokens that were verified, by position within a step.",
            places,
        )
        self.accepted_tokens = counters("accepted_tokens", "Draft tokens that were right.", places)
        self.draft_spent = counter(
            "draft_spent_seconds",
            "Time of steps with drafts beyond the expected time without: proposing, drafting, verifying.",
        )
        self.draft_saved = counter(
            "draft_saved_seconds",
            "Time that the tokens gained by drafts would have taken in steps without drafts.",
        )
        self.failed_proposers = counters(
            "failed_proposers",
            "Failures of draft proposers; each failure suspends the proposer for some steps.",
            ["proposer"],
        )
        self.inter_token = WeightedHistogram(
            "penstock_inter_token_seconds",
            "From the end of one step to the end of the next, counted for every sequence that continues.",
            _SECONDS,
        )
        self.registry.register(self.inter_token)
        self._last_step_end_s: float | None = None

    def _name_the_rest(self) -> None:
        counter, gauge = self._counter, self._gauge
        self.loop_lag = self._histogram(
            "event_loop_lag_seconds", "How late the event loop ran a timer.", _SECONDS
        )
        self.slow_readers = counter("slow_reader_disconnects", "Streams cut off because nobody read them.")
        self.streams = gauge("streams", "Replies in progress.")
        self.queued = gauge("queued_requests", "Requests in the queue.", ["lane"])
        self.up = gauge("engine_up", "1 while the step loop makes progress.")
        self.pool_violations = gauge("pool_violations", "Times the KV pool failed its check and was reset.")
        self.recordings = gauge("recordings", "Replies that clients can follow again.")
        self.recording_bytes = gauge("recording_bytes", "Approximate memory of these replies.")
        self.resumes = counter("stream_resumes", "Replies taken over from a process that ended.")
        self.follows = counter("stream_follows", "Connections that resumed a reply.")
        self.prefix_blocks = gauge("prefix_blocks", "Blocks whose prefix is known.")
        self.switches = gauge("switches", "Switches that receive this replica's state.")
        self.prefix_depth = gauge("prefix_depth_blocks", "Blocks of the longest known prefix.")

    def note_step(self, report: StepReport, num_output_tokens: int) -> None:
        """Counts one step, whatever came of it."""
        self._note_pace(report)
        self.step_seconds.observe(report.duration_s)
        self.step_tokens.observe(report.num_prefill_tokens + report.num_decode_tokens)
        self.prefill_tokens.inc(report.num_prefill_tokens)
        self.output_tokens.inc(num_output_tokens)
        self.num_output_tokens += num_output_tokens
        for proposer, count in report.drafts.items():
            for position, (drafted, accepted) in enumerate(
                zip(count.drafted, count.accepted, strict=True), 1
            ):
                self.draft_tokens(proposer, position).inc(drafted)
                self.accepted_tokens(proposer, position).inc(accepted)
        self.draft_spent.inc(report.draft_seconds.spent_s)
        self.draft_saved.inc(report.draft_seconds.saved_s)
        for proposer in report.failed_proposers:
            self.failed_proposers(proposer).inc()
        self.preemptions.inc(report.num_preemptions)
        self.prefix_queries.inc(report.num_prefix_query_tokens)
        self.prefix_hits.inc(report.num_prefix_hit_tokens)
        self.running.set(report.num_running)
        self.preempted.set(report.num_waiting)
        self.blocks.set(report.num_blocks)
        self.free_blocks.set(report.num_free_blocks)
        used = report.num_blocks - report.num_free_blocks
        self.kv_usage.set(used / report.num_blocks if report.num_blocks else 0.0)
        if report.experts is not None:
            self._note_experts(report.experts)
        if report.error is not None:
            self.failed_steps.inc()

    def note_states(self, states: StateUse) -> None:
        self.state_slots.set(states.num_slots)
        self.held_states.set(states.num_held)
        self.snapshots.set(states.num_snapshots)

    def _note_experts(self, experts: ExpertUse) -> None:
        self.experts_touched.inc(experts.num_touched)
        self.expert_layers.inc(experts.num_layers)
        if (load := experts.load) is not None:
            self.expert_imbalance.labels("experts").set(load.experts)
            self.expert_imbalance.labels("ranks").set(load.ranks)

    def _note_pace(self, report: StepReport) -> None:
        ended_s = report.started_s + report.duration_s
        if self._last_step_end_s is not None and report.num_decode_tokens:
            self.inter_token.observe(ended_s - self._last_step_end_s, report.num_decode_tokens)
            num_accepted = sum(count.num_accepted for count in report.drafts.values())
            if num_accepted:
                self.inter_token.observe(0.0, num_accepted)
        self._last_step_end_s = ended_s

    def note_admitted(self, lane: Lane, prompts: Sequence[int]) -> None:
        """Counts requests that were let in, whose prompts have so many tokens each."""
        self.admissions(lane.label, "admitted", "").inc(len(prompts))
        self.prompt_tokens.inc(sum(prompts))
        for num_tokens in prompts:
            self.prompt_length.observe(num_tokens)

    def note_forecast(self, lane: Lane, predicted_s: float, promised_s: float) -> None:
        self.promise_use(lane.label).observe(predicted_s / promised_s)

    def note_refused(self, lane: Lane, reason: str) -> None:
        self.admissions(lane.label, "refused", reason).inc()

    def note_finished(self, lane: Lane, reason: FinishReason, timings: Timings | None) -> None:
        """Counts one choice that ended."""
        self.finished(lane.label, reason.value).inc()
        if timings is None or reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        for histogram, ends_of in self.spans:
            start_s, end_s = ends_of(timings)
            histogram(lane.label).observe(end_s - start_s)
        self.output_length.observe(timings.num_output_tokens)
        pace = seconds_per_output_token(timings)
        if pace is not None:
            self.tpot(lane.label).observe(pace)

    def note_first_token(self, lane: Lane, ttft_s: float, predicted_s: float | None) -> None:
        """Counts how the forecast of one choice came out."""
        if predicted_s:
            self.forecast_ratio(lane.label).observe(ttft_s / predicted_s)

    def render(self) -> bytes:
        return b"".join(map(generate_latest, self._registries))

    def add_compat(self, model: str, cache_config: Callable[[], Mapping[str, str]]) -> None:
        """Shows the same values under vLLM's documented names, too."""
        compat = CollectorRegistry(auto_describe=False)
        compat.register(_VllmNames(self.registry, model, cache_config))
        self._registries.append(compat)


class StoreMetrics(Collector):
    """The metrics of a store, read at each scrape."""

    def __init__(self, stats: Callable[[], StoreStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats, gauge, counter = self._stats(), GaugeMetricFamily, CounterMetricFamily
        failures = counter("penstock_store_failures", "Calls to Redis that failed, by kind.", labels=["kind"])
        for kind, number in stats.failures.items():
            failures.add_metric([kind], number)
        yield failures
        for family, name, documentation, value in (
            (gauge, "up", "0 while Redis is gone and memory stands in for it.", stats.state == "ok"),
            (counter, "calls", "Calls to Redis.", stats.num_calls),
            (counter, "rejected", "Calls not tried because Redis was gone.", stats.num_rejected),
            (gauge, "unwritten", "Changes not yet written to Redis.", stats.num_dirty),
            (counter, "dropped", "Changes dropped without being written to Redis.", stats.num_dropped),
            (counter, "corrupt", "Values in Redis that could not be read.", stats.num_corrupt),
            (gauge, "records", "Records in memory.", stats.num_records),
            (gauge, "bytes", "Memory of these records.", stats.num_bytes),
        ):
            yield family(f"penstock_store_{name}", documentation, value)
        for index, (labelled, name, documentation) in enumerate(
            (
                (gauge, "share_bytes", "Most memory that the records of one tenant may take."),
                (gauge, "largest_share_bytes", "Memory of the records of the tenant that has the most."),
                (counter, "evicted", "Records evicted because their tenant exceeded its share."),
            )
        ):
            metric = labelled(f"penstock_store_{name}", documentation, labels=["place"])
            for place, share in stats.shares.items():
                metric.add_metric([place], share[index])
            yield metric


class WeightedHistogram(Collector):
    """A histogram that takes one value many times at the cost of once, since a step is the same for its whole batch."""

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


_VLLM = {
    "penstock_running_sequences": "num_requests_running",
    "penstock_kv_usage_ratio": "kv_cache_usage_perc",
    "penstock_prompt_tokens": "prompt_tokens",
    "penstock_output_tokens": "generation_tokens",
    "penstock_preemptions": "num_preemptions",
    "penstock_prefix_cache_query_tokens": "prefix_cache_queries",
    "penstock_prefix_cache_hit_tokens": "prefix_cache_hits",
    "penstock_choices": "request_success",
    "penstock_time_to_first_token_seconds": "time_to_first_token_seconds",
    "penstock_inter_token_seconds": "inter_token_latency_seconds",
    "penstock_time_per_output_token_seconds": "request_time_per_output_token_seconds",
    "penstock_request_seconds": "e2e_request_latency_seconds",
    "penstock_queue_wait_seconds": "request_queue_time_seconds",
    "penstock_prefill_seconds": "request_prefill_time_seconds",
    "penstock_decode_seconds": "request_decode_time_seconds",
    "penstock_inference_seconds": "request_inference_time_seconds",
    "penstock_request_prompt_tokens": "request_prompt_tokens",
    "penstock_request_output_tokens": "request_generation_tokens",
    "penstock_step_tokens": "iteration_tokens_total",
}
_VLLM_LABELS = {"finish_reason": "finished_reason"}


class _VllmNames(Collector):
    """Reads the metrics of a registry and says them again under other names."""

    def __init__(
        self, source: CollectorRegistry, model: str, cache_config: Callable[[], Mapping[str, str]]
    ) -> None:
        self._source = source
        self._labels = {"model_name": model, "engine": "0"}
        self._cache_config = cache_config

    def collect(self) -> Iterator[Metric]:
        waiting = 0.0
        for metric in self._source.collect():
            if metric.name in ("penstock_queued_requests", "penstock_waiting_sequences"):
                waiting += sum(sample.value for sample in metric.samples)
            if metric.name in _VLLM:
                yield self._renamed(metric, f"vllm:{_VLLM[metric.name]}")
            if metric.name == "penstock_draft_tokens":
                places = _by_place(metric)
                yield self._count("num_drafts", "Drafts that were verified.", places.get(0, 0.0))
                yield self._count("num_draft_tokens", metric.documentation, sum(places.values()))
            if metric.name == "penstock_accepted_tokens":
                places = _by_place(metric)
                yield self._count("num_accepted_tokens", metric.documentation, sum(places.values()))
                yield self._count("num_accepted_tokens_per_pos", metric.documentation, places)
        yield self._single("vllm:num_requests_waiting", "Requests that wait.", waiting, {})
        config = dict(self._cache_config())
        yield self._single("vllm:cache_config_info", "The KV cache.", 1.0, config)

    def _renamed(self, metric: Metric, name: str) -> Metric:
        renamed = Metric(name, metric.documentation, metric.type)
        for sample in metric.samples:
            labels = {_VLLM_LABELS.get(label, label): value for label, value in sample.labels.items()}
            renamed.add_sample(
                name + sample.name.removeprefix(metric.name), labels | self._labels, sample.value
            )
        return renamed

    def _count(self, name: str, documentation: str, value: float | Mapping[int, float]) -> Metric:
        """Returns a count that has to do with drafts, or one for each of their places."""
        metric = Metric(f"vllm:spec_decode_{name}", documentation, "counter")
        values = value if isinstance(value, Mapping) else {None: value}
        for place, count in values.items():
            labels = self._labels if place is None else {**self._labels, "position": str(place)}
            metric.add_sample(f"{metric.name}_total", labels, count)
        return metric

    def _single(self, name: str, documentation: str, value: float, labels: dict[str, str]) -> Metric:
        metric = Metric(name, documentation, "gauge")
        metric.add_sample(name, {**labels, **self._labels}, value)
        return metric


def _by_place(metric: Metric) -> dict[int, float]:
    """Returns the drafts of all proposers by their place, which vLLM counts from 0."""
    places: defaultdict[int, float] = defaultdict(float)
    for sample in metric.samples:
        if sample.name.endswith("_total"):
            places[int(sample.labels["position"]) - 1] += sample.value
    return places
