"""A request that the server failed over is exactly one record in the log, which names it as its client knows it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

from penstock.engine.engine import EngineState
from penstock.engine.planning.request import FinishReason, Request
from tests.gateway.harness import MODEL, Gateway, chat_body, client, completion_body, events, serving, settled
from tests.gateway.raw_http import Answer, connect, get, post

pytestmark = pytest.mark.anyio

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
NAMED = "x-request-id: mine-7"
WHY = "the model's output was not finite"
RESUMABLE: dict[str, Any] = {"stream": True, "stream_options": {"resumable": True}}
RESPONSE: dict[str, Any] = {"model": MODEL, "input": "Hi"}

REPLIES = [(CHAT, chat_body()), (COMPLETIONS, completion_body()), (RESPONSES, RESPONSE)]
STREAMS = [
    (CHAT, chat_body(stream=True)),
    (CHAT, chat_body(**RESUMABLE)),
    (COMPLETIONS, completion_body(stream=True)),
    (RESPONSES, {**RESPONSE, "stream": True}),
]


@pytest.fixture
def records(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """The messages that were logged, by us or by the server below."""

    def read() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]

    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "setLevel", lambda _: None)
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "propagate", True)
    caplog.set_level(logging.WARNING)
    caplog.set_level(logging.WARNING, "uvicorn")
    caplog.set_level(logging.WARNING, "uvicorn.error")
    return read


async def asked(
    gateway: Gateway, path: str, body: dict[str, Any], meanwhile: Callable[[Request], None]
) -> Answer:
    """The answer to one request over a socket, while the engine does something with it."""
    async with serving(gateway.app) as url, connect(url) as connection:
        connection.send(post(path, body, NAMED))
        meanwhile(await gateway.taken())
        return await connection.answer()


def fail(gateway: Gateway, request: Request) -> None:
    gateway.finish(request, reason=FinishReason.FAILED, error=WHY, token_ids=[])


@pytest.mark.parametrize(("path", "body"), REPLIES + STREAMS)
async def test_a_request_that_fails_in_the_engine_is_a_500_and_a_line(
    path: str, body: dict[str, Any], records: Callable[[], list[str]]
) -> None:
    gateway = Gateway()
    answer = await asked(gateway, path, body, lambda request: fail(gateway, request))
    assert (answer.status, answer.error["message"]) == (500, WHY)
    assert answer.headers["x-request-id"] == "mine-7"
    assert records() == [f"POST {path} failed: {WHY} (x-request-id mine-7)"]


@pytest.mark.parametrize(("path", "body"), STREAMS)
async def test_a_stream_that_fails_in_the_engine_ends_with_an_error_frame_and_is_a_line(
    path: str, body: dict[str, Any], records: Callable[[], list[str]]
) -> None:
    gateway = Gateway()
    async with serving(gateway.app) as url, connect(url) as connection:
        connection.send(post(path, body, NAMED))
        request = await gateway.taken()
        gateway.bring(request, "Hel")
        await connection.head()
        fail(gateway, request)
        rest = await connection.chunked()
    assert WHY.encode() in rest
    assert records() == [f"POST {path} failed: {WHY} (x-request-id mine-7)"]


async def test_a_choice_that_fails_among_others_is_one_line(records: Callable[[], list[str]]) -> None:
    gateway = Gateway()

    def fail_all(request: Request) -> None:
        for index in range(request.n):
            gateway.finish(request, "", index, FinishReason.FAILED, error=WHY, token_ids=[])

    answer = await asked(gateway, CHAT, chat_body(n=3), fail_all)
    assert answer.status == 500
    assert records() == [f"POST {CHAT} failed: {WHY} (x-request-id mine-7)"]


@pytest.mark.parametrize(("path", "body"), REPLIES)
async def test_an_exception_nobody_foresaw_is_a_500_and_one_record_with_the_trace(
    path: str, body: dict[str, Any], records: Callable[[], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    gateway = Gateway()

    def break_down(*_: object, **__: object) -> list[int]:
        raise RuntimeError("two\nlines")

    gateway.service.tokenizer.encode = break_down  # type: ignore[method-assign]
    async with serving(gateway.app) as url, connect(url) as connection:
        connection.send(post(path, body, NAMED))
        answer = await connection.answer()
        connection.send(get("/v1/models"))
        assert (await connection.answer()).status == 200, "the connection can be used again"
    assert (answer.status, answer.error["code"], answer.error["type"]) == (
        500,
        "internal_error",
        "server_error",
    )
    assert answer.headers["x-request-id"] == "mine-7"
    assert records() == [f"POST {path} failed: RuntimeError: two lines (x-request-id mine-7)"]
    assert "Traceback" in caplog.text
    assert json.loads(answer.body).keys() == {"error"}
    assert b"Traceback" not in answer.body
    assert b"two" not in answer.body, "what the exception says is for the log alone"


async def test_a_request_without_a_name_is_logged_by_the_one_it_was_given(
    records: Callable[[], list[str]],
) -> None:
    gateway = Gateway()
    async with client(gateway.app) as http:
        asking = asyncio.create_task(http.post(CHAT, json=chat_body()))
        fail(gateway, await gateway.taken())
        given = (await asking).headers["x-request-id"]
    assert records() == [f"POST {CHAT} failed: {WHY} (x-request-id {given})"]


async def test_requests_that_fail_together_are_told_apart(records: Callable[[], list[str]]) -> None:
    gateway = Gateway()
    async with client(gateway.app) as http:
        names = [f"name-{number}" for number in range(8)]
        asking = [
            asyncio.create_task(http.post(CHAT, json=chat_body(stream=True), headers={"x-request-id": name}))
            for name in names
        ]
        requests = [await gateway.taken() for _ in names]
        gateway.deliver(*(gateway.output(request, "Hel") for request in requests))
        await settled()
        for request in requests:
            fail(gateway, request)
        for answer in asking:
            *_, error, done = events((await answer).text)
            assert (error["error"]["message"], done) == (WHY, "[DONE]")
    assert sorted(records()) == [f"POST {CHAT} failed: {WHY} (x-request-id {name})" for name in names]


async def test_an_engine_that_stops_is_a_line_for_every_stream_it_leaves(
    records: Callable[[], list[str]],
) -> None:
    gateway = Gateway()
    async with serving(gateway.app) as url, connect(url) as connection:
        connection.send(post(CHAT, chat_body(stream=True), NAMED))
        gateway.bring(await gateway.taken(), "Hel")
        await connection.head()
        gateway.engine.state = EngineState.FAILED
        gateway.service.tick(gateway.clock())
        await connection.chunked()
    assert records() == [f"POST {CHAT} failed: The engine stopped. (x-request-id mine-7)"]


async def test_a_reply_that_fails_while_nobody_reads_it_is_a_line(records: Callable[[], list[str]]) -> None:
    gateway = Gateway()
    async with serving(gateway.app) as url, connect(url) as connection:
        connection.send(post(RESPONSES, {**RESPONSE, "background": True}))
        assert (await connection.answer()).status == 200
        request = await gateway.taken()
        fail(gateway, request)
        await gateway.left()
        await settled()
    assert records() == [f"the reply {request.request_id} failed, and nobody reads it: {WHY}"]


async def test_refusals_and_an_ordinary_end_are_no_lines(records: Callable[[], list[str]]) -> None:
    gateway = Gateway()
    async with serving(gateway.app) as url, connect(url) as connection:
        for wrong, status in (
            (post(CHAT, chat_body(n=0)), 400),
            (get("/nowhere"), 404),
            (get("/v1/messages"), 405),
            (get(f"{CHAT}/chatcmpl-{'0' * 32}"), 404),
        ):
            connection.send(wrong)
            assert (await connection.answer()).status == status
        connection.send(post(CHAT, chat_body(stream=True)))
        gateway.bring(await gateway.taken(), "Hel")
        assert (await connection.head())[0] == 200
        gateway.service.dispatch.fail_all()
        assert b"shutting down" in await connection.chunked()
        gateway.service.begin_drain()
        async with connect(url) as other:
            other.send(post(CHAT, chat_body()))
            assert (await other.answer()).status == 503
    assert records() == []


async def test_a_path_writes_no_lines_of_its_own(records: Callable[[], list[str]]) -> None:
    gateway = Gateway()
    gateway.service.access = None  # type: ignore[assignment]
    async with serving(gateway.app) as url, connect(url) as connection:
        connection.send(get(f"{CHAT}/x%0Aerror:%20all%20is%20lost%1B" + "y" * 1000, NAMED))
        assert (await connection.answer()).status == 500
    (message,) = records()
    assert message.startswith(f"GET {CHAT}/x%0Aerror%3A%20all%20is%20lost%1Byyy")
    assert "\n" not in message
    assert len(message) < 500
