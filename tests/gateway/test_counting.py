"""The metrics as Prometheus reads them: every request, choice and token is counted once, under the right name."""

from __future__ import annotations

import asyncio
import math
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from penstock.engine.planning.request import FinishReason, Request
from penstock.engine.planning.timings import DraftCount
from penstock.gateway import instruments
from penstock.gateway.instruments import Exposition
from penstock.gateway.metrics import Metrics
from penstock.gateway.service import ServiceOptions
from penstock.priority.coverage import Coverage
from penstock.priority.lanes import Lane, LanePolicy
from tests.few import examples
from tests.gateway.harness import (
    MODEL,
    Gateway,
    chat_body,
    client,
    completion_body,
    make_timings,
    make_tokenizer,
    serving,
    step_report,
)
from tests.gateway.raw_http import connect, get
from tests.gateway.sessions.recordings.fakes import make_request

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
TOKENIZER = make_tokenizer()
Counts = dict[str, float]


def counts(text: str) -> Counts:
    """Value by name and the labels' values; buckets left out."""
    return {
        " ".join([sample.name, *(sample.labels[key] for key in sorted(sample.labels))]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "le" not in sample.labels
    }


def of(found: Counts, name: str) -> Counts:
    """Returns the counts of one name, by labels; what never happened is not there, or zero."""
    return {
        key.removeprefix(name).strip(): value
        for key, value in found.items()
        if value and key.split(" ")[0] == name
    }


async def counted(gateway: Gateway) -> Counts:
    gateway.clock.now += 0.02  # until then the page is the one before
    async with client(gateway.app) as http:
        return counts((await http.get("/metrics")).text)


async def begin(
    gateway: Gateway, body: dict[str, Any], path: str = CHAT
) -> tuple[asyncio.Task[Any], Request]:
    async def ask() -> Any:
        async with client(gateway.app) as http:
            return await http.post(path, json=body)

    return asyncio.create_task(ask()), await gateway.taken()


async def test_the_page_is_what_prometheus_expects() -> None:
    gateway = Gateway(ServiceOptions(models=(MODEL,), metrics_compat="vllm"))
    async with serving(gateway.app) as url, connect(url) as connection:
        connection.send(get("/metrics"))
        answer = await connection.answer()
    assert answer.headers["content-type"].startswith("text/plain; version=")
    families = list(text_string_to_metric_families(answer.body.decode()))
    assert len({family.name for family in families}) == len(families)
    for family in families:
        assert family.documentation
        assert family.type in ("counter", "gauge", "histogram"), family.name
        assert family.name.startswith(("penstock_", "vllm:"))
        assert not math.isnan(sum(sample.value for sample in family.samples))


async def test_what_is_let_in_is_counted_by_lane() -> None:
    gateway = Gateway()
    asked: list[tuple[dict[str, Any], str]] = [
        (chat_body("four", service_tier="priority"), CHAT),
        (chat_body("Hi", service_tier="flex"), CHAT),
        (chat_body("Hi"), CHAT),
        (completion_body([1, 2, 3, 4, 5], n=3), "/v1/completions"),
    ]
    for body, path in asked:
        asking, request = await begin(gateway, body, path)
        gateway.answer(request, "ok")
        await asking
    found = await counted(gateway)
    admitted = {"admitted interactive ": 1.0, "admitted batch ": 1.0, "admitted standard ": 2.0}
    assert of(found, "penstock_admissions_total") == {key.strip(): value for key, value in admitted.items()}
    assert of(found, "penstock_prompt_tokens_total") == {"": 8.0 + 6 + 6 + 5}
    assert of(found, "penstock_request_prompt_tokens_count") == {"": 4.0}
    assert of(found, "penstock_choices_total") == {"stop interactive": 1, "stop batch": 1, "stop standard": 4}


async def test_every_prompt_of_a_body_is_one_request() -> None:
    gateway = Gateway()
    asking, first = await begin(gateway, completion_body(["a", "bcd"]), "/v1/completions")
    gateway.answer(await gateway.taken(), "ok")
    gateway.answer(first, "ok")
    await asking
    found = await counted(gateway)
    assert of(found, "penstock_admissions_total") == {"admitted standard": 2}
    assert of(found, "penstock_prompt_tokens_total") == {"": 2.0 + 4}


async def test_refusals_are_counted_by_reason_and_not_as_admitted() -> None:
    gateway = Gateway(bounds={Lane.STANDARD: LanePolicy(max_requests=1, max_tokens=10**6, ttl_s=60)})
    async with client(gateway.app) as http:
        waiting = asyncio.create_task(http.post(CHAT, json=chat_body()))
        await gateway.queued()
        for _ in range(2):
            assert (await http.post(CHAT, json=chat_body())).status_code == 503
        # Those that are wrong in themselves never came to the queue.
        assert (await http.post(CHAT, json=chat_body(n=0))).status_code == 400
        gateway.service.tick(gateway.clock.now + 61)
        assert (await waiting).json()["error"]["code"] == "queue_timeout"
    assert of(await counted(gateway), "penstock_admissions_total") == {
        "admitted standard": 1,
        "refused standard queue_full": 2,
        "refused standard queue_timeout": 1,
    }


async def test_choices_are_counted_by_how_they_ended() -> None:
    gateway = Gateway()
    asking, request = await begin(gateway, chat_body(n=3))
    for index, reason in enumerate((FinishReason.STOP, FinishReason.LENGTH, FinishReason.LENGTH)):
        gateway.finish(request, "x", index, reason)
    await asking
    failing, request = await begin(gateway, chat_body(stream=True))
    gateway.bring(request, "begun")
    gateway.finish(request, reason=FinishReason.FAILED, error="no")
    await failing
    found = await counted(gateway)
    assert of(found, "penstock_choices_total") == {
        "stop standard": 1,
        "length standard": 2,
        "failed standard": 1,
    }
    # How long a choice took says nothing if it failed.
    assert of(found, "penstock_request_seconds_count") == {"standard": 3}
    assert of(found, "penstock_request_output_tokens_sum") == {"": 9}


@settings(max_examples=examples(30))
@given(st.lists(st.lists(st.integers(0, 5), max_size=4), max_size=8))
async def test_tokens_are_counted_once_whoever_reads_them(steps: list[list[int]]) -> None:
    """Four choices; each step brings some of them some tokens. Speculation brings several at once, or none."""
    gateway = Gateway(tokenizer=TOKENIZER)
    asking, request = await begin(gateway, chat_body(n=4, stream=True))
    for step in steps:
        outputs = [gateway.output(request, "x", i, token_ids=[7] * number) for i, number in enumerate(step)]
        gateway.deliver(*outputs)
    for index in range(4):
        gateway.finish(request, "", index, token_ids=[])
    await asking
    found = await counted(gateway)
    total = sum(map(sum, steps))
    assert of(found, "penstock_output_tokens_total") == ({"": total} if total else {})
    assert of(found, "penstock_step_seconds_count") == {"": len(steps) + 4}


async def test_a_gauge_is_what_the_last_step_said() -> None:
    gateway = Gateway()
    for running in (3, 7, 2):
        gateway.service.deliver(
            step_report(num_running=running, num_waiting=1, num_free_blocks=8, num_preemptions=2)
        )
    found = await counted(gateway)
    assert of(found, "penstock_running_sequences") == {"": 2}
    assert of(found, "penstock_kv_usage_ratio") == {"": 0.75}
    assert of(found, "penstock_preemptions_total") == {"": 6}
    gateway.service.deliver(step_report(error="out of memory"))
    assert of(await counted(gateway), "penstock_failed_steps_total") == {"": 1}


async def test_streams_and_queues_are_seen_while_they_are_there() -> None:
    gateway = Gateway()
    asking, request = await begin(gateway, chat_body(stream=True))
    during = await counted(gateway)
    gateway.answer(request, "ok")
    await asking
    after = await counted(gateway)
    assert (during["penstock_streams"], after["penstock_streams"]) == (1, 0)
    assert (during["penstock_queued_requests standard"], after["penstock_engine_up"]) == (0, 1)


BOUNDS = [0.5, 1.0, 2.0]
VALUES = st.tuples(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0]), st.integers(0, 5))


