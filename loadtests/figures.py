"""The figures of a run: those of `vllm bench serve` under its names, and what became of promises, queue and tenants."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean, median, pstdev
from typing import Any

from loadtests.outcomes import Outcome
from penstock.app.bench.statistics import percentile
from penstock.priority.lanes import DEFAULT_POLICIES, Lane, LanePolicy
from penstock.priority.simulator.result import Result
from penstock.priority.simulator.summary import summarise

Row = dict[str, Any]
_PERCENTS = (50, 90, 95, 99)


def figures(outcomes: Sequence[Outcome], lanes: Mapping[Lane, LanePolicy] = DEFAULT_POLICIES) -> Row:
    """All figures, ready for JSON; None where there is nothing to count.

    Requests whose user went away on purpose count neither as completed nor as failed, and have no promise.
    """
    if not outcomes:
        return {"completed": 0, "failed": 0, "rejected": 0, "cancelled": 0}
    done = [one for one in outcomes if one.ending == "done"]
    endings = Counter(one.ending for one in outcomes)
    began_s = min(one.at_s for one in outcomes)
    duration_s = max(one.at_s + one.e2e_ms / 1000 for one in outcomes) - began_s
    num_input = sum(one.answer.num_prompt_tokens for one in done)
    num_output = sum(one.answer.num_output_tokens for one in done)
    found: Row = {
        "duration": duration_s,
        "completed": endings["done"],
        "failed": endings["failed"],
        "rejected": endings["refused"],
        "cancelled": endings["left"],
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration_s,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        "max_output_tokens_per_s": _most_per_second(outcomes),
        "max_concurrent_requests": _most_at_once(outcomes),
        **_spreads(done),
        **_promises(outcomes, duration_s, lanes),
        "queue_ms": _queue_ms(done),
        "client_lag_p99_ms": percentile([one.lag_s * 1000 for one in outcomes], 99),
        "errors": Counter(one.answer.error for one in outcomes if one.ending == "failed"),
        "kinds": {f"{kind}, {lane}": _kind(some) for (kind, lane), some in _by_kind(outcomes).items()},
    }
    return {key: _plain(value) for key, value in found.items()}


def _spreads(done: Sequence[Outcome]) -> Row:
    """mean_ttft_ms, p99_itl_ms and so on."""
    values = {
        "ttft": _known(one.ttft_ms for one in done),
        "tpot": _known(one.tpot_ms for one in done),
        "itl": [gap for one in done for gap in one.gaps_ms],
        "e2el": [one.e2e_ms for one in done],
    }
    found: Row = {}
    for name, some in values.items():
        for word, measure in (("mean", fmean), ("median", median), ("std", pstdev)):
            found[f"{word}_{name}_ms"] = measure(some) if some else None
        found |= {f"p{percent}_{name}_ms": percentile(some, percent) for percent in _PERCENTS}
    return found


def _promises(outcomes: Sequence[Outcome], duration_s: float, lanes: Mapping[Lane, LanePolicy]) -> Row:
    """By the simulator's own rule: `slo_attainment` is of all that were offered, `..._of_admitted` of those let in.

    Who polls sees no first token, and who left waits for none: of them nothing can be said.
    """
    told = [
        one for one in outcomes if one.ending != "left" and not (one.ending == "done" and not one.ttft_ms)
    ]
    served = sorted((one.served() for one in told), key=lambda one: one.arrival.at_s)
    if not served:
        return {}
    summary = summarise(Result("served", served, served[0].arrival.at_s + duration_s), lanes)
    return {
        "request_goodput": summary.total.kept / duration_s,
        "slo_attainment": {name: lane.attainment for name, lane in summary.lanes.items()},
        "slo_attainment_of_admitted": {
            name: lane.attainment_of_admitted for name, lane in summary.lanes.items()
        },
        "jain_index": summary.jain,
        "batch_share": summary.batch_share,
        "refused_p99_ms": percentile([one.e2e_ms for one in outcomes if one.ending == "refused"], 99),
        "tenants": {name: asdict(tenant) for name, tenant in summary.tenants.items()},
    }


def _queue_ms(done: Iterable[Outcome]) -> Row:
    """The wait in the server's queue, by lane and tenant."""
    waits = _grouped(
        (one for one in done if one.answer.queue_s is not None), lambda one: (one.lane, one.tenant)
    )
    return {
        f"{lane}, {tenant}": {
            f"p{percent}": percentile([1000 * (one.answer.queue_s or 0.0) for one in some], percent)
            for percent in _PERCENTS
        }
        for (lane, tenant), some in waits.items()
    }


def _kind(some: Sequence[Outcome]) -> Row:
    done = [one for one in some if one.ending == "done"]
    endings = Counter(one.ending for one in some)
    ttft_ms, tpot_ms = _known(one.ttft_ms for one in done), _known(one.tpot_ms for one in done)
    return {
        "requests": len(some),
        **{ending: endings[ending] for ending in ("done", "left", "refused", "failed")},
        "ttft_p50_ms": percentile(ttft_ms, 50),
        "ttft_p99_ms": percentile(ttft_ms, 99),
        "tpot_p50_ms": percentile(tpot_ms, 50),
        "tpot_p99_ms": percentile(tpot_ms, 99),
        "e2e_p99_ms": percentile([one.e2e_ms for one in done], 99),
    }


def _by_kind(outcomes: Iterable[Outcome]) -> dict[tuple[str, str], list[Outcome]]:
    return _grouped(outcomes, lambda one: (one.kind, one.lane))


def _grouped(
    outcomes: Iterable[Outcome], key: Callable[[Outcome], tuple[str, str]]
) -> dict[tuple[str, str], list[Outcome]]:
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for one in outcomes:
        groups.setdefault(key(one), []).append(one)
    return dict(sorted(groups.items()))


def _most_per_second(outcomes: Iterable[Outcome]) -> float:
    """Output tokens in the best second; a request's frames carry equally many each."""
    seconds: dict[int, float] = {}
    for one in outcomes:
        answer = one.answer
        if answer.token_times_s:
            each = max(1.0, answer.num_output_tokens / len(answer.token_times_s))
            for at_s in answer.token_times_s:
                second = int(one.at_s + at_s - answer.started_s)
                seconds[second] = seconds.get(second, 0.0) + each
    return max(seconds.values(), default=0.0)


def _most_at_once(outcomes: Iterable[Outcome]) -> int:
    changes = sorted(
        change for one in outcomes for change in ((one.at_s, 1), (one.at_s + one.e2e_ms / 1000, -1))
    )
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _plain(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value
