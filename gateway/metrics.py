"""Metrics for the operator: counted once per step and once per request, in base units."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from penstock.engine.planning.report import StepReport
from penstock.engine.planning.request import FinishReason
from penstock.engine.planning.state_records import StateUse
from penstock.engine.planning.step import ExpertUse
from penstock.engine.planning.timings import Timings
from penstock.engine.tiers.tiers import TiersUse
from penstock.gateway.instruments import Counter, Exposition, Gauge, Kind, Metric
from penstock.gateway.store.interface import StoreStats
from penstock.gateway.wire.frames import seconds_per_output_token
from penstock.priority.coverage import Coverage
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
    """The metrics of one app."""

    def __init__(self) -> None:
        self.page = Exposition("penstock_")
        self._vllm: _VllmNames | None = None
        self._store = StoreMetrics(self.page)
        self._promises = PromiseMetrics(self.page)
        self._tiers = TierMetrics(self.page)
        self.num_output_tokens = 0
        self._name_requests()
        self._name_steps()
        self._name_the_rest()

    def _name_requests(self) -> None:
        page = self.page
        histogram, counters = page.histogram, page.counters
        histograms = partial(page.histograms, labels=["lane"])
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
        page = self.page
        histogram, gauge, gauges = page.histogram, page.gauge, page.gauges
        counter, counters = page.counter, page.counters
        self.step_model = gauges(
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
        self.kv_unfilled = gauge(
            "kv_unfilled_ratio", "Share of the room in the KV blocks in use that no token fills."
        )
        self.state_slots = gauge("state_slots", "Slots for the states of sequences and snapshots; 0 without.")
        self.held_states = gauge("state_held_slots", "State slots held by sequences.")
        self.snapshots = gauge("state_snapshots", "Snapshots of states that prompts can reuse.")
        self.expert_imbalance = gauges(
            "expert_imbalance_ratio",
            "Tokens of a layer's most chosen expert, of the rank whose experts are chosen most, or of the rank whose "
            "sequences have most, divided by the mean; CPU only.",
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
        self.inter_token = histogram(
            "inter_token_seconds",
            "From the end of one step to the end of the next, counted for every sequence that continues.",
            _SECONDS,
        )
        self._last_step_end_s: float | None = None

    def _name_the_rest(self) -> None:
        counter, gauge, gauges = self.page.counter, self.page.gauge, self.page.gauges
        self.loop_lag = self.page.histogram(
            "event_loop_lag_seconds", "How late the event loop ran a timer.", _SECONDS
        )
        self.slow_readers = counter("slow_reader_disconnects", "Streams cut off because nobody read them.")
        self.streams = gauge("streams", "Replies in progress.")
        self.queued = gauges("queued_requests", "Requests in the queue.", ["lane"])
        self.waiting = gauge(
            "waiting_requests", "Requests that wait, in the queue or in the engine to go on."
        )
        self.promised = gauges(
            "promised_first_token_seconds",
            "Forecast for a new streamed request of a new tenant, with a prompt of so many tokens: the time that is "
            "compared with the promise of the interactive lane.",
            ["prompt_tokens"],
        )
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

    def note_tiers(self, use: TiersUse) -> None:
        self._tiers.set(use)

    def note_states(self, states: StateUse) -> None:
        self.state_slots.set(states.num_slots)
        self.held_states.set(states.num_held)
        self.snapshots.set(states.num_snapshots)

    def _note_experts(self, experts: ExpertUse) -> None:
        self.experts_touched.inc(experts.num_touched)
        self.expert_layers.inc(experts.num_layers)
        if (load := experts.load) is not None:
            self.expert_imbalance("experts").set(load.experts)
            self.expert_imbalance("ranks").set(load.ranks)
            self.expert_imbalance("sequences").set(load.rows)

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

    def note_coverage(self, coverage: Mapping[Lane, Coverage]) -> None:
        self._promises.set(coverage)

    def note_store(self, stats: StoreStats) -> None:
        self._store.set(stats)

    def render(self) -> bytes:
        if self._vllm is not None:
            self._vllm.set()
        return self.page.render()

    def add_compat(self, model: str, cache_config: Callable[[], Mapping[str, str]]) -> None:
        """Shows the same values under vLLM's names, too."""
        self._vllm = _VllmNames(self, model, cache_config)