@given(st.lists(VALUES, max_size=20))
def test_a_value_taken_many_times_is_that_many_values(observed: list[tuple[float, int]]) -> None:
    page = Exposition("x_")
    histogram = page.histogram("seconds", "X.", BOUNDS)
    for value, times in observed:
        histogram.observe(value, times)
    (family,) = text_string_to_metric_families(page.render().decode())
    every = [value for value, times in observed for _ in range(times)]
    for sample in family.samples:
        if sample.name == "x_seconds_bucket":
            assert sample.value == sum(value <= float(sample.labels["le"]) for value in every)
        elif sample.name == "x_seconds_count":
            assert sample.value == len(every)
        else:
            assert sample.value == sum(every)
    assert len(family.samples) == len(BOUNDS) + 3


LABELS = st.text(st.characters(blacklist_categories=["Cs", "Cc"], whitelist_characters="\n"), max_size=5)
Changes = list[tuple[str, str, float]]
CHANGES = st.lists(st.tuples(st.sampled_from("cgh"), LABELS, st.floats(0, 1e9)), max_size=20)


@settings(max_examples=examples(50))
@given(st.lists(CHANGES, max_size=3))
def test_a_page_is_that_of_prometheus_client_whatever_changed_since_the_last(changes: list[Changes]) -> None:
    page, registry = Exposition("x_"), CollectorRegistry()
    documentation = "A \\ and\na line."
    ours: Any = {
        "c": page.counters("c", documentation, ["a"]),
        "g": page.gauges("g", documentation, ["a"]),
        "h": page.histograms("h", documentation, BOUNDS, ["a"]),
    }
    theirs: Any = {
        "c": Counter("x_c", documentation, ["a"], registry=registry),
        "g": Gauge("x_g", documentation, ["a"], registry=registry),
        "h": Histogram("x_h", documentation, ["a"], registry=registry, buckets=BOUNDS),
    }
    change = {"c": "inc", "g": "set", "h": "observe"}
    for some in changes:
        for kind, label, value in some:
            getattr(ours[kind](label), change[kind])(value)
            getattr(theirs[kind].labels(label), change[kind])(value)
        assert families(page.render()) == families(generate_latest(registry))


