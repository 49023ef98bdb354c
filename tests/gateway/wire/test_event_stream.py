"""The stream as bytes on a socket, read by a parser that knows the standard and not the gateway."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from penstock.engine.planning.request import FinishReason, Request
from penstock.gateway.http.connections import Timeouts
from penstock.gateway.service import ServiceOptions
from tests.gateway.harness import MODEL, Gateway, chat_body, completion_body, logprobs, serving, settled
from tests.gateway.raw_http import Event, connect, post, read_events

pytestmark = pytest.mark.anyio

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# What line splitters, JSON parsers and encoders have stumbled over.
HARD = [
    "\u2028",
    "\u2029",
    "\x85",
    "\x00",
    "\x0b",
    "\r\n",
    "\n\n",
    "data: [DONE]\n\n",
    '"\\',
    "é",
    "日",
    "😀",
    "\ufeff",
    "</script>",
]
Bring = Callable[[Gateway, Request], Awaitable[None]]


async def streamed(gateway: Gateway, path: str, body: dict[str, Any], bring: Bring) -> bytes:
    async with serving(gateway.app) as url, connect(url) as connection:
        connection.send(post(path, {**body, "stream": True}))
        await bring(gateway, await gateway.taken())
        answer = await connection.answer()
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    return answer.body


async def whole(gateway: Gateway, path: str, body: dict[str, Any], bring: Bring) -> Any:
    async with serving(gateway.app) as url, connect(url) as connection:
        connection.send(post(path, body))
        await bring(gateway, await gateway.taken())
        answer = await connection.answer()
    assert answer.headers["content-type"] == "application/json"
    return json.loads(answer.body)


def answered_with(*texts: str) -> Bring:
    async def bring(gateway: Gateway, request: Request) -> None:
        for text in texts:
            gateway.deliver(*(gateway.output(request, text, index) for index in range(request.n)))
            await settled()
        gateway.answer(request, "")

    return bring


def parsed(stream: bytes) -> list[Any]:
    """The chunks of a stream that is complete."""
    *events, done = read_events(stream)
    assert done == Event("[DONE]")
    assert {event.type for event in events} <= {"message"}
    return [json.loads(event.data) for event in events]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_every_event_is_one_line_of_ascii(path: str) -> None:
    body = chat_body() if path == CHAT else completion_body()
    stream = await streamed(Gateway(), path, body, answered_with("a", *HARD, "".join(HARD)))
    # Stricter than the standard: these lines survive every way that clients are known to split them.
    assert stream.isascii()
    lines = stream.decode().splitlines()
    assert all(line.startswith("data: ") for line in lines[::2])
    assert set(lines[1::2]) == {""}
    assert len(lines) % 2 == 0
    assert stream.endswith(b"\n\ndata: [DONE]\n\n")
    chunks = parsed(stream)
    choices = [chunk["choices"][0] for chunk in chunks]
    said = [choice["text"] if path != CHAT else choice["delta"].get("content", "") for choice in choices]
    assert "".join(said) == "a" + "".join(HARD) * 2


async def test_no_piece_on_the_wire_ends_within_an_event() -> None:
    gateway = Gateway()
    async with serving(gateway.app) as url, connect(url) as connection:
        connection.send(post(CHAT, chat_body(stream=True, n=2)))
        request = await gateway.taken()
        for text in HARD:
            gateway.deliver(gateway.output(request, text, 0), gateway.output(request, text[::-1], 1))
            await settled()
        gateway.finish(request, "", 0)
        gateway.finish(request, "", 1)
        await connection.head()
        pieces = [chunk async for chunk in connection.chunks()]
    assert all(piece.startswith(b"data: ") and piece.endswith(b"\n\n") for piece in pieces)


async def test_a_sign_of_life_is_no_event() -> None:
    gateway = Gateway(ServiceOptions(models=(MODEL,), timeouts=Timeouts(tick_s=3600)))
    async with serving(gateway.app) as url, connect(url) as connection:
        connection.send(post(CHAT, chat_body(stream=True)))
        request = await gateway.taken()
        pieces: list[bytes] = []
        for text in ("a", "b"):
            gateway.clock.now += 6
            gateway.service.tick(gateway.clock.now)
            if not pieces:
                status, _ = await connection.head()
                assert status == 200
            pieces.append(await connection.chunk())
            gateway.bring(request, text)
            pieces.append(await connection.chunk())
        gateway.finish(request)
        stream = b"".join([*pieces, *[chunk async for chunk in connection.chunks()]])
    assert pieces[0] == pieces[2] == b": ping\n"
    contents = [chunk["choices"][0]["delta"].get("content") for chunk in parsed(stream)]
    assert contents == ["", "a", "b", None]


def tokens_of(gateway: Gateway, text: str) -> dict[str, Any]:
    """A text as the engine would bring it: its tokens, and what they were worth."""
    token_ids = gateway.service.tokenizer.encode(text)
    found = [logprobs((token_id, -0.5 - number), (9, -7.0)) for number, token_id in enumerate(token_ids)]
    return {"token_ids": token_ids, "logprobs": found}


async def bring_with_logprobs(gateway: Gateway, request: Request) -> None:
    for text in ("é", "", "日本", "x😀"):
        spelt = tokens_of(gateway, text)
        gateway.deliver(*(gateway.output(request, text, index, **spelt) for index in range(request.n)))
        await settled()
    gateway.finish(request, "!", 0, **tokens_of(gateway, "!"))
    gateway.finish(request, "?", 1, FinishReason.LENGTH, **tokens_of(gateway, "?"))


async def test_a_streamed_chat_adds_up_to_the_whole_one() -> None:
    asked = chat_body(n=2, logprobs=True, top_logprobs=2)
    stream_body = {**asked, "stream_options": {"include_usage": True}}
    *chunks, usage = parsed(await streamed(Gateway(), CHAT, stream_body, bring_with_logprobs))
    answer = await whole(Gateway(), CHAT, asked, bring_with_logprobs)
    for choice in answer["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["delta"].get("content", "") for c in own) == choice["message"]["content"]
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == [choice["finish_reason"]]
        entries = [entry for c in own if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert entries == choice["logprobs"]["content"]
        spelt = bytes(byte for entry in entries for byte in entry["bytes"])
        assert spelt.decode() == choice["message"]["content"]
    assert usage["choices"] == []
    assert usage["usage"] == answer["usage"]
    assert [chunk["timings"] for chunk in chunks if "timings" in chunk] == [answer["timings"]]


async def test_a_streamed_completion_adds_up_to_the_whole_one() -> None:
    asked = completion_body(n=2, logprobs=2)
    chunks = parsed(await streamed(Gateway(), COMPLETIONS, asked, bring_with_logprobs))
    answer = await whole(Gateway(), COMPLETIONS, asked, bring_with_logprobs)
    for choice in answer["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in own) == choice["text"]
        found = [c["logprobs"] for c in own if c["logprobs"]]
        assert len(found) == 4
        for name, values in choice["logprobs"].items():
            assert [value for logprobs_ in found for value in logprobs_[name]] == values
        offsets, tokens = choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]
        # A character of several tokens is where the first of them is.
        spelt = [bytes_of(token) for token in tokens]
        before = [b"".join(spelt[:number]).decode(errors="ignore") for number in range(len(tokens))]
        assert offsets == [len(text) for text in before]


def bytes_of(token: str) -> bytes:
    """The bytes that a token's text stands for."""
    spelt = token.removeprefix("bytes:").encode()
    return spelt.decode("unicode_escape").encode("latin-1") if token.startswith("bytes:") else spelt


