"""One request through a switch: replicas that refuse, die, or stall, and clients that leave or do not read."""

from __future__ import annotations

import asyncio
import contextlib

import httpx
import pytest

from penstock.cluster.position import Position
from penstock.cluster.relay import last_words
from penstock.cluster.upstream import Address
from penstock.gateway.http.connections import Timeouts
from penstock.gateway.wire.frames import DONE, KEEPALIVE
from tests.cluster.scripted_replicas import PATIENCE_S, Call, FixedPicker, RelayApp, Script, replica, serving
from tests.cluster.test_position import CHAT, CHAT_ID, chat_event

pytestmark = pytest.mark.anyio

OLLAMA = "/api/chat"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def whole(call: Call) -> None:
    call.reply()
    call.end(b"data: 1\n\n", b"data: 2\n\n", DONE)


async def busy(call: Call) -> None:
    call.refuse(503)


async def busy_with_429(call: Call) -> None:
    call.reply(429, "application/json", "x-llm-d-request-dropped-reason: rejected-saturated")
    call.end(b'{"error":{"code":"mine"}}')


async def limiting(call: Call) -> None:
    call.refuse(429)


async def dead(call: Call) -> None:
    await call.cut()


async def asked(app: RelayApp, path: str = CHAT) -> httpx.Response:
    """The reply to a POST, read to its end."""
    async with serving(app) as address, httpx.AsyncClient(timeout=PATIENCE_S) as http:
        return await http.post(f"{address}{path}", content=b"{}")


async def relayed(
    *scripts: Script, path: str = CHAT, position: bool = False
) -> tuple[httpx.Response, RelayApp]:
    async with contextlib.AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(replica(script)) for script in scripts]
        app = RelayApp(FixedPicker(*addresses), position=(lambda: Position(path)) if position else None)
        return await asked(app, path), app


async def test_a_stream_comes_through_as_it_is_and_headers_of_one_connection_do_not() -> None:
    async def script(call: Call) -> None:
        assert call.head.startswith(f"POST {CHAT} HTTP/1.1\r\n")
        call.reply(
            200, "text/event-stream", "date: then", "Keep-Alive: timeout=5", "connection: close", "x-own: 1"
        )
        call.end(b"data: 1\n\n", DONE)

    reply, _ = await relayed(script)
    assert reply.status_code == 200
    assert reply.content == b"data: 1\n\n" + DONE
    assert reply.headers["x-own"] == "1"
    assert reply.headers["x-penstock-replica"] == "r0"
    assert len(reply.headers.get_list("date")) == 1
    assert reply.headers["date"] != "then"
    assert not {"keep-alive", "connection"} & reply.headers.keys()


@pytest.mark.parametrize("first", [busy, busy_with_429, dead])
async def test_who_refuses_or_dies_before_the_first_byte_is_passed_over(first: Script) -> None:
    reply, _ = await relayed(first, whole)
    assert (reply.status_code, reply.headers["x-penstock-replica"]) == (200, "r1")


async def test_after_two_refusals_the_second_is_the_answer() -> None:
    reply, _ = await relayed(busy, busy, whole)
    assert (reply.status_code, reply.headers["x-penstock-replica"]) == (503, "r1")
    assert reply.json() == {"error": {"code": "mine"}}


async def test_the_only_replica_is_heard_when_it_refuses() -> None:
    reply, _ = await relayed(busy)
    assert reply.json() == {"error": {"code": "mine"}}


async def test_a_tenants_own_limit_is_the_answer_and_no_other_replica_is_asked() -> None:
    reply, _ = await relayed(limiting, whole)
    assert (reply.status_code, reply.headers["x-penstock-replica"]) == (429, "r0")


async def test_all_dead_is_told_as_an_error() -> None:
    reply, _ = await relayed(dead, dead)
    assert reply.status_code == 503
    assert reply.json()["error"]["code"] == "replica_lost"


async def test_what_begins_with_nothing_but_comments_is_asked_for_elsewhere() -> None:
    async def begins(call: Call) -> None:
        call.reply()
        call.send(KEEPALIVE)
        await call.cut()

    reply, _ = await relayed(begins, whole)
    assert reply.content == KEEPALIVE + b"data: 1\n\ndata: 2\n\n" + DONE


async def half(call: Call) -> None:
    call.reply()
    call.send(chat_event(0), chat_event(1), chat_event(2)[:9])
    await call.cut()


async def dies(call: Call) -> None:
    """Over the first request; then nobody is there."""
    await (half(call) if call.target == CHAT else call.cut())


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/messages", "/v1/responses", OLLAMA])
async def test_a_stream_that_nobody_can_go_on_with_ends_in_words(path: str) -> None:
    reply, app = await relayed(half, whole, path=path)
    assert reply.content == chat_event(0) + chat_event(1) + chat_event(2)[:9] + last_words(path)
    assert b"was lost" in reply.content
    assert app.metrics.broken.value == 1


async def test_half_a_reply_in_one_piece_is_cut() -> None:
    async def script(call: Call) -> None:
        call.reply(200, "application/json")
        call.send(b'{"half":')
        await call.cut()

    with pytest.raises(httpx.RemoteProtocolError):
        await relayed(script, whole)


async def test_a_recorded_stream_goes_on_after_its_last_whole_event_at_whoever_takes_it_over() -> None:
    asked_for: list[str] = []
    refusals = iter([404, 503])

    async def successor(call: Call) -> None:
        asked_for.append(call.target)
        if (status := next(refusals, None)) is not None:
            call.refuse(status)
            return
        call.reply()
        call.end(chat_event(2), chat_event(3), DONE)

    reply, app = await relayed(dies, successor, position=True)
    assert reply.content == b"".join(map(chat_event, range(4))) + DONE
    assert asked_for == 3 * [f"{CHAT}/{CHAT_ID}?stream=true&starting_after=1"]
    assert app.metrics.mended.value == 1