def families(page: bytes) -> dict[str, Any]:
    """Returns the metrics by name, without the times at which they were made."""
    return {
        family.name: (
            family.type,
            family.documentation,
            sorted((s.name, sorted(s.labels.items()), s.value) for s in family.samples),
        )
        for family in text_string_to_metric_families(page.decode())
        if not family.name.endswith("_created")
    }


def full_metrics() -> Metrics:
    """Returns the metrics of a server that has used every lane, under vLLM's names, too."""
    metrics = Metrics()
    metrics.add_compat(MODEL, lambda: {"block_size": "16", "num_gpu_blocks": "1000"})
    for lane in Lane:
        metrics.note_admitted(lane, [100])
        metrics.note_forecast(lane, 0.1, 1.0)
        metrics.note_finished(lane, FinishReason.STOP, make_timings(make_request()))
        metrics.note_first_token(lane, 0.1, 0.1)
    metrics.note_coverage({lane: Coverage(num=1) for lane in Lane})
    metrics.note_step(step_report(drafts={"draft": DraftCount([5, 4, 3], [3, 1, 0])}), 1)
    return metrics


def test_a_page_that_is_scraped_often_costs_what_has_changed() -> None:
    """A picker scrapes every 50 ms. What a step changes is rendered anew, and nothing else."""
    metrics, rendered, number = full_metrics(), list[float](), instruments._number
    metrics.render()

    def counted(value: float) -> str:
        rendered.append(value)
        return number(value)

    with mock.patch.object(instruments, "_number", counted):
        metrics.render()
        assert not rendered
        metrics.note_step(step_report(), 1)
        page = metrics.render()
    assert 0 < 8 * len(rendered) < page.count(b"\n")
