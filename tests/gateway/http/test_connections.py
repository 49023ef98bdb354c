"""One connection, many requests: answered in order, each whole, however its bytes were cut on the way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.access.keys import digest_of
from gateway.http.limits import Limits
from gateway.service import ServiceOptions
from priority.lanes import Tenant
from tests.few import examples
from tests.gateway.desk import MODEL, Desk, chat_body, make_tokenizer, serving
from tests.gateway.raw import dialled, get, post, read_events

pytestmark = pytest.mark.anyio

CHAT, TOKENIZE = "/v1/chat/completions", "/tokenize"
TOKENIZER = make_tokenizer()
HI_TOKENS = {"count": 3, "max_model_len": 512, "tokens": [0, 44, 77]}


def said(stream: bytes) -> str:
    """The text of a streamed chat."""
    *chunks, done = (event.data for event in read_events(stream))
    assert done == "[DONE]"
    return "".join(json.loads(chunk)["choices"][0]["delta"].get("content", "") for chunk in chunks)


async def test_pipelined_requests_are_answered_in_order() -> None:
    paths = ["/health", "/v1/nothing", "/v1/models", CHAT, "/ready"]
    async with serving(Desk().app) as url, dialled(url) as line:
        line.send(b"".join(get(path, f"x-request-id: r{number}") for number, path in enumerate(paths)))
        answers = [await line.answer() for _ in paths]
    assert [answer.headers["x-request-id"] for answer in answers] == ["r0", "r1", "r2", "r3", "r4"]
    assert [answer.status for answer in answers] == [200, 404, 200, 405, 200]


async def test_what_is_pipelined_behind_a_stream_waits_for_its_end() -> None:
    desk = Desk()
    async with serving(desk.app) as url, dialled(url) as line:
        line.send(post(CHAT, chat_body("one", stream=True)) + get("/health") + post(CHAT, chat_body("two")))
        first = await desk.taken()
        desk.bring(first, "Hel")
        status, _ = await line.head()
        begun = await line.chunk()
        assert status == 200
        assert b'"Hel"' in begun
        # Nothing of the others has begun: they would answer into the middle of the stream.
        assert sum(desk.queue.depths().values()) == 0
        desk.finish(first, "lo")
        assert said(begun + b"".join([chunk async for chunk in line.chunks()])) == "Hello"
        assert json.loads((await line.answer()).body) == {"status": "ok"}
        desk.answer(await desk.taken(), "second")
        assert json.loads((await line.answer()).body)["choices"][0]["message"]["content"] == "second"


async def test_a_connection_is_kept_whatever_was_answered_on_it() -> None:
    desk = Desk()
    async with serving(desk.app) as url, dialled(url) as line:
        for text in ("first", "again"):
            line.send(post(CHAT, chat_body(stream=True)))
            desk.answer(await desk.taken(), text)
            answer = await line.answer()
            assert said(answer.body) == text
            assert "connection" not in answer.headers
            for request, status in (
                (post(CHAT, chat_body(n=0)), 400),
                (post(CHAT, chat_body(model="other")), 404),
                (get(CHAT), 405),
                (get(CHAT, "content-length: 2", method="POST") + b"{}", 415),
                (post(TOKENIZE, {"prompt": "Hi"}), 200),
            ):
                line.send(request)
                assert (await line.answer()).status == status


async def test_the_connection_ends_after_a_stream_if_the_client_asked_for_it() -> None:
    desk = Desk()
    async with serving(desk.app) as url, dialled(url) as line:
        line.send(post(CHAT, chat_body(stream=True), "connection: close"))
        desk.answer(await desk.taken(), "one", " and only")
        answer = await line.answer()
        assert answer.headers["connection"] == "close"
        assert said(answer.body) == "one and only"
        assert await line.rest() == b""


async def test_a_client_of_http_1_0_gets_a_plain_whole_answer() -> None:
    desk = Desk()
    async with serving(desk.app) as url, dialled(url) as line:
        line.send(post(CHAT, chat_body()).replace(b"HTTP/1.1", b"HTTP/1.0"))
        desk.answer(await desk.taken(), "old ", "friend")
        answer = await line.answer()
        assert "transfer-encoding" not in answer.headers
        assert json.loads(answer.body)["choices"][0]["message"]["content"] == "old friend"
        assert await line.rest() == b""


async def test_a_client_that_asks_first_is_told_to_go_on() -> None:
    head, _, body = post(TOKENIZE, {"prompt": "Hi"}, "expect: 100-continue").partition(b"\r\n\r\n")
    async with serving(Desk().app) as url, dialled(url) as line:
        line.send(head + b"\r\n\r\n")
        assert (await line.answer()).status == 100
        line.send(body)
        answer = await line.answer()
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
    desk = Desk(ServiceOptions(models=(MODEL,), clients=keys, limits=Limits(max_body_bytes=1000)))
    async with serving(desk.app) as url, dialled(url) as line:
        line.send(
            get(CHAT, "expect: 100-continue", "content-type: application/json", *headers, method="POST")
        )
        assert (await line.answer()).status == status


async def test_too_many_headers_end_the_connection() -> None:
    async with serving(Desk().app) as url, dialled(url) as line:
        line.send(get("/health", f"x: {'y' * 32_700}", "z: " + "y" * 60))
        answer = await line.answer()
        assert (answer.status, answer.headers["connection"]) == (431, "close")
        assert answer.error["message"] == "The request's headers are too many or too long."
        assert await line.rest() == b""


async def test_a_body_that_was_refused_is_passed_over() -> None:
    """A client that is still sending it is not hung up on, or it might never read why."""
    size = 4 * 1024 * 1024 + 1
    async with serving(Desk().app) as url, dialled(url) as line:
        line.send(get(CHAT, f"content-length: {size}", "content-type: application/json", method="POST"))
        answer = await line.answer()
        assert answer.status == 413
        assert answer.error["message"] == "The request body is too large. It may have 4194304 bytes."
        line.send(b"x" * size + post(TOKENIZE, {"prompt": "Hi"}))
        assert json.loads((await line.answer()).body) == HI_TOKENS


async def test_a_request_that_trickles_in_is_answered_like_any_other() -> None:
    async with serving(Desk().app) as url, dialled(url) as line:
        for byte in post(TOKENIZE, {"prompt": "Hi"}):
            line.send(bytes([byte]))
            await asyncio.sleep(0)
        assert json.loads((await line.answer()).body) == HI_TOKENS


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
    async with serving(Desk(tokenizer=TOKENIZER).app) as url, dialled(url) as line:
        for piece in cut(request + request, cut_places):
            line.send(piece)
            await asyncio.sleep(0)
        counts = [json.loads((await line.answer()).body)["count"] for _ in range(2)]
    assert counts == [len(prompt.encode())] * 2


async def test_a_chunked_body_is_bounded_like_any_other() -> None:
    desk = Desk(ServiceOptions(models=(MODEL,), limits=Limits(max_body_bytes=1000)))
    head = get(CHAT, "content-type: application/json", "transfer-encoding: chunked", method="POST")
    async with serving(desk.app) as url, dialled(url) as line:
        line.send(head + chunked(b"x" * 1001, [1000]))
        answer = await line.answer()
        assert (answer.status, answer.error["code"]) == (413, "body_too_large")


async def test_connections_side_by_side_do_not_mix() -> None:
    desk = Desk()
    async with serving(desk.app) as url, dialled(url) as one, dialled(url) as other:
        one.send(post(CHAT, chat_body("one", stream=True)))
        first = await desk.taken()
        other.send(post(CHAT, chat_body("other", stream=True)))
        second = await desk.taken()
        for letter in "abc":
            desk.deliver(desk.output(second, letter.upper()), desk.output(first, letter))
        desk.finish(second)
        desk.finish(first)
        assert said((await one.answer()).body) == "abc"
        assert said((await other.answer()).body) == "ABC"