class PromiseMetrics:
    """The metrics of the lanes' promises, which the queue counts."""

    def __init__(self, page: Exposition) -> None:
        self._promises = page.counters(
            "promises",
            "Requests let in with a promise on the first token, kept or broken.",
            ["lane", "outcome"],
        )
        self._needless = page.counters(
            "needless_refusals",
            "Expected number of late requests, refused or sent to the standard lane, that would have been in time, by "
            "those let in near the border.",
            ["lane"],
        )
        self._interval = page.gauges(
            "promise_coverage_ratio",
            "The 95 % interval of the share of promises kept, since the start.",
            ["lane", "bound"],
        )
        self._margin = page.gauges(
            "promise_margin_ratio",
            "The factor on forecasts before they are compared with the promise, learnt from broken and kept ones.",
            ["lane"],
        )

    def set(self, coverage: Mapping[Lane, Coverage]) -> None:
        for lane, one in coverage.items():
            self._promises(lane.label, "kept").set(one.num_kept)
            self._promises(lane.label, "broken").set(one.num - one.num_kept)
            self._needless(lane.label).set(one.num_needless)
            for bound, value in zip(("low", "high"), one.interval, strict=True):
                self._interval(lane.label, bound).set(value)
            self._margin(lane.label).set(one.margin.value)


class TierMetrics:
    """The metrics of the tiers that keep KV blocks outside of the device's memory, which count for themselves."""

    def __init__(self, page: Exposition) -> None:
        labels = ["tier"]
        self._gauges = {
            "num_blocks": page.gauges("kv_tier_blocks", "KV blocks in a tier.", labels),
            "num_bytes": page.gauges(
                "kv_tier_bytes", "Bytes in a tier, those of other servers included.", labels
            ),
            "max_bytes": page.gauges("kv_tier_max_bytes", "Most bytes that a tier may have.", labels),
        }
        self._counters = {
            "num_hits": page.counters("kv_tier_hits", "KV blocks read from a tier.", labels),
            "num_misses": page.counters("kv_tier_misses", "KV blocks that a tier could not bring.", labels),
            "bytes_read": page.counters("kv_tier_read_bytes", "Bytes read from a tier.", labels),
            "bytes_written": page.counters("kv_tier_written_bytes", "Bytes written to a tier.", labels),
            "read_seconds": page.counters(
                "kv_tier_read_seconds", "Time of reading threads in a tier.", labels
            ),
            "num_failures": page.counters(
                "kv_tier_failures", "Failed writes, and KV blocks that were found damaged.", labels
            ),
        }
        self._singles = {
            "num_fetched_blocks": page.counter(
                "kv_tiers_fetched_blocks", "KV blocks, and states, brought back from the tiers."
            ),
            "num_lost_blocks": page.counter(
                "kv_tiers_lost_blocks",
                "KV blocks, and states, overwritten while too many others waited to be written.",
            ),
            "seconds_saved": page.counter(
                "kv_tiers_saved_seconds",
                "Expected time of computing what was brought back, less the time that it took to bring it.",
            ),
        }

    def set(self, use: TiersUse) -> None:
        for tier, stats in use.tiers.items():
            for name, instrument in (*self._gauges.items(), *self._counters.items()):
                instrument(tier).set(getattr(stats, name))
        for name, counter in self._singles.items():
            counter.set(getattr(use, name))


class StoreMetrics:
    """The metrics of a store, which counts for itself."""

    def __init__(self, page: Exposition) -> None:
        counter, gauge, counters, gauges = page.counter, page.gauge, page.counters, page.gauges
        self._failures = counters("store_failures", "Calls to Redis that failed, by kind.", ["kind"])
        self._up = gauge("store_up", "0 while Redis is gone and memory stands in for it.")
        self._singles = {
            "num_calls": counter("store_calls", "Calls to Redis."),
            "num_rejected": counter("store_rejected", "Calls not tried because Redis was gone."),
            "num_dirty": gauge("store_unwritten", "Changes not yet written to Redis."),
            "num_dropped": counter("store_dropped", "Changes dropped without being written to Redis."),
            "num_corrupt": counter("store_corrupt", "Values in Redis that could not be read."),
            "num_records": gauge("store_records", "Records in memory."),
            "num_bytes": gauge("store_bytes", "Memory of these records."),
        }
        places = ["place"]
        self._shares = (
            gauges("store_share_bytes", "Most memory that the records of one tenant may take.", places),
            gauges(
                "store_largest_share_bytes",
                "Memory of the records of the tenant that has the most.",
                places,
            ),
            counters("store_evicted", "Records evicted because their tenant exceeded its share.", places),
        )

    def set(self, stats: StoreStats) -> None:
        self._up.set(stats.state == "ok")
        for name, metric in self._singles.items():
            metric.set(getattr(stats, name))
        for kind, number in stats.failures.items():
            self._failures(kind).set(number)
        for place, share in stats.shares.items():
            for metric_of, value in zip(self._shares, share, strict=True):
                metric_of(place).set(value)


