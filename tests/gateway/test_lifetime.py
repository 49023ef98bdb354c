"""Clients that leave, readers that do not read, servers that end: every request ends once, and nothing stays behind."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from engine.engine import EngineState
from gateway.http.connections import Timeouts
from gateway.http.protocol import GatewayProtocol
from gateway.service import ServiceOptions
from gateway.wire.streams import MAX_PENDING_BYTES, Stream
from priority.lanes import Lane, LanePolicy
from tests.gateway.desk import MODEL, Desk, chat_body, client, completion_body, events, serving, settled

pytestmark = pytest.mark.anyio

STREAMED = pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])


class Caller:
    """A client on a real socket that says what it wants and reads when it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def post(cls, url: str, path: str, body: dict[str, Any], *, buffer: int | None = None) -> Caller:
        host, port = url.removeprefix("http://").split(":")
        connection = socket.create_connection((host, int(port)))
        if buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        reader, writer = await asyncio.open_connection(sock=connection, limit=2**16)
        caller = cls(reader, writer)
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
        writer.write(head.encode() + b"\r\n\r\n" + content)
        return caller

    def hang_up(self) -> None:
        """At once, as when a process is killed."""
        self.writer.transport.abort()


@STREAMED
async def test_a_queued_request_leaves_with_its_client(stream: bool) -> None:
    desk = Desk()
    async with serving(desk.app) as url:
        caller = await Caller.post(url, "/v1/chat/completions", chat_body(stream=stream))
        await desk.queued()
        caller.hang_up()
        await desk.left()
    assert sum(desk.queue.depths().values()) == 0
    assert desk.engine.cancelled == []


@STREAMED
async def test_a_request_in_prefill_is_cancelled_with_its_client(stream: bool) -> None:
    desk = Desk()
    async with serving(desk.app) as url:
        caller = await Caller.post(url, "/v1/chat/completions", chat_body(stream=stream, n=2))
        request = await desk.taken()
        caller.hang_up()
        await desk.left()
    assert desk.engine.cancelled == [request.request_id]


@STREAMED
async def test_a_decoding_request_is_cancelled_with_its_client(stream: bool) -> None:
    desk = Desk()
    async with serving(desk.app) as url:
        caller = await Caller.post(url, "/v1/chat/completions", chat_body(stream=stream))
        request = await desk.taken()
        desk.bring(request, "x")
        if stream:
            await caller.reader.readuntil(b'"x"')
        caller.hang_up()
        await desk.left()
        # What the engine still brings for it has no reader, and does no harm.
        desk.bring(request, "y")
    assert desk.engine.cancelled == [request.request_id]


async def test_all_prompts_of_a_body_leave_with_its_client() -> None:
    desk = Desk()
    async with serving(desk.app) as url:
        caller = await Caller.post(url, "/v1/completions", completion_body(["a", "b", "c"]))
        taken = await desk.taken()
        await desk.queued(2)
        caller.hang_up()
        await desk.left()
    assert desk.engine.cancelled == [taken.request_id]
    assert sum(desk.queue.depths().values()) == 0


async def test_only_the_one_that_left_is_cancelled() -> None:
    desk = Desk()
    async with serving(desk.app) as url:
        leaving = await Caller.post(url, "/v1/chat/completions", chat_body("leaves"))
        first = await desk.taken()
        staying = await Caller.post(url, "/v1/chat/completions", chat_body("stays", stream=True))
        second = await desk.taken()
        leaving.hang_up()
        while desk.engine.cancelled != [first.request_id]:
            await asyncio.sleep(0)
        desk.answer(second, "still here")
        assert b"still here" in await staying.reader.readuntil(b"[DONE]")
        staying.hang_up()


@STREAMED
async def test_nobody_waits_for_an_answer_whose_client_left(stream: bool) -> None:
    desk, is_over = Desk(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await desk.app(scope, receive, send)
        if scope["type"] == "http":
            is_over.set()

    async with serving(app) as url:
        caller = await Caller.post(url, "/v1/chat/completions", chat_body(stream=stream))
        await desk.queued()
        caller.hang_up()
        await asyncio.wait_for(is_over.wait(), 10)


async def test_a_refused_body_leaves_none_of_its_prompts_behind() -> None:
    bounds = {Lane.STANDARD: LanePolicy(max_requests=2, max_tokens=10**6, ttl_s=60)}
    desk = Desk(bounds=bounds)
    async with client(desk.app) as http:
        response = await http.post("/v1/completions", json=completion_body(["a", "b", "c"]))
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "queue_full"
    assert int(response.headers["retry-after-ms"]) >= 1000
    assert sum(desk.queue.depths().values()) == 0


@STREAMED
async def test_a_request_that_waited_too_long_is_refused(stream: bool) -> None:
    desk = Desk()
    async with client(desk.app) as http:
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=chat_body(stream=stream)))
        await desk.queued()
        desk.service.tick(desk.clock.now + 1.9)
        await settled()
        assert not asking.done()
        desk.service.tick(desk.clock.now + 301)
        response = await asking
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "queue_timeout"
    assert response.headers["retry-after"]


async def test_expiry_after_the_status_is_out_is_an_error_frame() -> None:
    desk = Desk()
    async with client(desk.app) as http:
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=chat_body(stream=True)))
        await desk.queued()
        desk.service.tick(desk.clock.now + 2)
        await settled()
        desk.service.tick(desk.clock.now + 301)
        response = await asking
    assert response.status_code == 200
    assert response.text.startswith(": ping\n")
    error, done = events(response.text)
    assert error["error"]["code"] == "queue_timeout"
    assert done == "[DONE]"


