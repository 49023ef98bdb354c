"""Lines of a reply: what is thought, said and called."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.wire.ollama.lines import LineWriter
from penstock.gateway.wire.parsing import ArgumentsDelta, CallBegun, ReasoningDelta, TextDelta
from penstock.gateway.wire.reading import PLAIN
from penstock.gateway.wire.streams import Delta
from tests.gateway.wire.scripted_parser import HEAD, ScriptedParser, ending, streamed

CALLS: list[Any] = [
    {"id": "call_0", "function": {"name": "clock", "arguments": {}}},
    {"id": "call_1", "function": {"name": "add", "arguments": {"a": 1}}},
]


def script() -> ScriptedParser:
    return ScriptedParser(
        ReasoningDelta("Hm."),
        TextDelta("I look."),
        CallBegun(0, "call_0", "clock"),
        CallBegun(1, "call_1", "add"),
        ArgumentsDelta(1, '{"a":'),
        ArgumentsDelta(1, "1}"),
    )


def test_a_call_is_told_of_when_it_is_whole() -> None:
    parser = script()
    lines = streamed(LineWriter(HEAD, is_chat=True, parser=parser), parser.text).splitlines()
    messages = [json.loads(line)["message"] for line in lines]
    assert messages == [
        {"role": "assistant", "content": "", "thinking": "Hm."},
        {"role": "assistant", "content": "I look."},
        {"role": "assistant", "content": "", "tool_calls": CALLS[:1]},
        {"role": "assistant", "content": "", "tool_calls": CALLS[1:]},
        {"role": "assistant", "content": ""},
    ]


def test_the_same_in_one_piece() -> None:
    parser = script()
    generation, last = ending()
    body = LineWriter(HEAD, is_chat=True, parser=parser).whole(
        generation, [(0, Delta(parser.text, finish_reason=last.finish_reason))]
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
    writer = LineWriter(HEAD, is_chat=is_chat, parser=PLAIN.parser(HEAD.id))
    generation, last = ending()
    stream = b"".join([*(writer.text(0, text) for text in texts), writer.news(generation, [(0, last)])])
    lines: list[Any] = [json.loads(line) for line in stream.decode("ascii").splitlines()]
    said = [line["message"]["content"] if is_chat else line["response"] for line in lines]
    assert "".join(said) == "".join(texts)
