"""A request that the server failed over is exactly one record in the log, which names it as its client knows it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from engine.engine import EngineState
from engine.planning.request import FinishReason, Request
from tests.gateway.desk import MODEL, Desk, chat_body, client, completion_body, events, serving, settled
from tests.gateway.raw import Answer, dialled, get, post

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


async def asked(desk: Desk, path: str, body: dict[str, Any], meanwhile: Callable[[Request], None]) -> Answer:
    """The answer to one request over a socket, while the engine does something with it."""
    async with serving(desk.app) as url, dialled(url) as line:
        line.send(post(path, body, NAMED))
        meanwhile(await desk.taken())
        return await line.answer()


def fail(desk: Desk, request: Request) -> None:
    desk.finish(request, reason=FinishReason.FAILED, error=WHY, token_ids=[])


@pytest.mark.parametrize(("path", "body"), REPLIES + STREAMS)
async def test_a_request_that_fails_in_the_engine_is_a_500_and_a_line(
    path: str, body: dict[str, Any], records: Callable[[], list[str]]
) -> None:
    desk = Desk()
    answer = await asked(desk, path, body, lambda request: fail(desk, request))
    assert answer.status == 500
    assert answer.headers["x-request-id"] == "mine-7"
    assert records() == [f"POST {path} failed: {WHY} (x-request-id mine-7)"]


@pytest.mark.parametrize(("path", "body"), STREAMS)
async def test_a_stream_that_fails_in_the_engine_ends_with_an_error_frame_and_is_a_line(
    path: str, body: dict[str, Any], records: Callable[[], list[str]]
) -> None:
    desk = Desk()
    async with serving(desk.app) as url, dialled(url) as line:
        line.send(post(path, body, NAMED))
        request = await desk.taken()
        desk.bring(request, "Hel")
        await line.head()
        fail(desk, request)
        rest = await line.chunked()
    assert WHY.encode() in rest
    assert records() == [f"POST {path} failed: {WHY} (x-request-id mine-7)"]


async def test_a_choice_that_fails_among_others_is_one_line(records: Callable[[], list[str]]) -> None:
    desk = Desk()

    def fail_all(request: Request) -> None:
        for index in range(request.n):
            desk.finish(request, "", index, FinishReason.FAILED, error=WHY, token_ids=[])

    answer = await asked(desk, CHAT, chat_body(n=3), fail_all)
    assert answer.status == 500
    assert records() == [f"POST {CHAT} failed: {WHY} (x-request-id mine-7)"]


@pytest.mark.parametrize(("path", "body"), REPLIES)
async def test_an_exception_nobody_foresaw_is_a_500_and_one_record_with_the_trace(
    path: str, body: dict[str, Any], records: Callable[[], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    desk = Desk()

    def break_down(*_: object, **__: object) -> list[int]:
        raise RuntimeError("two\nlines")

    desk.service.tokenizer.encode = break_down  # type: ignore[method-assign]
    async with serving(desk.app) as url, dialled(url) as line:
        line.send(post(path, body, NAMED))
        answer = await line.answer()
        line.send(get("/v1/models"))
        assert (await line.answer()).status == 200, "the connection can be used again"
    assert answer.status == 500
    assert answer.headers["x-request-id"] == "mine-7"
    assert records() == [f"POST {path} failed: RuntimeError: two lines (x-request-id mine-7)"]
    assert "Traceback" in caplog.text
    assert b"Traceback" not in answer.body


async def test_a_request_without_a_name_is_logged_by_the_one_it_was_given(
    records: Callable[[], list[str]],
) -> None:
    desk = Desk()
    async with client(desk.app) as http:
        asking = asyncio.create_task(http.post(CHAT, json=chat_body()))
        fail(desk, await desk.taken())
        given = (await asking).headers["x-request-id"]
    assert records() == [f"POST {CHAT} failed: {WHY} (x-request-id {given})"]


async def test_requests_that_fail_together_are_told_apart(records: Callable[[], list[str]]) -> None:
    desk = Desk()
    async with client(desk.app) as http:
        names = [f"name-{number}" for number in range(8)]
        asking = [
            asyncio.create_task(http.post(CHAT, json=chat_body(stream=True), headers={"x-request-id": name}))
            for name in names
        ]
        requests = [await desk.taken() for _ in names]
        desk.deliver(*(desk.output(request, "Hel") for request in requests))
        await settled()
        for request in requests:
            fail(desk, request)
        for answer in asking:
            *_, error, done = events((await answer).text)
            assert (error["error"]["message"], done) == (WHY, "[DONE]")
    assert sorted(records()) == [f"POST {CHAT} failed: {WHY} (x-request-id {name})" for name in names]


async def test_an_engine_that_stops_is_a_line_for_every_stream_it_leaves(
    records: Callable[[], list[str]],
) -> None:
    desk = Desk()
    async with serving(desk.app) as url, dialled(url) as line:
        line.send(post(CHAT, chat_body(stream=True), NAMED))
        desk.bring(await desk.taken(), "Hel")
        await line.head()
        desk.engine.state = EngineState.FAILED
        desk.service.tick(desk.clock())
        await line.chunked()
    assert records() == [f"POST {CHAT} failed: The engine stopped. (x-request-id mine-7)"]


async def test_a_reply_that_fails_while_nobody_reads_it_is_a_line(records: Callable[[], list[str]]) -> None:
    desk = Desk()
    async with serving(desk.app) as url, dialled(url) as line:
        line.send(post(RESPONSES, {**RESPONSE, "background": True}))
        assert (await line.answer()).status == 200
        request = await desk.taken()
        fail(desk, request)
        await desk.left()
        await settled()
    assert records() == [f"the reply {request.request_id} failed, and nobody reads it: {WHY}"]


async def test_refusals_and_an_ordinary_end_are_no_lines(records: Callable[[], list[str]]) -> None:
    desk = Desk()
    async with serving(desk.app) as url, dialled(url) as line:
        for wrong, status in (
            (post(CHAT, chat_body(n=0)), 400),
            (get("/nowhere"), 404),
            (get(CHAT), 405),
            (get(f"{CHAT}/chatcmpl-{'0' * 32}"), 404),
        ):
            line.send(wrong)
            assert (await line.answer()).status == status
        line.send(post(CHAT, chat_body(stream=True)))
        desk.bring(await desk.taken(), "Hel")
        assert (await line.head())[0] == 200
        desk.service.dispatch.fail_all()
        assert b"shutting down" in await line.chunked()
        desk.service.begin_drain()
        async with dialled(url) as other:
            other.send(post(CHAT, chat_body()))
            assert (await other.answer()).status == 503
    assert records() == []


async def test_a_path_writes_no_lines_of_its_own(records: Callable[[], list[str]]) -> None:
    desk = Desk()
    desk.service.access = None  # type: ignore[assignment]
    async with serving(desk.app) as url, dialled(url) as line:
        line.send(get(f"{CHAT}/x%0Aerror:%20all%20is%20lost%1B" + "y" * 1000, NAMED))
        assert (await line.answer()).status == 500
    (message,) = records()
    assert message.startswith(f"GET {CHAT}/x%0Aerror%3A%20all%20is%20lost%1Byyy")
    assert "\n" not in message
    assert len(message) < 500