async def test_a_slow_reader_is_cut_when_too_much_is_waiting() -> None:
    desk = Desk()
    async with serving(desk.app) as url:
        caller = await Caller.post(url, "/v1/chat/completions", chat_body(stream=True), buffer=4096)
        request = await desk.taken()
        piece = "x" * 65536
        for _ in range(200):
            desk.bring(request, piece)
            await settled()
            if desk.engine.cancelled:
                break
        await desk.left()
        assert desk.engine.cancelled == [request.request_id]
        caller.hang_up()
    assert b"penstock_slow_reader_disconnects_total 1.0" in desk.service.render_metrics()
    assert MAX_PENDING_BYTES == 1024 * 1024


async def test_a_reader_that_stalls_is_cut_after_its_time() -> None:
    desk = Desk(ServiceOptions(models=(MODEL,), timeouts=Timeouts(tick_s=3600)))
    async with serving(desk.app) as url:
        caller = await Caller.post(url, "/v1/chat/completions", chat_body(stream=True), buffer=4096)
        request = await desk.taken()
        (stream,) = desk.service.dispatch._streams
        assert isinstance(stream, Stream)
        while stream.connection.sending_since_s is None:
            desk.bring(request, "x" * 65536)
            await settled()
        desk.service.tick(desk.clock.now + 29)
        assert desk.engine.cancelled == []
        desk.service.tick(desk.clock.now + 31)
        await desk.left()
        assert desk.engine.cancelled == [request.request_id]
        caller.hang_up()


async def test_what_a_reader_did_not_take_is_joined() -> None:
    desk = Desk()
    async with client(desk.app) as http:
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=chat_body(stream=True)))
        request = await desk.taken()
        for text in "abcdef":
            desk.bring(request, text)
        desk.finish(request)
        chunks = events((await asking).text)
    assert [c["choices"][0]["delta"].get("content") for c in chunks[:-1]] == ["", "abcdef", None]


async def test_an_incomplete_character_sends_nothing() -> None:
    desk = Desk()
    async with client(desk.app) as http:
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=chat_body(stream=True)))
        request = await desk.taken()
        for _ in range(3):
            desk.bring(request, "")
            await settled()
        desk.finish(request, "é")
        response = await asking
    assert ": ping" not in response.text
    assert [c["choices"][0]["delta"].get("content") for c in events(response.text)[:-1]] == ["", "é", None]


async def test_draining_lets_streams_end_and_takes_no_more() -> None:
    desk = Desk()
    async with client(desk.app) as http:
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=chat_body(stream=True)))
        request = await desk.taken()
        desk.service.begin_drain()
        assert not await desk.service.dispatch.drained(0.01)
        refused = await http.post("/v1/chat/completions", json=chat_body())
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "server_shutting_down"
        assert refused.headers["connection"] == "close"
        assert refused.headers["retry-after"]
        assert (await http.get("/ready")).status_code == 503
        assert (await http.get("/ready")).json() == {"status": "draining"}
        assert (await http.get("/health")).status_code == 200
        desk.answer(request, "to the ", "end")
        assert events((await asking).text)[-1] == "[DONE]"
    assert await desk.service.dispatch.drained(1)


async def test_what_is_left_after_the_drain_gets_an_error() -> None:
    desk = Desk()
    async with client(desk.app) as http:
        begun = asyncio.create_task(http.post("/v1/chat/completions", json=chat_body(stream=True)))
        request = await desk.taken()
        desk.bring(request, "begun")
        await settled()
        waiting = asyncio.create_task(http.post("/v1/chat/completions", json=chat_body()))
        await desk.queued()
        desk.service.begin_drain()
        desk.service.dispatch.fail_all()
        await desk.left()
        *_, error, done = events((await begun).text)
        assert error["error"]["code"] == "server_shutting_down"
        assert done == "[DONE]"
        assert (await waiting).status_code == 503
        assert (await waiting).json()["error"]["code"] == "server_shutting_down"
    assert desk.engine.cancelled == [request.request_id]
    assert sum(desk.queue.depths().values()) == 0


async def test_health_is_red_when_no_step_ends() -> None:
    desk = Desk()
    async with client(desk.app) as http:
        desk.clock.now += 29
        assert (await http.get("/health")).json() == {"status": "ok"}
        desk.clock.now += 2
        stalled = await http.get("/health")
        assert (stalled.status_code, stalled.json()) == (503, {"status": "stalled"})
        assert (await http.get("/ready")).status_code == 503
        desk.engine.last_progress_s = desk.clock.now
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
    desk = Desk()
    desk.engine.state = state
    async with client(desk.app) as http:
        assert (await http.get("/health")).status_code == health
        assert (await http.get("/ready")).json() == {"status": ready}
        assert (await http.get("/ready")).status_code == (200 if ready == "ready" else 503)
        if ready != "ready":
            refused = await http.post("/v1/chat/completions", json=chat_body())
            assert refused.status_code == 503
            assert refused.headers["retry-after"]


async def test_nobody_waits_for_an_engine_that_failed() -> None:
    desk = Desk()
    async with client(desk.app) as http:
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=chat_body()))
        await desk.queued()
        desk.engine.state = EngineState.FAILED
        desk.service.tick(desk.clock.now)
        response = await asking
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_failed"
    assert sum(desk.queue.depths().values()) == 0


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
    async with serving(Desk().app, protocol) as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        reply = await asyncio.wait_for(reader.read(), 5)
        writer.close()
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 " + status)
    assert json.loads(body)["error"]["message"]
