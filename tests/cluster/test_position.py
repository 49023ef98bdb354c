"""How far a client has come, read off the bytes of its stream."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster.position import Position
from penstock.gateway.wire.frames import DONE, KEEPALIVE

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
LINES = "/api/chat"
MESSAGE_ID = "msg_" + "0123456789abcdef" * 2
LINES_ID = "reply_" + "0123456789abcdef" * 2
CHAT_ID = "chatcmpl-" + "0123456789abcdef" * 2
RESPONSE_ID = "resp_" + "0123456789abcdef" * 3


def chat_event(number: int, text: str = "word") -> bytes:
    return f'id: {number}\ndata: {{"id":"{CHAT_ID}","text":"{text}"}}\n\n'.encode()


def response_event(number: int, kind: str = "delta") -> bytes:
    data = f'{{"type":"{kind}","response":{{"id":"{RESPONSE_ID}"}},"sequence_number":{number}}}'
    return f"event: {kind}\ndata: {data}\n\n".encode()


def message_event(number: int, kind: str = "delta") -> bytes:
    data = f'{{"type":"{kind}","message":{{"id":"{MESSAGE_ID}"}}}}'
    return f"id: {number}\nevent: {kind}\ndata: {data}\n\n".encode()


def line(number: int, text: str = "word") -> bytes:
    return f'{{"id":"{LINES_ID}","text":"{text}","sequence_number":{number}}}\n'.encode()


STREAMS = {
    CHAT: (CHAT_ID, [chat_event(0), KEEPALIVE, chat_event(1, r"\nid: 99\n"), chat_event(2), DONE]),
    RESPONSES: (RESPONSE_ID, [response_event(0), response_event(1), KEEPALIVE, response_event(2)]),
    MESSAGES: (MESSAGE_ID, [message_event(0), message_event(1), message_event(2)]),
    LINES: (LINES_ID, [line(0), line(1, r"\"sequence_number\":99}"), b'{"text":""}\n', line(2)]),
}


@pytest.mark.parametrize("kind", STREAMS)
@given(cuts=st.sets(st.integers(0, 600)))
def test_bytes_in_any_pieces_come_to_the_same_events(kind: str, cuts: set[int]) -> None:
    id, events = STREAMS[kind]
    stream, position, passed = b"".join(events), Position(kind), b""
    ends = [*sorted(cut for cut in cuts if cut < len(stream)), len(stream)]
    at = 0
    for end in ends:
        out = position.feed(stream[at:end])
        at = end
        assert out in (b"", KEEPALIVE) or out.endswith(b"\n" if kind == LINES else b"\n\n")
        passed += out
    assert passed == stream
    assert (position.id, position.number) == (id, 2)
    assert position.path == f"{kind}/{id}?stream=true&starting_after=2"


def test_half_an_event_is_neither_passed_on_nor_counted_and_forgotten_with_its_connection() -> None:
    position = Position(CHAT)
    assert position.feed(chat_event(0) + chat_event(1)[:-3]) == chat_event(0)
    assert position.number == 0
    position.restart()
    assert position.feed(chat_event(1)) == chat_event(1)
    assert position.number == 1


@pytest.mark.parametrize(
    ("kind", "before", "fault"),
    [
        (
            CHAT,
            chat_event(0),
            b'data: {"error": {"message": "x", "code": "server_shutting_down"}}\n\n' + DONE,
        ),
        (RESPONSES, response_event(0), b'event: error\ndata: {"type":"error","code":"engine_failed"}\n\n'),
        (MESSAGES, message_event(0), b": engine_failed\n" + b'event: error\ndata: {"type":"error"}\n\n'),
    ],
)
def test_that_a_replica_goes_down_is_not_told_to_the_client(kind: str, before: bytes, fault: bytes) -> None:
    position = Position(kind)
    assert position.feed(before + KEEPALIVE + fault) == before
    assert position.is_interrupted


def test_that_a_replica_of_lines_goes_down_is_not_told_to_the_client() -> None:
    position = Position(LINES)
    assert position.feed(line(0) + b'{"error":"x","code":"engine_failed"}\n') == line(0)
    assert position.is_interrupted
    assert position.keepalive == b""


def test_other_errors_are_told_and_text_that_speaks_of_one_is_no_error() -> None:
    position = Position(CHAT)
    refused = b'data: {"error": {"message": "server_shutting_down?", "code": "internal_error"}}\n\n'
    said = chat_event(0, "server_shutting_down")
    assert position.feed(said) == said
    assert not position.is_interrupted
    assert position.feed(refused.replace(b"server_shutting_down?", b"x")).startswith(b"data")
    assert not position.is_interrupted
