"""The bench's client against servers that misbehave: a failed request is told as one, and never counted as speed."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from penstock.app.bench.client import Job, run_job
from penstock.app.bench.statistics import Figures, summarise
from penstock.app.reader import Answer

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"
BUSY = (
    b'HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\n\r\n{"error": {"message": "The server is full."}}'
)

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Serves a connection whose request has been read."""


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def token(text: str) -> bytes:
    return event({"choices": [{"text": text}]})


def usage(num_output_tokens: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": num_output_tokens}})


def chunk(piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece)


WHOLE = [token("a"), token("b"), usage(2), DONE, b""]
ERROR_FRAME = event({"error": {"message": "The engine was lost.", "code": "engine_failed"}})


def sends(*parts: bytes) -> Script:
    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()

    return script


def resets(*parts: bytes) -> Script:
    """Sends the parts and breaks the connection instead of closing it."""

    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"".join(parts))
        await writer.drain()
        writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00"
        )
        writer.transport.abort()

    return script


async def read_request(reader: asyncio.StreamReader) -> dict[str, object]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(next(line.split(":")[1] for line in head.splitlines() if line.startswith("content-length")))
    body: dict[str, object] = json.loads(await reader.readexactly(length))
    return body


async def serve(scripts: list[Script]) -> AsyncIterator[int]:
    """A server whose i-th connection goes as the i-th script has it."""
    turns = iter(scripts)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        script = next(turns)
        await read_request(reader)
        await script(reader, writer)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


def answers_to(*scripts: Script, streams: int | None = None) -> list[Answer]:
    """One request after another, or in so many streams."""
    each: list[dict[str, object]] = [{"prompt": [1]}] * (len(scripts) // (streams or 1))

    async def run() -> list[Answer]:
        async for port in serve(list(scripts)):
            return await run_job(Job("127.0.0.1", port, "/v1/completions", [each] * (streams or 1)))
        raise AssertionError("the server did not start")

    return asyncio.run(run())


def figures_of(*scripts: Script) -> Figures:
    return summarise(answers_to(*scripts), 1)


def test_a_whole_answer_has_no_error() -> None:
    (answer,) = answers_to(sends(HEAD, *map(chunk, WHOLE)))
    assert answer.error is None
    assert (answer.num_prompt_tokens, answer.num_output_tokens) == (2, 2)
    assert answer.started_s <= answer.token_times_s[0] <= answer.token_times_s[1] <= answer.ended_s


def test_all_in_one_packet_is_the_same_answer() -> None:
    (answer,) = answers_to(sends(HEAD + b"".join(map(chunk, WHOLE))))
    assert answer.error is None
    assert len(answer.token_times_s) == 2


@pytest.mark.parametrize("at", [1, 3, 5, 20, len(chunk(token("b"))) - 3])
def test_a_stream_cut_in_the_middle_of_an_event_has_failed(at: int) -> None:
    (answer,) = answers_to(sends(HEAD, chunk(token("a")), chunk(token("b"))[:at]))
    assert answer.error == "the stream ended without [DONE]"
    assert len(answer.token_times_s) == 1


def test_an_event_that_was_never_finished_is_none() -> None:
    """All of its bytes came but the empty line that ends it."""
    (answer,) = answers_to(sends(HEAD, chunk(token("a")), chunk(token("b")[:-1])))
    assert answer.error == "the stream ended without [DONE]"
    assert len(answer.token_times_s) == 1


def test_a_stream_cut_before_its_end_mark_has_failed_although_all_tokens_came() -> None:
    (answer,) = answers_to(sends(HEAD, *map(chunk, WHOLE[:-2])))
    assert answer.error == "the stream ended without [DONE]"
    assert answer.num_output_tokens == 2


def test_the_end_mark_may_come_in_pieces() -> None:
    whole = HEAD + b"".join(map(chunk, WHOLE[:-1]))
    (answer,) = answers_to(sends(*(whole[i : i + 1] for i in range(len(whole)))))
    assert answer.error is None
    assert len(answer.token_times_s) == 2


def test_an_error_frame_is_a_failure_although_the_stream_ends_well() -> None:
    (answer,) = answers_to(sends(HEAD, chunk(token("a")), chunk(ERROR_FRAME), chunk(DONE)))
    assert answer.error is not None
    assert json.loads(answer.error)["code"] == "engine_failed"


def test_an_error_frame_is_told_rather_than_that_the_stream_was_cut() -> None:
    (answer,) = answers_to(sends(HEAD, chunk(ERROR_FRAME)))
    assert answer.error is not None
    assert "The engine was lost." in answer.error


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (BUSY, "503 Service Unavailable"),
        (BUSY, "The server is full."),
        (b"HTTP/1.1 404 Not Found\r\n\r\n", "404 Not Found"),
        (b"HTTP/1.1 200", "HTTP/1.1 200"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "SSH-2.0-OpenSSH_9.2"),
        (b"\xff\xfe\x00", "\ufffd"),
        (b"", "no answer"),
    ],
)
def test_anything_but_a_200_is_told_as_it_came(reply: bytes, told: str) -> None:
    (answer,) = answers_to(sends(reply))
    assert answer.error is not None
    assert told in answer.error
    assert answer.token_times_s == []


def test_a_connection_that_breaks_is_a_failure_and_no_exception() -> None:
    before, within = answers_to(resets(), resets(HEAD, chunk(token("a"))))
    assert before.error is not None
    assert within.error is not None


def test_a_slow_start_counts_for_the_first_token_alone() -> None:
    """The server answers only once all other streams have ended: these do not wait for it, nor does it for them."""
    others = 3
    ended = 0

    async def last(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while ended < others:
            await asyncio.sleep(0)
        await sends(HEAD, *map(chunk, WHOLE))(_, writer)

    async def quick(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal ended
        await sends(HEAD, *map(chunk, WHOLE))(reader, writer)
        await reader.read()  # until the client has closed
        ended += 1

    answers = answers_to(last, *[quick] * others, streams=1 + others)
    assert [answer.error for answer in answers] == [None] * 4
    slow = max(answers, key=lambda answer: answer.ttft_s)
    assert all(answer.ended_s <= slow.token_times_s[0] for answer in answers if answer is not slow)


def test_requests_after_a_failed_one_are_still_sent() -> None:
    answers = answers_to(sends(BUSY), resets(), sends(HEAD, *map(chunk, WHOLE)))
    assert [answer.error is None for answer in answers] == [False, False, True]


def test_failed_requests_are_counted_and_their_tokens_are_not() -> None:
    whole, cut = sends(HEAD, *map(chunk, WHOLE)), sends(HEAD, *map(chunk, WHOLE[:-2]))
    figures = figures_of(whole, cut, sends(BUSY), whole)
    assert (figures.requests, figures.failed, figures.output_tokens) == (4, 2, 4)
    assert figures.first_error == "the stream ended without [DONE]"


def test_an_answer_without_text_is_a_failure() -> None:
    figures = figures_of(sends(HEAD, *map(chunk, [usage(0), DONE, b""])), sends(HEAD, *map(chunk, WHOLE)))
    assert (figures.failed, figures.first_error) == (1, "no text came")


def test_nobody_listening_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        asyncio.run(run_job(Job("127.0.0.1", port, "/", [[{}]])))