async def test_the_choices_of_several_prompts_are_told_apart() -> None:
    gateway = Gateway()
    async with serving(gateway.app) as url, connect(url) as connection:
        connection.send(post(COMPLETIONS, completion_body(["a", "b"], n=2, stream=True)))
        first, second = await gateway.taken(), await gateway.taken()
        gateway.deliver(*(gateway.output(r, t, i) for r, t in ((second, "B"), (first, "A")) for i in (1, 0)))
        for request in (second, first):
            gateway.finish(request, "1", 1)
            gateway.finish(request, "0", 0)
        chunks = parsed((await connection.answer()).body)
    texts = dict.fromkeys(range(4), "")
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == {0: "A0", 1: "A1", 2: "B0", 3: "B1"}


async def test_usage_is_null_until_it_is_known() -> None:
    body = chat_body(stream_options={"include_usage": True})
    *chunks, usage = parsed(await streamed(Gateway(), CHAT, body, answered_with("a", "b", "c")))
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    assert usage["usage"]["completion_tokens"] == 4
    assert {chunk["id"] for chunk in chunks} == {usage["id"]}


async def test_the_reader_of_this_file_knows_the_standard() -> None:
    """Or else it would prove nothing."""
    stream = b": hello\r\ndata: a\rdata:b\r\n\r\nevent: x\ndata\n\nid: 7\n\ndata:  c\n\ndata: cut off"
    assert read_events(stream) == [Event("a\nb"), Event("", "x"), Event(" c")]
