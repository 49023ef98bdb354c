"""Over HTTP: streams that leave their lane to the server, and promises that headers ask for, in every API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest

from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import Request
from penstock.gateway.access.keys import OPEN_TENANT, digest_of
from penstock.gateway.service import ServiceOptions
from penstock.gateway.wire.lanes import TPOT_HEADER, TTFT_HEADER
from penstock.priority.lanes import Lane, Tenant
from tests.gateway.endpoints.test_promises import slow_gateway
from tests.gateway.harness import MODEL, Gateway, chat_body, client, completion_body

pytestmark = pytest.mark.anyio

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
OLLAMA, OLLAMA_TEXT = "/api/chat", "/api/generate"
HI = [{"role": "user", "content": "Hi"}]
RESUMABLE: dict[str, Any] = {"stream": True, "stream_options": {"resumable": True}}
STREAMS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, chat_body(stream=True)),
    (CHAT, chat_body(stream=True, service_tier="auto", n=2)),
    (CHAT, chat_body(**RESUMABLE)),
    (TEXT, completion_body("Hi", stream=True)),
    (TEXT, completion_body("Hi", **RESUMABLE)),
    (RESPONSES, {"model": MODEL, "input": "Hi", "stream": True}),
    (MESSAGES, {"model": MODEL, "messages": HI, "max_tokens": 9, "stream": True}),
    (MESSAGES, {"model": MODEL, "messages": HI, "max_tokens": 9, "stream": True, "service_tier": "auto"}),
    (OLLAMA, {"model": MODEL, "messages": HI}),
    (OLLAMA_TEXT, {"model": MODEL, "prompt": "Hi"}),
]
"""Streams that name no lane, in every API."""
TIERS = {MESSAGES: {"priority": "priority", "default": "standard"}}
"""The names of tiers in replies, where they are not OpenAI's."""


def objects(text: str) -> Iterator[Any]:
    """All JSON objects of a stream, in events or in lines."""
    for line in text.splitlines():
        data = line.removeprefix("data: ")
        if data.startswith("{"):
            yield json.loads(data)


def found(value: Any, name: str) -> Iterator[Any]:
    """All values of that name, however deep."""
    if isinstance(value, Mapping):
        yield from (item for key, item in value.items() if key == name and item is not None)
    if isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from found(item, name)


async def asked(
    gateway: Gateway, path: str, body: Mapping[str, Any], headers: Mapping[str, str] = {}
) -> tuple[httpx.Response, Request]:
    """Returns the reply to a request, and the request as the engine got it, which answers at once."""
    async with client(gateway.app) as http:
        reply = asyncio.create_task(http.post(path, json=body, headers=headers))
        while (request := await gateway.taken()).request_id == "busy":
            pass
        gateway.answer(request, "Hel", "lo")
        return await reply, request


def busy_gateway(seconds_per_token: float) -> Gateway:
    """A server whose next tokens are those of a long prompt, which takes a thousand times as long as a token."""
    gateway = slow_gateway(seconds_per_token)
    prompt, sampling = (7,) * 1_000, SamplingParams(max_tokens=1)
    busy = Request(
        request_id="busy", prompt_token_ids=prompt, sampling=sampling, lane=0, tenant=OPEN_TENANT.name
    )
    gateway.queue.readmit(busy, gateway.clock())
    return gateway


@pytest.mark.parametrize(("path", "body"), STREAMS)
@pytest.mark.parametrize(
    ("seconds_per_token", "lane"), [(0.0005, Lane.INTERACTIVE), (0.005, Lane.STANDARD)], ids=["quick", "slow"]
)
async def test_a_stream_says_which_lane_it_got(
    path: str, body: dict[str, Any], seconds_per_token: float, lane: Lane
) -> None:
    reply, request = await asked(busy_gateway(seconds_per_token), path, body)
    assert (reply.status_code, request.lane) == (200, lane)
    told = list(objects(reply.text))
    tier = "priority" if lane is Lane.INTERACTIVE else "default"
    tiers = {*found(told, "service_tier")}
    assert tiers == (set() if path.startswith("/api/") else {TIERS.get(path, {}).get(tier, tier)})
    timings = [*found(told, "timings")][-1]
    assert (timings["lane"], timings["promised_ttft_ms"]) == (lane.label, 30_000 if lane else 1_000)
    assert 0 < timings["predicted_ttft_ms"] < timings["promised_ttft_ms"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat_body()),
        (CHAT, chat_body(service_tier="auto")),
        (TEXT, completion_body("Hi")),
        (RESPONSES, {"model": MODEL, "input": "Hi"}),
        (MESSAGES, {"model": MODEL, "messages": HI, "max_tokens": 9}),
        (
            MESSAGES,
            {
                "model": MODEL,
                "messages": HI,
                "max_tokens": 9,
                "stream": True,
                "service_tier": "standard_only",
            },
        ),
        (OLLAMA, {"model": MODEL, "messages": HI, "stream": False}),
        (CHAT, chat_body(stream=True, service_tier="default")),
    ],
)
async def test_what_is_not_streamed_or_names_the_standard_lane_is_standard(
    path: str, body: dict[str, Any]
) -> None:
    reply, request = await asked(slow_gateway(0.0005), path, body)
    assert (reply.status_code, request.lane) == (200, Lane.STANDARD)


