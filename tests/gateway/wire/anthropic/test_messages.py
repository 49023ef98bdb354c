"""Blocks of a message: what is thought, said and called, each in its own."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.planning.request import FinishReason
from penstock.gateway.errors import ApiError
from penstock.gateway.wire.anthropic.messages import MessageWriter
from penstock.gateway.wire.parsing import ArgumentsDelta, CallBegun, Piece, ReasoningDelta, TextDelta
from penstock.gateway.wire.reading import PLAIN
from penstock.gateway.wire.writing import Delta
from tests.gateway.wire.scripted_parser import (
    HEAD,
    MAX_TOKENS,
    EndedGeneration,
    ScriptedReading,
    ended,
    ending,
    streamed,
)

PIECES: list[Piece] = [
    ReasoningDelta("Two "),
    ReasoningDelta("calls."),
    TextDelta("I look."),
    CallBegun(0, "call_0", "clock"),
    CallBegun(1, "call_1", "add"),
    ArgumentsDelta(1, '{"a":'),
    ArgumentsDelta(1, "1}"),
    TextDelta("Done"),
]


def events_of(text: str) -> list[Any]:
    events = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def test_every_piece_is_in_a_block_of_its_kind() -> None:
    script = ScriptedReading(*PIECES)
    events = events_of(streamed(MessageWriter(HEAD, MAX_TOKENS, script), script.text))
    assert [event["type"] for event in events if event["type"] != "ping"] == [
        "message_start",
        *("content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [event["index"] for event in starts] == [0, 1, 2, 3, 4]
    assert [event["content_block"] for event in starts] == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
        {"type": "tool_use", "id": "call_0", "name": "clock", "input": {}},
        {"type": "tool_use", "id": "call_1", "name": "add", "input": {}},
        {"type": "text", "text": ""},
    ]
    deltas = [(event["index"], event["delta"]) for event in events if event["type"] == "content_block_delta"]
    assert deltas == [
        (0, {"type": "thinking_delta", "thinking": "Two "}),
        (0, {"type": "thinking_delta", "thinking": "calls."}),
        (1, {"type": "text_delta", "text": "I look."}),
        (3, {"type": "input_json_delta", "partial_json": '{"a":'}),
        (3, {"type": "input_json_delta", "partial_json": "1}"}),
        (4, {"type": "text_delta", "text": "Done"}),
    ]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_the_same_in_one_piece() -> None:
    script = ScriptedReading(*PIECES)
    generation, last = ending()
    body: Any = MessageWriter(HEAD, MAX_TOKENS, script).whole(
        generation, [(0, Delta([script.text], finish_reason=last.finish_reason))]
    )
    assert body["content"] == [
        {"type": "thinking", "thinking": "Two calls.", "signature": ""},
        {"type": "text", "text": "I look.Done"},
        {"type": "tool_use", "id": "call_0", "name": "clock", "input": {}},
        {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 1}},
    ]
    assert body["stop_reason"] == "tool_use"
    assert body["usage"] == {
        "input_tokens": 2,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 1,
        "output_tokens_details": {"thinking_tokens": 0},
        "service_tier": "standard",
    }


@pytest.mark.parametrize(
    ("reason", "stop", "asked", "expected"),
    [
        (FinishReason.STOP, None, MAX_TOKENS, "end_turn"),
        (FinishReason.STOP, "x", MAX_TOKENS, "stop_sequence"),
        (FinishReason.LENGTH, None, MAX_TOKENS, "max_tokens"),
        (FinishReason.LENGTH, None, MAX_TOKENS + 1, "model_context_window_exceeded"),
    ],
)
def test_why_it_ended(reason: FinishReason, stop: str | None, asked: int, expected: str) -> None:
    generation, last = ending(reason, stop)
    body = MessageWriter(HEAD, asked, PLAIN).whole(generation, [(0, last)])
    assert (body["stop_reason"], body["stop_sequence"]) == (expected, stop)
    stream = ended(MessageWriter(HEAD, asked, PLAIN), generation, last)
    assert events_of(stream.decode())[-2]["delta"] == {"stop_reason": expected, "stop_sequence": stop}


def test_a_call_that_is_cut_off_has_no_input() -> None:
    script = ScriptedReading(CallBegun(0, "call_0", "add"), ArgumentsDelta(0, '{"a":'))
    generation, last = ending(FinishReason.LENGTH)
    body: Any = MessageWriter(HEAD, MAX_TOKENS, script).whole(
        generation, [(0, Delta([script.text], finish_reason=last.finish_reason))]
    )
    assert (body["content"][0]["input"], body["stop_reason"]) == ({}, "max_tokens")


@given(st.lists(st.text(st.characters(), max_size=40), max_size=6))
def test_any_text_survives(texts: list[str]) -> None:
    writer = MessageWriter(HEAD, MAX_TOKENS, PLAIN)
    generation, last = ending()
    frames = [frame for text in texts for frame in writer.text(0, text)]
    stream = b"".join(frames) + ended(writer, generation, last)
    found = [
        event["delta"]["text"]
        for event in events_of(stream.decode("ascii"))
        if "index" in event and "delta" in event
    ]
    assert "".join(found) == "".join(texts)


def test_an_error_is_an_event() -> None:
    fault = MessageWriter(HEAD, 1, PLAIN).fault(EndedGeneration(), ApiError(503, "No."), 7)
    (event,) = events_of(fault.decode())
    assert event["error"] == {"type": "overloaded_error", "message": "No."}
