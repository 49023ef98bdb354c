"""The bench's client reads what came, and when, from the bytes it noted down."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.bench.client import Answer, Job, Recorder, body_pieces, frames, read_answer, request_bytes, run_job

JOB = Job("127.0.0.1", 8000, "/v1/completions", [])
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (*pieces, b""))


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def text(value: str) -> bytes:
    return event({"choices": [{"text": value}]})


USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
STREAM = [
    text("a"),
    text(""),
    text("b") + text("c"),
    event({"choices": [], "usage": USAGE}),
    b"data: [DONE]\n\n",
]


def recorded(parts: list[bytes]) -> Recorder:
    """A recorder that got these parts, part i at second i."""

    async def make() -> Recorder:
        return Recorder(b"")

    recorder = asyncio.run(make())
    for i, part in enumerate(parts):
        recorder.data += part
        recorder.offsets.append(len(recorder.data))
        recorder.times_s.append(float(i))
    return recorder


def test_a_request_says_how_long_it_is() -> None:
    head, _, body = request_bytes(JOB, {"prompt": [1, 2]}).partition(b"\r\n\r\n")
    assert json.loads(body) == {"prompt": [1, 2]}
    assert f"content-length: {len(body)}".encode() in head


def test_frames_with_text_are_timed_and_the_rest_is_not() -> None:
    data = [HEAD, *(chunked(piece)[:-5] for piece in STREAM), b"0\r\n\r\n"]
    answer = read_answer(recorded(data))
    assert answer.error is None
    assert answer.token_times_s == [1.0, 3.0, 3.0]
    assert answer.gaps_s == [2.0, 0.0]
    assert (answer.num_prompt_tokens, answer.num_output_tokens, answer.num_cached_tokens) == (7, 3, 4)


@given(st.data())
def test_it_does_not_matter_how_the_bytes_were_cut(data: st.DataObject) -> None:
    whole = HEAD + chunked(*STREAM)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(whole) - 1), max_size=8)))
    parts = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    answer = read_answer(recorded(parts))
    assert answer.error is None
    assert len(answer.token_times_s) == 3
    assert answer.token_times_s == sorted(answer.token_times_s)


@given(st.lists(st.binary(min_size=1, max_size=9), max_size=6), st.data())
def test_pieces_of_a_chunked_body(pieces: list[bytes], data: st.DataObject) -> None:
    whole = chunked(*pieces)
    assert [piece for piece, _ in body_pieces(whole, 0)] == pieces
    cut = data.draw(st.integers(0, len(whole)))
    found = [piece for piece, _ in body_pieces(whole[:cut], 0)]
    assert found == pieces[: len(found)]


def test_frames_can_span_pieces_and_comments_are_passed_over() -> None:
    pieces: Iterator[tuple[bytes, int]] = iter(
        [(b": ping\nda", 1), (b'ta: {"a"', 2), (b": 1}\n\n: ping\n\n", 3)]
    )
    assert list(frames(pieces)) == [(b'{"a": 1}', 3)]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no answer"),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n{}", "HTTP/1.1 503 Service Unavailable"),
        (HEAD + chunked(text("a")), "the stream ended without [DONE]"),
        (HEAD + chunked(event({"error": {"message": "lost"}}), b"data: [DONE]\n\n"), '{"message": "lost"}'),
    ],
)
def test_what_went_wrong_is_kept(data: bytes, message: str) -> None:
    answer = read_answer(recorded([data] if data else []))
    assert answer.error is not None
    assert message in answer.error


def test_streams_run_side_by_side_and_their_requests_one_after_another() -> None:
    most = now = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal most, now
        now += 1
        most = max(most, now)
        await reader.readuntil(b"}")
        while now < 2 and most < 2:  # the first waits for the second stream
            await asyncio.sleep(0)
        writer.write(HEAD + chunked(*STREAM))
        await writer.drain()
        now -= 1
        writer.close()

    async def run() -> list[Answer]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await run_job(Job("127.0.0.1", port, "/", [[{}, {}], [{}, {}]]))

    answers = asyncio.run(run())
    assert [a.error for a in answers] == [None] * 4
    assert [len(a.token_times_s) for a in answers] == [3] * 4
    assert most == 2
