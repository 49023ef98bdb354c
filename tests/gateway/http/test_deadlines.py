"""How long a request may take to arrive, to the second, on a clock that the test turns."""

from __future__ import annotations

import pytest

from tests.gateway.desk import Desk, chat_body, settled
from tests.gateway.plug import BODY_S, HEADER_S, KEEP_ALIVE_S, Plug
from tests.gateway.raw import get, post

pytestmark = pytest.mark.anyio

CHAT, TOKENIZE = "/v1/chat/completions", "/tokenize"


async def test_a_connection_that_says_nothing_is_let_go_after_the_headers_time() -> None:
    plug = Plug(Desk())
    plug.loop.pass_s(HEADER_S - 1)
    assert (plug.status(), plug.wire.closed) == (None, False)
    plug.loop.pass_s(1)
    assert (plug.status(), plug.wire.closed) == (408, True)
    assert b'"request_timeout"' in plug.wire.written


async def test_a_header_has_its_time_from_its_first_byte() -> None:
    plug = Plug(Desk())
    plug.loop.pass_s(HEADER_S - 1)
    await plug.send(get("/health")[:-2])
    plug.loop.pass_s(HEADER_S - 1)
    await plug.send(b"\r\n")
    assert plug.status() == 200


async def test_headers_that_trickle_do_not_buy_time() -> None:
    plug = Plug(Desk())
    for byte in get("/health")[:HEADER_S]:
        assert plug.status() is None
        await plug.send(bytes([byte]))
        plug.loop.pass_s(1)
    assert (plug.status(), plug.wire.closed) == (408, True)


async def test_a_body_that_trickles_does_not_buy_time() -> None:
    plug = Plug(Desk())
    head, _, body = post(CHAT, chat_body()).partition(b"\r\n\r\n")
    await plug.send(head + b"\r\n\r\n")
    for byte in body[:BODY_S]:
        assert plug.status() is None
        await plug.send(bytes([byte]))
        plug.loop.pass_s(1)
    assert (plug.status(), plug.wire.closed) == (408, True)


async def test_a_body_has_its_own_time() -> None:
    """However late its header came."""
    plug = Plug(Desk())
    head, _, body = post(TOKENIZE, {"prompt": "Hi"}).partition(b"\r\n\r\n")
    await plug.send(head)
    plug.loop.pass_s(HEADER_S - 1)
    await plug.send(b"\r\n\r\n")
    plug.loop.pass_s(BODY_S - 1)
    await plug.send(body)
    assert plug.status() == 200


async def test_an_answer_may_take_as_long_as_it_takes() -> None:
    desk = Desk()
    plug = Plug(desk)
    await plug.send(post(CHAT, chat_body()))
    request = await desk.taken()
    plug.loop.pass_s(86_400)
    assert (plug.status(), plug.wire.closed) == (None, False)
    desk.answer(request, "at last")
    await settled()
    assert plug.status() == 200
    assert b"at last" in plug.wire.written
    plug.hang_up()


async def test_a_kept_connection_is_closed_without_a_word() -> None:
    plug = Plug(Desk())
    await plug.send(get("/health"))
    answer = plug.wire.written
    plug.loop.pass_s(KEEP_ALIVE_S - 1)
    assert not plug.wire.closed
    plug.loop.pass_s(1)
    assert plug.wire.closed
    assert plug.wire.written == answer


async def test_a_kept_connection_that_trickles_is_let_go() -> None:
    plug = Plug(Desk())
    await plug.send(get("/health"))
    answer = plug.wire.written
    await plug.send(b"\r\n")  # stops uvicorn's own timer, and begins nothing
    plug.loop.pass_s(HEADER_S)
    assert plug.wire.written.removeprefix(answer).startswith(b"HTTP/1.1 408 ")
    assert plug.wire.closed


async def test_every_request_on_a_kept_connection_has_the_whole_time() -> None:
    plug = Plug(Desk())
    for _ in range(5):
        await plug.send(get("/health")[:-2])
        plug.loop.pass_s(HEADER_S - 1)
        await plug.send(b"\r\n")
        plug.loop.pass_s(KEEP_ALIVE_S - 1)
    assert plug.wire.written.count(b"HTTP/1.1 200 OK\r\n") == 5
    assert not plug.wire.closed


async def test_a_client_that_went_away_leaves_no_timer_behind() -> None:
    for sent in (get("/health")[:9], post(CHAT, chat_body())[:-1], get("/health")):
        plug = Plug(Desk())
        await plug.send(sent)
        plug.hang_up()
        await settled()
        assert all(timer.cancelled for timer in plug.loop.timers)
