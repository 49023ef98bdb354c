"""What came, and when, is read from the bytes that were noted down."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.app.reader import (
    TimedAnswer,
    TimedBytes,
    body_pieces,
    frames,
    read_answer,
    read_json,
    request_bytes,
)

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


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


def recorded(parts: list[bytes]) -> TimedBytes:
    """A recording that got these parts, part i at second i."""
    recording = TimedBytes()
    for i, part in enumerate(parts):
        recording.note(part)
        recording.times_s[-1] = float(i)
    return recording


@pytest.mark.parametrize("cut", [1, 5, 9, 12, 13])
def test_the_end_mark_is_seen_in_two_pieces(cut: int) -> None:
    """And not before its frame has ended: what is read up to there is whole."""
    recording, end = TimedBytes(), b"data: [DONE]\n\n"
    recording.note(text("a") + end[:cut])
    assert not recording.is_done
    recording.note(end[cut:])
    assert recording.is_done


def test_frames_with_text_are_timed_and_the_rest_is_not() -> None:
    data = [HEAD, *(chunked(piece)[:-5] for piece in STREAM), b"0\r\n\r\n"]
    answer = read_answer(recorded(data))
    assert answer.error is None
    assert answer.token_times_s == [1.0, 3.0, 3.0]
    assert answer.gaps_s == [2.0, 0.0]
    assert (answer.num_prompt_tokens, answer.num_output_tokens, answer.num_cached_tokens) == (7, 3, 4)


def test_a_body_that_ends_with_its_connection_is_read_as_it_came() -> None:
    head = HEAD.replace(b"transfer-encoding: chunked\r\n", b"")
    assert read_answer(recorded([head, *STREAM])).token_times_s == [1.0, 3.0, 3.0]


@given(st.data())
def test_it_does_not_matter_how_the_bytes_were_cut(data: st.DataObject) -> None:
    whole = HEAD + chunked(*STREAM)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(whole) - 1), max_size=8)))
    parts = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    answer = read_answer(recorded(parts))
    assert answer.error is None
    assert len(answer.token_times_s) == 3
    assert answer.token_times_s == sorted(answer.token_times_s)


@given(st.lists(st.binary(min_size=1, max_size=20), max_size=6), st.data())
def test_pieces_of_a_chunked_body_are_there_with_their_last_byte(
    pieces: list[bytes], data: st.DataObject
) -> None:
    whole, start = b"head" + chunked(*pieces), 4
    ends = [len(b"head" + chunked(*pieces[: i + 1])) - len(b"\r\n0\r\n\r\n") for i in range(len(pieces))]
    assert list(body_pieces(whole, start)) == list(zip(pieces, ends, strict=True))
    cut = data.draw(st.sampled_from(ends) | st.integers(start, len(whole)) if ends else st.just(start))
    there = [(piece, end) for piece, end in zip(pieces, ends, strict=True) if end <= cut]
    assert list(body_pieces(whole[:cut], start)) == there


def test_the_size_of_a_piece_may_have_extensions() -> None:
    assert list(body_pieces(b"A;x=1\r\n0123456789\r\n0\r\n\r\n", 0)) == [(b"0123456789", 17)]


@pytest.mark.parametrize(
    ("times_s", "num_tokens", "tpot_s"),
    [
        ([1.0, 2.0], 2, 1.0),
        ([1.0, 2.0, 3.0], 11, 0.2),
        ([1.0, 3.0], 1, 2.0),
        ([1.0, 3.0], 0, 2.0),
        ([1.0], 9, math.nan),
    ],
)
def test_the_mean_time_of_a_token_after_the_first(
    times_s: list[float], num_tokens: int, tpot_s: float
) -> None:
    answer = TimedAnswer(0.0, 9.0, times_s, num_output_tokens=num_tokens)
    assert answer.tpot_s == pytest.approx(tpot_s, nan_ok=True)


def test_all_that_a_stream_of_a_chat_tells() -> None:
    drafts = {"lookup": {"verified": 4, "right": 3}}
    pieces = [
        event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}),
        event({"choices": [{"delta": {"content": "a"}}]}),
        event({"choices": [{"delta": None}]}),
        event({"choices": [{"delta": {"content": "b"}}], "usage": None}),
        event(
            {
                "choices": [],
                "usage": {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": None},
            }
        ),
        event({"timings": {"queue_ms": 20.0, "lane": "batch", "predicted_ttft_ms": None, "drafts": drafts}}),
        b"data: [DONE]\n\n",
    ]
    assert read_answer(recorded([HEAD, *(chunked(piece)[:-5] for piece in pieces)])) == TimedAnswer(
        started_s=0.0, ended_s=7.0, token_times_s=[2.0, 4.0], num_prompt_tokens=7, num_cached_tokens=0,
        num_output_tokens=2, status=200, queue_s=0.02, lane="batch", drafts=drafts, text="ab",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("data", "status", "error"),
    [
        (b"", 0, "no answer"),
        (b"HTTP/1.1", 0, "HTTP/1.1"),
        (
            b"HTTP/1.1 404 " + b"x" * 99 + b"\r\n\r\n" + b"y" * 999,
            404,
            f"HTTP/1.1 404 {'x' * 47} {'y' * 300}",
        ),
    ],
)
def test_what_is_told_of_an_answer_that_is_none(data: bytes, status: int, error: str) -> None:
    answer = read_answer(recorded([data] if data else []))
    assert (answer.status, answer.error) == (status, error)
    assert [answer.was_refused, TimedAnswer(0, 0, status=429).was_refused] == [False, True]


def test_a_request_byte_by_byte() -> None:
    assert request_bytes("POST", "/v1", "here:80", {"a": [1, 2]}, {"x": "y"}) == (
        b"POST /v1 HTTP/1.1\r\nhost: here:80\r\nconnection: close\r\nx: y\r\n"
        b'content-type: application/json\r\ncontent-length: 11\r\n\r\n{"a":[1,2]}'
    )
    assert request_bytes("GET", "/", "h") == b"GET / HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n"


def test_whole_answers_tell_their_id() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n"
    for reply, found in ((RESPONSE, "resp_1"), ({}, "")):
        assert read_answer(recorded([head + json.dumps(reply).encode()])).id == found


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


# Responses

TIMINGS = {"queue_ms": 20.0, "lane": "standard", "predicted_ttft_ms": 30.0, "drafts": {}}
RESPONSE = {
    "id": "resp_1",
    "error": None,
    "usage": {"input_tokens": 9, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 8}},
    "timings": TIMINGS,
}


def numbered(number: int, kind: str, **fields: object) -> bytes:
    return f"event: {kind}\n".encode() + event({"type": kind, **fields, "sequence_number": number})


def response_events(first: int = 0) -> list[bytes]:
    events = [
        numbered(0, "response.created", response={"id": "resp_1", "usage": None}),
        numbered(1, "response.output_text.delta", delta="a"),
        numbered(2, "response.output_text.delta", delta="b"),
        numbered(3, "response.completed", response=RESPONSE),
    ]
    return events[first:]


def test_a_response_ends_with_its_last_event() -> None:
    answer = read_answer(recorded([HEAD, *(chunked(piece)[:-5] for piece in response_events())]))
    assert (answer.error, answer.token_times_s, answer.id, answer.last_event) == (
        None,
        [2.0, 3.0],
        "resp_1",
        3,
    )
    assert (answer.num_prompt_tokens, answer.num_output_tokens, answer.num_cached_tokens) == (9, 2, 8)
    assert (answer.queue_s, answer.lane, answer.predicted_ttft_s) == (0.02, "standard", 0.03)


def test_a_response_goes_on_after_the_event_that_was_read_last() -> None:
    assert read_answer(recorded([HEAD + chunked(*response_events(2))]), after_event=1).error is None


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (response_events()[:3], "without [DONE]"),
        (response_events()[:2] + response_events()[3:], "event 3 came after event 1"),
        (response_events()[:2] + response_events()[1:], "event 1 came after event 1"),
        ([*response_events()[:2], numbered(1, "error", code="shutting_down")], "shutting_down"),
        (
            [
                *response_events()[:2],
                numbered(2, "response.failed", response={"id": "resp_1", "error": {"code": "lost"}}),
            ],
            "lost",
        ),
    ],
    ids=["cut", "an event is lost", "an event comes twice", "interrupted", "failed"],
)
def test_a_response_that_is_not_whole(events: list[bytes], message: str) -> None:
    assert message in (read_answer(recorded([HEAD + chunked(*events)])).error or "")


def test_json_is_read_if_it_is_whole() -> None:
    whole = b'HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\n{"a": 1}'
    assert read_json(recorded([whole])) == {"a": 1}
    assert read_json(recorded([whole[:-2]])) is None
    assert read_json(recorded([b"HTTP/1.1 404 Not Found\r\n\r\n{}"])) is None


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (json.dumps(RESPONSE).encode(), None),
        (json.dumps(RESPONSE | {"error": {"code": "lost"}}).encode(), "lost"),
        (json.dumps(RESPONSE).encode()[:-1], "not whole"),
    ],
    ids=["whole", "failed", "cut"],
)
def test_a_reply_that_is_not_streamed(body: bytes, error: str | None) -> None:
    answer = read_answer(recorded([b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n" + body]))
    assert (answer.error is None) if error is None else error in (answer.error or "")
    assert answer.num_output_tokens == (0 if error == "not whole" else 2)
    assert answer.token_times_s == []
