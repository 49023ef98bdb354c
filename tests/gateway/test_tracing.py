"""A trace of each request, as a collector gets it over HTTP."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

from penstock.gateway.tracing import Traces
from penstock.priority.verdict import Refusal
from tests.clock import Clock
from tests.collector import Collector, attributes
from tests.gateway.harness import MODEL, Gateway, chat_body, client, completion_body

pytestmark = pytest.mark.anyio

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CHAT = "/v1/chat/completions"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")


def traced(url: str) -> tuple[Gateway, Traces]:
    clock = Clock()
    traces = Traces(url, MODEL, "one", clock)
    return Gateway(clock=clock, traces=traces), traces


async def answered(
    gateway: Gateway, body: dict[str, object], path: str = CHAT, **headers: str
) -> httpx.Response:
    async with client(gateway.app) as http:
        asking = asyncio.create_task(http.post(path, json=body, headers=headers))
        gateway.answer(await gateway.taken(), "Good", " day")
        return await asking


async def the_span(collector: Collector, traces: Traces) -> Span:
    """The only one, when all have been sent."""
    await asyncio.to_thread(traces.close)
    (span,) = collector.spans
    return span


def events(span: Span) -> dict[str, float]:
    """Milliseconds after the request arrived."""
    return {event.name: (event.time_unix_nano - span.start_time_unix_nano) / 1e6 for event in span.events}


async def test_a_span_says_what_became_of_its_request_and_when(collector: Collector) -> None:
    gateway, traces = traced(collector.url)
    body = chat_body(service_tier="priority", max_tokens=9)
    reply = await answered(gateway, body, traceparent=PARENT)
    span = await the_span(collector, traces)
    assert (span.name, span.kind) == (f"chat {MODEL}", Span.SPAN_KIND_SERVER)
    assert f"00-{span.trace_id.hex()}-{span.parent_span_id.hex()}-01" == PARENT
    assert abs(span.start_time_unix_nano / 1e9 - time.time()) < 60
    assert events(span) == pytest.approx(
        {"queued": 0, "admitted": 10, "first_token": 30, "preempted": 50, "ended": 70}, abs=0.01
    )
    found = attributes(span)
    usage = reply.json()["usage"]
    assert found == found | {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 4,
        "penstock.lane": "interactive",
        "penstock.tenant": "default",
        "penstock.request_id": reply.headers["x-request-id"],
    }
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    assert {name for name in found if name.startswith("gen_ai.")} <= known
    (resource,) = collector.resources
    assert (resource["service.name"], resource["service.instance.id"]) == ("penstock", "one")


async def test_the_log_of_requests_names_the_trace(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    gateway, traces = traced(collector.url)
    with caplog.at_level(logging.INFO, "penstock.access"):
        await answered(gateway, completion_body(), "/v1/completions")
    span = await the_span(collector, traces)
    assert span.name == f"text_completion {MODEL}"
    assert not span.parent_span_id
    (line,) = caplog.records
    assert line.getMessage().endswith(f", trace {span.trace_id.hex()}")
    assert vars(line)["fields"]["trace_id"] == span.trace_id.hex()


@pytest.mark.parametrize("parent", [PARENT.removesuffix("1") + "0", "nonsense"])
async def test_a_parent_decides_whether_there_is_a_trace_and_nonsense_is_none(
    collector: Collector, parent: str
) -> None:
    gateway, traces = traced(collector.url)
    assert (await answered(gateway, chat_body(), traceparent=parent)).status_code == 200
    await asyncio.to_thread(traces.close)
    assert len(collector.spans) == (parent == "nonsense")


async def test_a_refusal_is_an_error_of_the_span(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise Refusal("promise_out_of_reach", "Too late.", 1.0)

    gateway, traces = traced(collector.url)
    monkeypatch.setattr(gateway.queue, "put_all", refuse)
    async with client(gateway.app) as http:
        reply = await http.post(CHAT, json=chat_body(service_tier="priority"))
    assert reply.status_code == 503
    span = await the_span(collector, traces)
    assert span.status.code == Status.STATUS_CODE_ERROR
    assert attributes(span)["error.type"] == reply.json()["error"]["code"]
    assert list(events(span)) == ["queued"]


async def test_who_leaves_has_a_span_without_an_end_of_its_choices(collector: Collector) -> None:
    gateway, traces = traced(collector.url)
    async with client(gateway.app) as http:
        asking = asyncio.create_task(http.post(CHAT, json=chat_body()))
        await gateway.queued()
        asking.cancel()
        await gateway.left()
    span = await the_span(collector, traces)
    assert span.status.code == Status.STATUS_CODE_UNSET
    assert attributes(span)["gen_ai.usage.output_tokens"] == 0
    assert list(events(span)) == ["queued"]


async def test_a_collector_that_takes_nothing_costs_one_line(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    gateway, traces = traced(collector.url)
    collector.status = 400
    with caplog.at_level(logging.INFO):
        for number in range(1, 4):
            await answered(gateway, chat_body())
            await asyncio.to_thread(collector.wait_posts, number)
        collector.status = 200
        await answered(gateway, chat_body())
        await the_span(collector, traces)
    said = [record.getMessage() for record in caplog.records if record.name == "penstock.gateway"]
    assert said == [f"traces are lost: no collector takes them at {collector.url}", "traces are taken again"]


async def test_a_collector_that_is_not_there_costs_a_line_and_no_time(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    gateway, traces = traced("http://127.0.0.1:9")
    for _ in range(3):
        await answered(gateway, chat_body())
    await asyncio.to_thread(traces.close)
    said = [record.getMessage() for record in caplog.records]
    assert said == ["traces are lost: no collector takes them at http://127.0.0.1:9"]


async def test_the_standard_variables_say_where_and_what(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "of-the-operator")
    clock = Clock()
    traces = Traces(None, MODEL, "one", clock)
    await answered(Gateway(clock=clock, traces=traces), chat_body())
    await the_span(collector, traces)
    assert collector.resources[0]["service.name"] == "of-the-operator"
