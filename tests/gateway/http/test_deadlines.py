"""How long a request may take to arrive, to the second, on a clock that the test turns."""

from __future__ import annotations

import pytest

from tests.gateway.harness import Gateway, chat_body, settled
from tests.gateway.in_memory_connection import BODY_S, HEADER_S, KEEP_ALIVE_S, InMemoryConnection
from tests.gateway.raw_http import get, post

pytestmark = pytest.mark.anyio

CHAT, TOKENIZE = "/v1/chat/completions", "/tokenize"


async def test_a_connection_that_says_nothing_is_let_go_after_the_headers_time() -> None:
    connection = InMemoryConnection(Gateway())
    connection.loop.pass_s(HEADER_S - 1)
    assert (connection.status(), connection.transport.closed) == (None, False)
    connection.loop.pass_s(1)
    assert (connection.status(), connection.transport.closed) == (408, True)
    assert b'"request_timeout"' in connection.transport.written


async def test_a_header_has_its_time_from_its_first_byte() -> None:
    connection = InMemoryConnection(Gateway())
    connection.loop.pass_s(HEADER_S - 1)
    await connection.send(get("/health")[:-2])
    connection.loop.pass_s(HEADER_S - 1)
    await connection.send(b"\r\n")
    assert connection.status() == 200


async def test_headers_that_trickle_do_not_buy_time() -> None:
    connection = InMemoryConnection(Gateway())
    for byte in get("/health")[:HEADER_S]:
        assert connection.status() is None
        await connection.send(bytes([byte]))
        connection.loop.pass_s(1)
    assert (connection.status(), connection.transport.closed) == (408, True)


async def test_a_body_that_trickles_does_not_buy_time() -> None:
    connection = InMemoryConnection(Gateway())
    head, _, body = post(CHAT, chat_body()).partition(b"\r\n\r\n")
    await connection.send(head + b"\r\n\r\n")
    for byte in body[:BODY_S]:
        assert connection.status() is None
        await connection.send(bytes([byte]))
        connection.loop.pass_s(1)
    assert (connection.status(), connection.transport.closed) == (408, True)


async def test_a_body_has_its_own_time() -> None:
    """However late its header came."""
    connection = InMemoryConnection(Gateway())
    head, _, body = post(TOKENIZE, {"prompt": "Hi"}).partition(b"\r\n\r\n")
    await connection.send(head)
    connection.loop.pass_s(HEADER_S - 1)
    await connection.send(b"\r\n\r\n")
    connection.loop.pass_s(BODY_S - 1)
    await connection.send(body)
    assert connection.status() == 200


async def test_an_answer_may_take_as_long_as_it_takes() -> None:
    gateway = Gateway()
    connection = InMemoryConnection(gateway)
    await connection.send(post(CHAT, chat_body()))
    request = await gateway.taken()
    connection.loop.pass_s(86_400)
    assert (connection.status(), connection.transport.closed) == (None, False)
    gateway.answer(request, "at last")
    await settled()
    assert connection.status() == 200
    assert b"at last" in connection.transport.written
    connection.hang_up()


async def test_a_kept_connection_is_closed_without_a_word() -> None:
    connection = InMemoryConnection(Gateway())
    await connection.send(get("/health"))
    answer = connection.transport.written
    connection.loop.pass_s(KEEP_ALIVE_S - 1)
    assert not connection.transport.closed
    connection.loop.pass_s(1)
    assert connection.transport.closed
    assert connection.transport.written == answer


async def test_a_kept_connection_that_trickles_is_let_go() -> None:
    connection = InMemoryConnection(Gateway())
    await connection.send(get("/health"))
    answer = connection.transport.written
    await connection.send(b"\r\n")  # stops uvicorn's own timer, and begins nothing
    connection.loop.pass_s(HEADER_S)
    assert connection.transport.written.removeprefix(answer).startswith(b"HTTP/1.1 408 ")
    assert connection.transport.closed


async def test_every_request_on_a_kept_connection_has_the_whole_time() -> None:
    connection = InMemoryConnection(Gateway())
    for _ in range(5):
        await connection.send(get("/health")[:-2])
        connection.loop.pass_s(HEADER_S - 1)
        await connection.send(b"\r\n")
        connection.loop.pass_s(KEEP_ALIVE_S - 1)
    assert connection.transport.written.count(b"HTTP/1.1 200 OK\r\n") == 5
    assert not connection.transport.closed


async def test_a_client_that_went_away_leaves_no_timer_behind() -> None:
    for sent in (get("/health")[:9], post(CHAT, chat_body())[:-1], get("/health")):
        connection = InMemoryConnection(Gateway())
        await connection.send(sent)
        connection.hang_up()
        await settled()
        assert all(timer.cancelled for timer in connection.loop.timers)
