"""Clients that leave, readers that do not read, servers that end: every request ends once, and nothing stays behind."""

from __future__ import annotations

import asyncio
import json

import pytest
from starlette.types import Receive, Scope, Send

from penstock.engine.engine import EngineState
from penstock.gateway.http.connections import Timeouts
from penstock.gateway.http.protocol import GatewayProtocol
from penstock.gateway.reply.generation import Live
from penstock.gateway.service import ServiceOptions
from penstock.priority.lanes import Lane, LanePolicy
from tests.gateway.harness import MODEL, Gateway, chat_body, client, completion_body, events, serving, settled
from tests.gateway.raw_http import connect, post

pytestmark = pytest.mark.anyio

STREAMED = pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])


@STREAMED
async def test_a_queued_request_leaves_with_its_client(stream: bool) -> None:
    gateway = Gateway()
    async with serving(gateway.app) as url, connect(url) as caller:
        caller.send(post("/v1/chat/completions", chat_body(stream=stream)))
        await gateway.queued()
        caller.hang_up()
        await gateway.left()
    assert sum(gateway.queue.depths().values()) == 0
    assert gateway.engine.cancelled == []


@STREAMED
async def test_a_request_in_prefill_is_cancelled_with_its_client(stream: bool) -> None:
    gateway = Gateway()
    async with serving(gateway.app) as url, connect(url) as caller:
        caller.send(post("/v1/chat/completions", chat_body(stream=stream, n=2)))
        request = await gateway.taken()
        caller.hang_up()
        await gateway.left()
    assert gateway.engine.cancelled == [request.request_id]


@STREAMED
async def test_a_decoding_request_is_cancelled_with_its_client(stream: bool) -> None:
    gateway = Gateway()
    async with serving(gateway.app) as url, connect(url) as caller:
        caller.send(post("/v1/chat/completions", chat_body(stream=stream)))
        request = await gateway.taken()
        gateway.bring(request, "x")
        if stream:
            await caller.head()
            while b'"x"' not in await caller.chunk():
                pass
        caller.hang_up()
        await gateway.left()
        # What the engine still brings for it has no reader, and does no harm.
        gateway.bring(request, "y")
    assert gateway.engine.cancelled == [request.request_id]


async def test_all_prompts_of_a_body_leave_with_its_client() -> None:
    gateway = Gateway()
    async with serving(gateway.app) as url, connect(url) as caller:
        caller.send(post("/v1/completions", completion_body(["a", "b", "c"])))
        taken = await gateway.taken()
        await gateway.queued(2)
        caller.hang_up()
        await gateway.left()
    assert gateway.engine.cancelled == [taken.request_id]
    assert sum(gateway.queue.depths().values()) == 0


async def test_only_the_one_that_left_is_cancelled() -> None:
    gateway = Gateway()
    async with serving(gateway.app) as url, connect(url) as leaving, connect(url) as staying:
        leaving.send(post("/v1/chat/completions", chat_body("leaves")))
        first = await gateway.taken()
        staying.send(post("/v1/chat/completions", chat_body("stays", stream=True)))
        second = await gateway.taken()
        leaving.hang_up()
        while not gateway.engine.cancelled:
            await asyncio.sleep(0)
        assert gateway.engine.cancelled == [first.request_id]
        gateway.answer(second, "still here")
        assert b"still here" in (await staying.answer()).body


