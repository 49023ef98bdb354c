"""What came, and when, is read from the bytes that were noted down."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.bench.reader import Recording, body_pieces, frames, read_answer, read_json, request_bytes

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


def recorded(parts: list[bytes]) -> Recording:
    """A recording that got these parts, part i at second i."""
    recording = Recording()
    for i, part in enumerate(parts):
        recording.note(part)
        recording.times_s[-1] = float(i)
    return recording


def test_a_request_says_how_long_it_is() -> None:
    request = request_bytes("POST", "/v1/completions", "here:80", {"prompt": [1, 2]}, {"authorization": "x"})
    head, _, body = request.partition(b"\r\n\r\n")
    assert json.loads(body) == {"prompt": [1, 2]}
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /v1/completions HTTP/1.1"
    assert {b"host: here:80", b"authorization: x", f"content-length: {len(body)}".encode()} <= set(lines)


def test_a_request_without_a_body_has_no_length() -> None:
    assert b"content-length" not in request_bytes("GET", "/", "here:80")


@pytest.mark.parametrize("cut", [1, 5, 9, 12, 13])
def test_the_end_mark_is_seen_in_two_pieces(cut: int) -> None:
    """And not before its frame has ended: what is read up to there is whole."""
    recording, end = Recording(), b"data: [DONE]\n\n"
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
