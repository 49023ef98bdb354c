"""One connection, many requests: answered in order, each whole, however its bytes were cut on the way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gateway.access.keys import digest_of
from penstock.gateway.http.connections import WRITE
from penstock.gateway.limits import Limits
from penstock.gateway.service import ServiceOptions
from penstock.priority.lanes import Tenant
from tests.few import examples
from tests.gateway.harness import MODEL, Gateway, chat_body, make_tokenizer, serving
from tests.gateway.raw_http import connect, get, post, read_events

pytestmark = pytest.mark.anyio

CHAT, TOKENIZE = "/v1/chat/completions", "/tokenize"
TOKENIZER = make_tokenizer()
HI_TOKENS = {"count": 3, "max_model_len": 512, "tokens": [0, 44, 77]}


def said(stream: bytes) -> str:
    """The text of a streamed chat."""
    *chunks, done = (event.data for event in read_events(stream))
    assert done == "[DONE]"
    return "".join(json.loads(chunk)["choices"][0]["delta"].get("content", "") for chunk in chunks)


async def test_an_empty_piece_ends_no_body() -> None:
    """A chunk of no bytes would be the last one."""

    async def app(scope: Any, receive: Any, send: Any) -> None:  # noqa: ARG001
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for piece in (b"", b"some", b"", b"thing"):
            scope["extensions"][WRITE](piece)
        await send({"type": "http.response.body", "body": b""})

    async with serving(app) as url, connect(url) as connection:
        connection.send(get("/"))
        assert (await connection.answer()).body == b"something"


async def test_pipelined_requests_are_answered_in_order() -> None:
    paths = ["/health", "/v1/nothing", "/v1/models", TOKENIZE, "/ready"]
    async with serving(Gateway().app) as url, connect(url) as connection:
        connection.send(b"".join(get(path, f"x-request-id: r{number}") for number, path in enumerate(paths)))
        answers = [await connection.answer() for _ in paths]
    assert [answer.headers["x-request-id"] for answer in answers] == ["r0", "r1", "r2", "r3", "r4"]
    assert [answer.status for answer in answers] == [200, 404, 200, 405, 200]


async def test_what_is_pipelined_behind_a_stream_waits_for_its_end() -> None:
    gateway = Gateway()
    async with serving(gateway.app) as url, connect(url) as connection:
        connection.send(
            post(CHAT, chat_body("one", stream=True)) + get("/health") + post(CHAT, chat_body("two"))
        )
        first = await gateway.taken()
        gateway.bring(first, "Hel")
        status, _ = await connection.head()
        begun = await connection.chunk()
        assert status == 200
        assert b'"Hel"' in begun
        # Nothing of the others has begun: they would answer into the middle of the stream.
        assert sum(gateway.queue.depths().values()) == 0
        gateway.finish(first, "lo")
        assert said(begun + b"".join([chunk async for chunk in connection.chunks()])) == "Hello"
        assert json.loads((await connection.answer()).body) == {"status": "ok"}
        gateway.answer(await gateway.taken(), "second")
        assert json.loads((await connection.answer()).body)["choices"][0]["message"]["content"] == "second"


async def test_a_connection_is_kept_whatever_was_answered_on_it() -> None:
    gateway = Gateway()
    async with serving(gateway.app) as url, connect(url) as connection:
        for text in ("first", "again"):
            connection.send(post(CHAT, chat_body(stream=True)))
            gateway.answer(await gateway.taken(), text)
            answer = await connection.answer()
            assert said(answer.body) == text
            assert "connection" not in answer.headers
            for request, status in (
                (post(CHAT, chat_body(n=0)), 400),
                (post(CHAT, chat_body(model="other")), 404),
                (get(TOKENIZE), 405),
                (get(CHAT, "content-length: 2", method="POST") + b"{}", 415),
                (post(TOKENIZE, {"prompt": "Hi"}), 200),
            ):
                connection.send(request)
                assert (await connection.answer()).status == status


async def test_the_connection_ends_after_a_stream_if_the_client_asked_for_it() -> None:
    gateway = Gateway()
    async with serving(gateway.app) as url, connect(url) as connection:
        connection.send(post(CHAT, chat_body(stream=True), "connection: close"))
        gateway.answer(await gateway.taken(), "one", " and only")
        answer = await connection.answer()
        assert answer.headers["connection"] == "close"
        assert said(answer.body) == "one and only"
        assert await connection.rest() == b""


async def test_a_client_of_http_1_0_gets_a_plain_whole_answer() -> None:
    gateway = Gateway()
    async with serving(gateway.app) as url, connect(url) as connection:
        connection.send(post(CHAT, chat_body()).replace(b"HTTP/1.1", b"HTTP/1.0"))
        gateway.answer(await gateway.taken(), "old ", "friend")
        answer = await connection.answer()
        assert "transfer-encoding" not in answer.headers
        assert json.loads(answer.body)["choices"][0]["message"]["content"] == "old friend"
        assert await connection.rest() == b""


async def test_a_client_that_asks_first_is_told_to_go_on() -> None:
    head, _, body = post(TOKENIZE, {"prompt": "Hi"}, "expect: 100-continue").partition(b"\r\n\r\n")
    async with serving(Gateway().app) as url, connect(url) as connection:
        connection.send(head + b"\r\n\r\n")
        assert (await connection.answer()).status == 100
        connection.send(body)
        answer = await connection.answer()
    assert answer.status == 200
    assert json.loads(answer.body) == HI_TOKENS


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (["content-length: 1001", "authorization: Bearer the-key-of-ann"], 413),
        (["content-length: 9", "authorization: Bearer nobodys"], 401),
    ],
    ids=["too long", "no key"],
)
async def test_a_client_that_asks_first_is_refused_before_it_sends(headers: list[str], status: int) -> None:
    keys = {digest_of("the-key-of-ann"): Tenant(name="ann")}
    gateway = Gateway(ServiceOptions(models=(MODEL,), clients=keys, limits=Limits(max_body_bytes=1000)))
    async with serving(gateway.app) as url, connect(url) as connection:
        connection.send(
            get(CHAT, "expect: 100-continue", "content-type: application/json", *headers, method="POST")
        )
        assert (await connection.answer()).status == status


async def test_too_many_headers_end_the_connection() -> None:
    async with serving(Gateway().app) as url, connect(url) as connection:
        connection.send(get("/health", f"x: {'y' * 32_700}", "z: " + "y" * 60))
        answer = await connection.answer()
        assert (answer.status, answer.headers["connection"]) == (431, "close")
        assert answer.error["message"] == "The request's headers are too many or too long."
        assert await connection.rest() == b""


async def test_a_body_that_was_refused_is_passed_over() -> None:
    """A client that is still sending it is not hung up on, or it might never read why."""
    size = 4 * 1024 * 1024 + 1
    async with serving(Gateway().app) as url, connect(url) as connection:
        connection.send(get(CHAT, f"content-length: {size}", "content-type: application/json", method="POST"))
        answer = await connection.answer()
        assert answer.status == 413
        assert answer.error["message"] == "The request body is too large. It may have 4194304 bytes."
        connection.send(b"x" * size + post(TOKENIZE, {"prompt": "Hi"}))
        assert json.loads((await connection.answer()).body) == HI_TOKENS


async def test_a_request_that_trickles_in_is_answered_like_any_other() -> None:
    async with serving(Gateway().app) as url, connect(url) as connection:
        for byte in post(TOKENIZE, {"prompt": "Hi"}):
            connection.send(bytes([byte]))
            await asyncio.sleep(0)
        assert json.loads((await connection.answer()).body) == HI_TOKENS


def cut(data: bytes, places: Iterable[int]) -> list[bytes]:
    marks = [0, *sorted(place % len(data) for place in places), len(data)]
    return [data[start:end] for start, end in pairwise(marks)]


def chunked(content: bytes, places: Iterable[int]) -> bytes:
    """A body whose length nobody has said before."""
    pieces = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in cut(content, places) if piece]
    return b"".join(pieces) + b"0\r\n\r\n"


PLACES = st.lists(st.integers(0, 2000), max_size=12)


@settings(max_examples=examples(20))
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), PLACES, PLACES, st.booleans())
async def test_no_cut_changes_what_was_asked(
    prompt: str, chunk_places: list[int], cut_places: list[int], declared: bool
) -> None:
    body = {"prompt": prompt, "add_special_tokens": False}
    request = post(TOKENIZE, body)
    if not declared:
        content = json.dumps(body).encode()
        head = get(TOKENIZE, "content-type: application/json", "transfer-encoding: chunked", method="POST")
        request = head + chunked(content, chunk_places)
    # Two on one connection: the second shows that the end of the first was found.
    async with serving(Gateway(tokenizer=TOKENIZER).app) as url, connect(url) as connection:
        for piece in cut(request + request, cut_places):
            connection.send(piece)
            await asyncio.sleep(0)
        counts = [json.loads((await connection.answer()).body)["count"] for _ in range(2)]
    assert counts == [len(prompt.encode())] * 2


async def test_a_chunked_body_is_bounded_like_any_other() -> None:
    gateway = Gateway(ServiceOptions(models=(MODEL,), limits=Limits(max_body_bytes=1000)))
    head = get(CHAT, "content-type: application/json", "transfer-encoding: chunked", method="POST")
    async with serving(gateway.app) as url, connect(url) as connection:
        connection.send(head + chunked(b"x" * 1001, [1000]))
        answer = await connection.answer()
        assert (answer.status, answer.error["code"]) == (413, "body_too_large")


async def test_connections_side_by_side_do_not_mix() -> None:
    gateway = Gateway()
    async with serving(gateway.app) as url, connect(url) as one, connect(url) as other:
        one.send(post(CHAT, chat_body("one", stream=True)))
        first = await gateway.taken()
        other.send(post(CHAT, chat_body("other", stream=True)))
        second = await gateway.taken()
        for letter in "abc":
            gateway.deliver(gateway.output(second, letter.upper()), gateway.output(first, letter))
        gateway.finish(second)
        gateway.finish(first)
        assert said((await one.answer()).body) == "abc"
        assert said((await other.answer()).body) == "ABC"