@STREAMED
async def test_nobody_waits_for_an_answer_whose_client_left(stream: bool) -> None:
    gateway, is_over = Gateway(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await gateway.app(scope, receive, send)
        if scope["type"] == "http":
            is_over.set()

    async with serving(app) as url, connect(url) as caller:
        caller.send(post("/v1/chat/completions", chat_body(stream=stream)))
        await gateway.queued()
        caller.hang_up()
        await asyncio.wait_for(is_over.wait(), 10)


async def test_a_refused_body_leaves_none_of_its_prompts_behind() -> None:
    bounds = {Lane.STANDARD: LanePolicy(max_requests=2, max_tokens=10**6, ttl_s=60)}
    gateway = Gateway(bounds=bounds)
    async with client(gateway.app) as http:
        response = await http.post("/v1/completions", json=completion_body(["a", "b", "c"]))
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "queue_full"
    assert int(response.headers["retry-after-ms"]) >= 1000
    assert sum(gateway.queue.depths().values()) == 0


@STREAMED
async def test_a_request_that_waited_too_long_is_refused(stream: bool) -> None:
    gateway = Gateway()
    async with client(gateway.app) as http:
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=chat_body(stream=stream)))
        await gateway.queued()
        gateway.service.tick(gateway.clock.now + 1.9)
        await settled()
        assert not asking.done()
        gateway.service.tick(gateway.clock.now + 301)
        response = await asking
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "queue_timeout"
    assert response.headers["retry-after"]


async def test_expiry_after_the_status_is_out_is_an_error_frame() -> None:
    gateway = Gateway()
    async with client(gateway.app) as http:
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=chat_body(stream=True)))
        await gateway.queued()
        gateway.service.tick(gateway.clock.now + 2)
        await settled()
        gateway.service.tick(gateway.clock.now + 301)
        response = await asking
    assert response.status_code == 200
    assert response.text.startswith(": ping\n")
    error, done = events(response.text)
    assert error["error"]["code"] == "queue_timeout"
    assert done == "[DONE]"


async def test_a_slow_reader_is_cut_when_too_much_is_waiting() -> None:
    gateway = Gateway()
    async with serving(gateway.app) as url, connect(url, narrow=True) as caller:
        caller.send(post("/v1/chat/completions", chat_body(stream=True)))
        request = await gateway.taken()
        piece = "x" * 65536
        for _ in range(200):
            gateway.bring(request, piece)
            await settled()
            if gateway.engine.cancelled:
                break
        await gateway.left()
        assert gateway.engine.cancelled == [request.request_id]
    assert b"penstock_slow_reader_disconnects_total 1.0" in gateway.service.render_metrics()


async def test_a_reader_that_stalls_is_cut_after_its_time() -> None:
    gateway = Gateway(ServiceOptions(models=(MODEL,), timeouts=Timeouts(tick_s=3600)))
    async with serving(gateway.app) as url, connect(url, narrow=True) as caller:
        caller.send(post("/v1/chat/completions", chat_body(stream=True)))
        request = await gateway.taken()
        (stream,) = gateway.service.dispatch._streams
        assert isinstance(stream, Live)
        while stream.connection.sending_since_s is None:
            gateway.bring(request, "x" * 65536)
            await settled()
        gateway.service.tick(gateway.clock.now + 29)
        assert gateway.engine.cancelled == []
        gateway.service.tick(gateway.clock.now + 31)
        await gateway.left()
        assert gateway.engine.cancelled == [request.request_id]


async def test_what_a_reader_did_not_take_is_joined() -> None:
    gateway = Gateway()
    async with client(gateway.app) as http:
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=chat_body(stream=True)))
        request = await gateway.taken()
        for text in "abcdef":
            gateway.bring(request, text)
        gateway.finish(request)
        chunks = events((await asking).text)
    assert [c["choices"][0]["delta"].get("content") for c in chunks[:-1]] == ["", "abcdef", None]


async def test_an_incomplete_character_sends_nothing() -> None:
    gateway = Gateway()
    async with client(gateway.app) as http:
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=chat_body(stream=True)))
        request = await gateway.taken()
        for _ in range(3):
            gateway.bring(request, "")
            await settled()
        gateway.finish(request, "é")
        response = await asking
    assert ": ping" not in response.text
    assert [c["choices"][0]["delta"].get("content") for c in events(response.text)[:-1]] == ["", "é", None]