async def test_all_prompts_of_a_stream_are_in_one_lane() -> None:
    body = completion_body(["x" * 400] * 4, stream=True)
    gateway = slow_gateway(0.002)
    async with client(gateway.app) as http:
        reply = asyncio.create_task(http.post(TEXT, json=body))
        lanes = []
        for _ in range(4):
            request = await gateway.taken()
            lanes.append(request.lane)
            gateway.answer(request, "done")
        assert {*found([*objects((await reply).text)], "service_tier")} == {"priority"}
    assert lanes == [Lane.INTERACTIVE] * 4


async def test_a_recorded_stream_is_followed_in_the_lane_that_it_got() -> None:
    gateway = slow_gateway(0.0005)
    reply, _ = await asked(gateway, CHAT, chat_body(**RESUMABLE))
    [(first, *_)] = [[*objects(reply.text)]]
    async with client(gateway.app) as http:
        again = await http.get(f"{CHAT}/{first['id']}")
    assert again.text == reply.text
    assert first["service_tier"] == "priority"


@pytest.mark.parametrize(
    ("headers", "lane", "promised_ms"),
    [
        ({TTFT_HEADER: "20000"}, Lane.INTERACTIVE, 20_000),
        ({TTFT_HEADER: "40000"}, Lane.STANDARD, 40_000),
        ({TPOT_HEADER: "250"}, Lane.STANDARD, 30_000),
        ({TTFT_HEADER: "40000", TPOT_HEADER: "100"}, Lane.INTERACTIVE, 40_000),
    ],
)
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, OLLAMA])
async def test_headers_ask_for_a_promise(
    path: str, headers: Mapping[str, str], lane: Lane, promised_ms: int
) -> None:
    gateway = busy_gateway(0.005)
    body = dict(next(body for known, body in STREAMS if known == path))
    reply, request = await asked(gateway, path, body, headers)
    assert (reply.status_code, request.lane) == (200, lane)
    timings = [*found([*objects(reply.text)], "timings")][-1]
    assert (timings["lane"], timings["promised_ttft_ms"]) == (lane.label, promised_ms)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/decisions"])
async def test_what_has_no_tokens_may_ask_for_a_promise(path: str) -> None:
    body: dict[str, Any] = {"model": MODEL, "input": "Hi"}
    if path == "/v1/decisions":
        body["questions"] = [{"type": "predicate", "instructions": "Is it red?"}]
    async with client(busy_gateway(0.005).app) as http:
        refused = await http.post(path, json=body, headers={TTFT_HEADER: "5"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "promise_out_of_reach")


async def test_what_a_header_asks_for_is_refused_as_a_promise_is() -> None:
    async with client(busy_gateway(0.005).app) as http:
        refused = await http.post(CHAT, json=chat_body(stream=True), headers={TTFT_HEADER: "2000"})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (503, "promise_out_of_reach")
    assert error["message"].endswith("the interactive lane promises 2.00 s")
    assert 1 <= int(refused.headers["retry-after"]) <= 60


@pytest.mark.parametrize(
    "headers", [{TTFT_HEADER: "soon"}, {TPOT_HEADER: "0"}, {TTFT_HEADER: "1000"}, {TPOT_HEADER: "100"}]
)
@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES, MESSAGES, OLLAMA, OLLAMA_TEXT])
async def test_a_header_that_cannot_be_had_is_named(path: str, headers: Mapping[str, str]) -> None:
    """The key's `top` is the standard lane."""
    clients = {digest_of("a-key"): Tenant(name="ann", top_lane=Lane.STANDARD)}
    gateway = Gateway(ServiceOptions(models=(MODEL,), clients=clients))
    body = next(body for known, body in STREAMS if known == path)
    async with client(gateway.app) as http:
        reply = await http.post(path, json=body, headers={"authorization": "Bearer a-key", **headers})
    assert reply.status_code == 400
    assert f"header '{next(iter(headers))}'" in reply.text


async def test_the_metrics_count_a_stream_in_the_lane_that_it_got() -> None:
    gateway = busy_gateway(0.005)
    await asked(gateway, CHAT, chat_body(stream=True))
    async with client(gateway.app) as http:
        text = (await http.get("/metrics")).text
    admitted = [line for line in text.splitlines() if line.startswith("penstock_admissions_total")]
    assert [line for line in admitted if not line.endswith(" 0.0")] == [
        'penstock_admissions_total{decision="admitted",lane="standard",reason=""} 1.0'
    ]
