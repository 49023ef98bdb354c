"""What goes wrong behind a stream on the same connection leaves the stream alone."""

from __future__ import annotations

import json

import pytest

from tests.gateway.harness import Gateway, chat_body, serving, settled
from tests.gateway.in_memory_connection import InMemoryConnection
from tests.gateway.raw_http import connect, get, post, read_events

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"


async def whole_stream(gateway: Gateway, connection: InMemoryConnection, behind: bytes) -> bytes:
    """A stream that gets a token before and one long after the client sends something behind it; all that came."""
    await connection.send(post(CHAT, chat_body(stream=True)))
    request = await gateway.taken()
    gateway.bring(request, "Hel")
    await settled()
    await connection.send(behind)
    connection.loop.pass_s(86_400)
    gateway.finish(request, "lo")
    await settled()
    return connection.body()


def text_of(stream: bytes) -> str:
    *chunks, done = (event.data for event in read_events(stream))
    assert done == "[DONE]"
    return "".join(json.loads(chunk)["choices"][0]["delta"].get("content", "") for chunk in chunks)


@pytest.mark.parametrize(
    "behind",
    [
        b"garbage\r\n\r\n",
        get("/health") + b"\x00\x01 nonsense\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost",
        get(CHAT, "content-length: 100", "content-type: application/json", method="POST") + b"{",
    ],
    ids=["garbage", "garbage after a request", "half a header", "half a body"],
)
async def test_a_stream_ends_whole_whatever_comes_behind_it(behind: bytes) -> None:
    gateway = Gateway()
    assert text_of(await whole_stream(gateway, InMemoryConnection(gateway), behind)) == "Hello"


async def test_after_garbage_behind_a_stream_the_connection_ends_with_it() -> None:
    gateway = Gateway()
    connection = InMemoryConnection(gateway)
    await whole_stream(gateway, connection, b"garbage\r\n\r\n")
    assert connection.transport.written.endswith(b"0\r\n\r\n")
    assert connection.transport.closed


async def test_a_hang_up_behind_a_pipelined_request_cancels_the_stream() -> None:
    gateway = Gateway()
    async with serving(gateway.app) as url, connect(url) as connection:
        connection.send(post(CHAT, chat_body(stream=True)) + get("/health"))
        request = await gateway.taken()
        gateway.bring(request, "Hel")
        await connection.head()
        connection.hang_up()
        await gateway.left()
        assert gateway.engine.cancelled == [request.request_id]


async def test_an_upgrade_to_what_is_no_http_is_refused() -> None:
    async with serving(Gateway().app) as url, connect(url) as connection:
        connection.send(get("/health"))
        assert (await connection.answer()).status == 200
        connection.send(get("/", "connection: Upgrade", "Upgrade: websocket", "sec-websocket-version: 13"))
        refused = await connection.answer()
        assert (refused.status, refused.error["code"]) == (400, "upgrade_not_supported")
        assert await connection.rest() == b""


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_an_offer_to_speak_http_2_is_passed_over(size: int) -> None:
    """Java's HttpClient makes it with every request, bodies included; what it pipelines behind it is answered, too."""
    offer = ("connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "http2-settings: AAMAAABkAAQAAP__")
    asked = post("/tokenize", {"prompt": "Hi"}, *offer) + get("/health", *offer) + get("/ready")
    async with serving(Gateway().app) as url, connect(url) as connection:
        for start in range(0, len(asked), size):
            connection.send(asked[start : start + size])
        answers = [await connection.answer() for _ in range(3)]
    assert [answer.status for answer in answers] == [200, 200, 200]
    assert json.loads(answers[0].body)["count"] == 3
    assert json.loads(answers[2].body) == {"status": "ready"}