async def test_draining_lets_streams_end_and_takes_no_more() -> None:
    gateway = Gateway()
    async with client(gateway.app) as http:
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=chat_body(stream=True)))
        request = await gateway.taken()
        gateway.service.begin_drain()
        assert not await gateway.service.dispatch.drained(0.01)
        refused = await http.post("/v1/chat/completions", json=chat_body())
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "server_shutting_down"
        assert refused.headers["connection"] == "close"
        assert refused.headers["retry-after"]
        assert (await http.get("/ready")).status_code == 503
        assert (await http.get("/ready")).json() == {"status": "draining"}
        assert (await http.get("/health")).status_code == 200
        gateway.answer(request, "to the ", "end")
        assert events((await asking).text)[-1] == "[DONE]"
    assert await gateway.service.dispatch.drained(1)


async def test_what_is_left_after_the_drain_gets_an_error() -> None:
    gateway = Gateway()
    async with client(gateway.app) as http:
        begun = asyncio.create_task(http.post("/v1/chat/completions", json=chat_body(stream=True)))
        request = await gateway.taken()
        gateway.bring(request, "begun")
        await settled()
        waiting = asyncio.create_task(http.post("/v1/chat/completions", json=chat_body()))
        await gateway.queued()
        gateway.service.begin_drain()
        gateway.service.dispatch.fail_all()
        await gateway.left()
        *_, error, done = events((await begun).text)
        assert error["error"]["code"] == "server_shutting_down"
        assert done == "[DONE]"
        assert (await waiting).status_code == 503
        assert (await waiting).json()["error"]["code"] == "server_shutting_down"
    assert gateway.engine.cancelled == [request.request_id]
    assert sum(gateway.queue.depths().values()) == 0


async def test_health_is_red_when_no_step_ends() -> None:
    gateway = Gateway()
    async with client(gateway.app) as http:
        gateway.clock.now += 29
        assert (await http.get("/health")).json() == {"status": "ok"}
        gateway.clock.now += 2
        stalled = await http.get("/health")
        assert (stalled.status_code, stalled.json()) == (503, {"status": "stalled"})
        assert (await http.get("/ready")).status_code == 503
        gateway.engine.last_progress_s = gateway.clock.now
        assert (await http.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("state", "health", "ready"),
    [
        (EngineState.STARTING, 200, "loading"),
        (EngineState.READY, 200, "ready"),
        (EngineState.FAILED, 503, "failed"),
        (EngineState.STOPPED, 503, "failed"),
    ],
)
async def test_health_and_readiness_follow_the_engine(state: EngineState, health: int, ready: str) -> None:
    gateway = Gateway()
    gateway.engine.state = state
    async with client(gateway.app) as http:
        assert (await http.get("/health")).status_code == health
        assert (await http.get("/ready")).json() == {"status": ready}
        assert (await http.get("/ready")).status_code == (200 if ready == "ready" else 503)
        if ready != "ready":
            refused = await http.post("/v1/chat/completions", json=chat_body())
            assert refused.status_code == 503
            assert refused.headers["retry-after"]


async def test_nobody_waits_for_an_engine_that_failed() -> None:
    gateway = Gateway()
    async with client(gateway.app) as http:
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=chat_body()))
        await gateway.queued()
        gateway.engine.state = EngineState.FAILED
        gateway.service.tick(gateway.clock.now)
        response = await asking
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_failed"
    assert sum(gateway.queue.depths().values()) == 0


class Impatient(GatewayProtocol):
    header_deadline_s = 0.05
    body_deadline_s = 0.05


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", b"408"),
        (b"GET / HTTP/1.1\r\nhost: x", b"408"),
        (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n"
            b"content-type: application/json\r\n\r\n{",
            b"408",
        ),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 40_000, b"431"),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 40_000 + b"\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 101 + b"\r\n", b"431"),
        (b"GET /" + b"x" * 40_000 + b" HTTP/1.1\r\n\r\n", b"431"),
        (b"what is this\r\n\r\n", b"400"),
    ],
)
async def test_the_socket_is_not_held_by_nonsense(sent: bytes, status: bytes) -> None:
    protocol = Impatient if status == b"408" else GatewayProtocol
    async with serving(Gateway().app, protocol) as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        reply = await asyncio.wait_for(reader.read(), 5)
        writer.close()
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 " + status)
    assert json.loads(body)["error"]["message"]