_VLLM = {
    "waiting_requests": ("num_requests_waiting",),
    "running_sequences": ("num_requests_running",),
    "kv_usage_ratio": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    "prompt_tokens": ("prompt_tokens",),
    "output_tokens": ("generation_tokens",),
    "preemptions": ("num_preemptions",),
    "prefix_cache_query_tokens": ("prefix_cache_queries", "gpu_prefix_cache_queries"),
    "prefix_cache_hit_tokens": ("prefix_cache_hits", "gpu_prefix_cache_hits"),
    "choices": ("request_success",),
    "time_to_first_token_seconds": ("time_to_first_token_seconds",),
    "inter_token_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "time_per_output_token_seconds": ("request_time_per_output_token_seconds",),
    "request_seconds": ("e2e_request_latency_seconds",),
    "queue_wait_seconds": ("request_queue_time_seconds",),
    "prefill_seconds": ("request_prefill_time_seconds",),
    "decode_seconds": ("request_decode_time_seconds",),
    "inference_seconds": ("request_inference_time_seconds",),
    "request_prompt_tokens": ("request_prompt_tokens",),
    "request_output_tokens": ("request_generation_tokens",),
    "step_tokens": ("iteration_tokens_total",),
}
"""vLLM's names for a metric. Routers and dashboards written for older releases read those with `gpu_`, and call the
time between two tokens the time per output token."""


class _VllmNames:
    """vLLM's names for what is measured, and the few of its metrics that have to be derived."""

    def __init__(self, metrics: Metrics, model: str, cache_config: Callable[[], Mapping[str, str]]) -> None:
        self._metrics = metrics
        self._cache_config = cache_config
        page, common = metrics.page, {"model_name": model, "engine": "0"}
        for name, others in _VLLM.items():
            for other in others:
                page.show(page.metrics[name], f"vllm:{other}", common, {"finish_reason": "finished_reason"})

        def derived(kind: Kind, name: str, documentation: str, labels: Sequence[str] = ()) -> Metric[Gauge]:
            metric = Metric(name, kind, documentation, labels, Counter if kind == "counter" else Gauge)
            page.show(metric, f"vllm:{name}", common)
            return metric

        drafts, accepted = (page.metrics[f"{kind}_tokens"].documentation for kind in ("draft", "accepted"))
        drafted = partial(derived, "counter")
        self._num_drafts = drafted("spec_decode_num_drafts", "Drafts that were verified.")
        self._num_draft_tokens = drafted("spec_decode_num_draft_tokens", drafts)
        self._num_accepted = drafted("spec_decode_num_accepted_tokens", accepted)
        self._by_place = drafted("spec_decode_num_accepted_tokens_per_pos", accepted, ["position"])
        self._cache = derived("gauge", "cache_config_info", "The KV cache.", list(cache_config()))
        self._why = derived("gauge", "num_requests_waiting_by_reason", "Requests that wait.", ["reason"])
        self._hits = derived("gauge", "gpu_prefix_cache_hit_rate", "Share of prompt tokens in the cache.")

    def set(self) -> None:
        """Derives what is not measured under its own name."""
        metrics = self._metrics
        drafted, accepted = (
            _by_place(metrics.page.metrics[f"{kind}_tokens"]) for kind in ("draft", "accepted")
        )
        self._num_drafts.labels().set(drafted.get(0, 0.0))
        self._num_draft_tokens.labels().set(sum(drafted.values()))
        self._num_accepted.labels().set(sum(accepted.values()))
        for place, count in accepted.items():
            self._by_place.labels(place).set(count)
        self._cache.instruments.clear()
        self._cache.labels(*self._cache_config().values()).set(1)
        self._why.labels("capacity").set(metrics.waiting.value)
        self._why.labels("deferred").set(0)
        self._hits.labels().set(metrics.prefix_hits.value / max(1.0, metrics.prefix_queries.value))


def _by_place(metric: Metric[Any]) -> dict[int, float]:
    """Returns the drafts of all proposers by their place, which vLLM counts from 0."""
    places: defaultdict[int, float] = defaultdict(float)
    for (_, position), counter in metric.instruments.items():
        places[int(position) - 1] += counter.value
    return places
