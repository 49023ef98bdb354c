"""Lines of a reply: what is thought, said and called."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.wire.ask import Ask
from penstock.gateway.wire.frames import json_pieces
from penstock.gateway.wire.ollama.lines import LineWriter, NormalEmbeddingWriter
from penstock.gateway.wire.parsing import ArgumentsDelta, CallBegun, ReasoningDelta, TextDelta
from penstock.gateway.wire.reading import PLAIN
from penstock.gateway.wire.writing import Delta
from tests.gateway.harness import MODEL, make_timings
from tests.gateway.sessions.recordings.fakes import make_request
from tests.gateway.wire.scripted_parser import HEAD, ScriptedReading, ended, ending, streamed

CALLS: list[Any] = [
    {"id": "call_0", "function": {"name": "clock", "arguments": {}}},
    {"id": "call_1", "function": {"name": "add", "arguments": {"a": 1}}},
]


def script() -> ScriptedReading:
    return ScriptedReading(
        ReasoningDelta("Hm."),
        TextDelta("I look."),
        CallBegun(0, "call_0", "clock"),
        CallBegun(1, "call_1", "add"),
        ArgumentsDelta(1, '{"a":'),
        ArgumentsDelta(1, "1}"),
    )


def test_a_call_is_told_of_when_it_is_whole() -> None:
    reading = script()
    lines = streamed(LineWriter(HEAD, is_chat=True, reading=reading), reading.text).splitlines()
    messages = [json.loads(line)["message"] for line in lines]
    assert messages == [
        {"role": "assistant", "content": "", "thinking": "Hm."},
        {"role": "assistant", "content": "I look."},
        {"role": "assistant", "content": "", "tool_calls": CALLS[:1]},
        {"role": "assistant", "content": "", "tool_calls": CALLS[1:]},
        {"role": "assistant", "content": ""},
    ]


def test_the_same_in_one_piece() -> None:
    reading = script()
    generation, last = ending()
    body = LineWriter(HEAD, is_chat=True, reading=reading).whole(
        generation, [(0, Delta([reading.text], finish_reason=last.finish_reason))]
    )
    assert body["message"] == {
        "role": "assistant",
        "content": "I look.",
        "thinking": "Hm.",
        "tool_calls": CALLS,
    }
    assert (body["prompt_eval_count"], body["eval_count"], body["done"]) == (6, 1, True)


@pytest.mark.parametrize("is_chat", [True, False])
@given(texts=st.lists(st.text(st.characters(), max_size=40), max_size=6))
def test_any_text_survives(is_chat: bool, texts: list[str]) -> None:
    writer = LineWriter(HEAD, is_chat=is_chat, reading=PLAIN)
    generation, last = ending()
    frames = [frame for text in texts for frame in writer.text(0, text)]
    stream = b"".join(frames) + ended(writer, generation, last)
    lines: list[Any] = [json.loads(line) for line in stream.decode("ascii").splitlines()]
    said = [line["message"]["content"] if is_chat else line["response"] for line in lines]
    assert "".join(said) == "".join(texts)


def test_embeddings_are_written_one_at_a_time() -> None:
    reply = Mock(timings=[make_timings(make_request())], num_prompt_tokens=3)
    outputs = [(i, Delta(embedding=[0.6, 0.8])) for i in range(100)]
    written = NormalEmbeddingWriter(Ask(model=MODEL, field="input", input=())).whole(reply, outputs)
    assert [piece for piece in json_pieces(written) if b"0.6" in piece] == [b"[0.6,0.8]"] * 100