async def test_a_stream_that_is_mended_may_break_again_and_a_drain_is_no_end() -> None:
    async def script(call: Call) -> None:
        call.reply()
        if call.target == CHAT:
            call.send(chat_event(0))
            call.end(b'data: {"error": {"code": "server_shutting_down"}}\n\n' + DONE)
        elif call.target.endswith("=0"):
            call.send(chat_event(1)[:5])
            await call.cut()
        else:
            raise AssertionError(call.target)

    async def successor(call: Call) -> None:
        call.reply()
        call.end(chat_event(1), DONE)

    reply, _ = await relayed(script, successor, position=True)
    assert reply.content == chat_event(0) + chat_event(1) + DONE


async def test_who_waits_for_another_replica_is_kept_company() -> None:
    is_heard = asyncio.Event()

    async def successor(call: Call) -> None:
        if not is_heard.is_set():
            call.refuse(404)
            return
        call.reply()
        call.end(chat_event(2), DONE)

    async with replica(dies) as first, replica(successor) as second:
        app = RelayApp(FixedPicker(first, second), position=lambda: Position(CHAT))
        app.timeouts = Timeouts(keepalive_s=0.05)
        async with (
            serving(app) as address,
            httpx.AsyncClient(timeout=PATIENCE_S) as http,
            http.stream("POST", f"{address}{CHAT}", content=b"{}") as reply,
        ):
            body = b""
            async for piece in reply.aiter_raw():
                body += piece
                if KEEPALIVE in body:
                    is_heard.set()
    assert body.replace(KEEPALIVE, b"") == b"".join(map(chat_event, range(3))) + DONE


async def test_a_stream_that_falls_silent_is_given_up() -> None:
    async def stalls(call: Call) -> None:
        call.reply()
        call.send(chat_event(0))
        await call.left()

    async with replica(stalls) as address:
        app = RelayApp(FixedPicker(address))
        app.stall_s = 0.05
        reply = await asked(app)
    assert reply.content == chat_event(0) + last_words(CHAT)


async def test_a_silent_stream_of_a_replica_that_is_lost_is_given_up_sooner() -> None:
    async def stalls(call: Call) -> None:
        call.reply()
        call.send(chat_event(0))
        app.picker.lost.add("r0")
        await call.left()

    async with replica(stalls) as address:
        app = RelayApp(FixedPicker(address))
        app.lost_s = 0.05
        reply = await asked(app)
    assert reply.content == chat_event(0) + last_words(CHAT)


async def test_a_whole_reply_may_take_long_unless_the_replica_is_lost() -> None:
    async def stalls(call: Call) -> None:
        app.picker.lost.add("r0")
        await call.left()

    async with replica(stalls) as first, replica(whole) as second:
        app = RelayApp(FixedPicker(first, second))
        app.stall_s = app.lost_s = 0.05
        reply = await asked(app)
    assert reply.headers["x-penstock-replica"] == "r1"


async def test_a_client_that_leaves_is_gone_at_the_replica_too() -> None:
    is_left = asyncio.Event()

    async def script(call: Call) -> None:
        call.reply()
        call.send(b"data: 1\n\n")
        await call.left()
        is_left.set()

    async with replica(script) as upstream, serving(RelayApp(FixedPicker(upstream))) as address:
        async with httpx.AsyncClient() as http, http.stream("POST", f"{address}{CHAT}") as reply:
            await anext(reply.aiter_raw())
        await asyncio.wait_for(is_left.wait(), PATIENCE_S)


async def test_a_client_that_does_not_read_holds_the_replica_back_and_then_gets_every_byte() -> None:
    piece, most = b"x" * 65_536, 64 * 1024 * 1024
    num_sent, is_held = 0, asyncio.Event()

    async def script(call: Call) -> None:
        nonlocal num_sent
        call.reply()
        while num_sent < most:
            call.send(piece)
            num_sent += len(piece)
            try:
                await asyncio.wait_for(call.writer.drain(), 0.5)
            except TimeoutError:
                is_held.set()
                break
        call.end()

    async with replica(script) as upstream, serving(RelayApp(FixedPicker(upstream))) as address:
        reader, writer = await asyncio.open_connection(address.host, address.port, limit=1024)
        writer.write(
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode()
        )
        await asyncio.wait_for(is_held.wait(), PATIENCE_S)
        assert num_sent < most
        body = await asyncio.wait_for(reader.read(), PATIENCE_S)
        assert body.count(b"x" * 1024) >= num_sent // 1024 - 64
        assert body.endswith(b"0\r\n\r\n")
        writer.close()


async def test_what_only_one_replica_has_is_asked_for_until_somebody_knows_it() -> None:
    async def unknown(call: Call) -> None:
        call.refuse(404)

    async with replica(unknown) as first, replica(whole) as second:
        known = await asked(RelayApp(FixedPicker(first, second), id=CHAT_ID), f"{CHAT}/{CHAT_ID}")
        nowhere = await asked(RelayApp(FixedPicker(first, first), id=CHAT_ID), f"{CHAT}/{CHAT_ID}")
    assert (known.status_code, nowhere.status_code) == (200, 404)


async def test_a_connection_refused_is_a_replica_that_died() -> None:
    async with replica(whole) as alive:
        reply = await asked(RelayApp(FixedPicker(Address("127.0.0.1", 1), alive)))
    assert reply.headers["x-penstock-replica"] == "r1"
