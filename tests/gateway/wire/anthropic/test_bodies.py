"""A body of Anthropic's becomes that of a chat."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.gateway.errors import ApiError
from penstock.gateway.limits import Limits
from penstock.gateway.wire.anthropic.bodies import CountTokensBody, MessagesBody, as_chat
from penstock.gateway.wire.conversation import as_dict, thinking_switches
from penstock.gateway.wire.strict import read

LIMITS = Limits()


def text(*texts: str, **more: object) -> list[dict[str, object]]:
    return [{"type": "text", "text": each, **more} for each in texts]


def user(content: object) -> dict[str, object]:
    return {"role": "user", "content": content}


def assistant(content: object) -> dict[str, object]:
    return {"role": "assistant", "content": content}


def chat_of(*messages: object, **fields: object) -> Any:
    body = {"model": "m", "max_tokens": 9, "messages": messages, **fields}
    return as_chat(read(MessagesBody, {**body, "messages": list(messages)}, LIMITS), LIMITS)


def turns(*messages: object, **fields: object) -> list[tuple[str, str]]:
    found = [as_dict(message) for message in chat_of(*messages, **fields).messages]
    return [(message["role"], message["content"]) for message in found]


CLOCK = {"name": "clock", "input_schema": {"type": "object"}}
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
BILLING = "x-anthropic-billing-header: cc_version=2.1.0; cc_entrypoint=cli; cch=36ee5;"


@pytest.mark.parametrize(
    ("messages", "fields", "expected"),
    [
        ([user("Hi")], {}, [("user", "Hi")]),
        ([user(text("a", "b", **CACHED))], {}, [("user", "a\nb")]),
        ([user("Hi")], {"system": "Be brief."}, [("system", "Be brief."), ("user", "Hi")]),
        ([user("Hi")], {"system": text("a", "b", **CACHED)}, [("system", "a\nb"), ("user", "Hi")]),
        ([user("Hi")], {"system": ""}, [("user", "Hi")]),
        ([user("Hi")], {"system": text(BILLING, "Be brief.")}, [("system", "Be brief."), ("user", "Hi")]),
        ([user("Hi")], {"system": BILLING}, [("user", "Hi")]),
        ([user("Hi")], {"system": f"{BILLING}\nBe brief."}, [("system", "Be brief."), ("user", "Hi")]),
        ([user("a"), user(text("b"))], {}, [("user", "a\nb")]),
        (
            [user("a"), assistant("b"), user("c")],
            {},
            [("user", "a"), ("assistant", "b"), ("user", "c")],
        ),
        (
            [user("a"), {"role": "system", "content": "Now in French."}, user("b")],
            {},
            [("user", "a"), ("system", "Now in French."), ("user", "b")],
        ),
        ([user([{"type": "redacted_thinking", "data": "x"}])], {}, [("user", "")]),
        ([user("a"), assistant([]), user("b")], {}, [("user", "a"), ("assistant", ""), ("user", "b")]),
    ],
)
def test_turns(messages: list[object], fields: dict[str, object], expected: list[tuple[str, str]]) -> None:
    assert turns(*messages, **fields) == expected


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({}, "max_tokens", 9),
        ({"stop_sequences": ["x"]}, "stop", ["x"]),
        ({"temperature": 0.5}, "temperature", 0.5),
        ({"top_k": 3}, "top_k", 3),
        ({"stream": True}, "stream", True),
        ({"service_tier": "standard_only"}, "service_tier", "default"),
        ({"service_tier": "auto"}, "service_tier", "auto"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 9}},
            "chat_template_kwargs",
            thinking_switches(True),
        ),
        (
            {"thinking": {"type": "disabled"}},
            "chat_template_kwargs",
            thinking_switches(False),
        ),
        ({"thinking": {"type": "adaptive"}}, "chat_template_kwargs", None),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "include_reasoning", False),
        ({"output_config": {"effort": "max"}}, "reasoning_effort", "high"),
        ({"tools": [CLOCK], "tool_choice": {"type": "any"}}, "tool_choice", "required"),
        ({"tools": [CLOCK], "tool_choice": {"type": "none"}}, "tool_choice", "none"),
        ({"tools": [CLOCK]}, "parallel_tool_calls", None),
        (
            {"tools": [CLOCK], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            "parallel_tool_calls",
            False,
        ),
        ({"speed": "fast", "service_tier": "auto"}, "service_tier", "fast"),
    ],
)
def test_fields(fields: dict[str, object], name: str, value: object) -> None:
    assert getattr(chat_of(user("Hi"), **fields), name) == value


@pytest.mark.parametrize(
    ("messages", "fields", "message"),
    [
        ([user([{"type": "image", "source": {}}])], {}, "'image'"),
        ([user([{"type": "document", "source": {}}])], {}, "messages[0].content[0].source.type"),
        ([user("Hi")], {"max_tokens": None}, "max_tokens"),
        ([user("Hi")], {"max_tokens": 0}, "max_tokens"),
        ([user("Hi")], {"temperature": 1.01}, "temperature"),
        ([user("Hi")], {"stop_sequences": [""]}, "stop_sequences"),
        ([user("Hi")], {"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ([user("Hi")], {"container": "c"}, "container"),
        ([user("Hi")], {"n": 2}, "Unrecognized request argument supplied: n"),
        ([user(text(*"x" * 257))], {}, "messages[0].content"),
        ([{"role": "tool", "content": "x"}], {}, "messages[0].role"),
        ([], {}, "messages"),
    ],
)
def test_refusals_name_the_field(messages: list[object], fields: dict[str, object], message: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat_of(*messages, **fields)
    assert refused.value.status == 400
    assert message in refused.value.message


def test_a_tool_that_is_named() -> None:
    found = chat_of(user("Hi"), tools=[CLOCK], tool_choice={"type": "tool", "name": "clock"})
    assert found.tool_choice.function.name == "clock"
    assert found.tools == [
        {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
    ]


def test_a_result_that_is_an_error_says_so() -> None:
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": "no such zone", "is_error": True}
    assert turns(user("Hi"), assistant("a"), user([result]))[-1] == ("tool", "Error: no such zone")


def test_a_format_of_the_answer() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    found = chat_of(user("Hi"), output_config={"format": {"type": "json_schema", "schema": schema}})
    assert found.response_format.json_schema.schema_ == schema


def test_counting_needs_no_number_of_tokens() -> None:
    body = read(CountTokensBody, {"model": "m", "messages": [user("Hi")]}, LIMITS)
    assert as_chat(body, LIMITS).max_tokens is None


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (
            {"type": "image", "source": {}},
            "Invalid 'messages[0].content[0].type': Input should be 'text', 'document', 'search_result', 'thinking', "
            "'redacted_thinking', 'tool_use' or 'tool_result', not 'image'.",
        ),
        ({"text": "Hi"}, "You must provide the parameter 'messages[0].content[0].type'."),
        ({"type": "text"}, "You must provide the parameter 'messages[0].content[0].text'."),
        ({"type": "text", "text": 5}, "Invalid 'messages[0].content[0].text': Input should be a string."),
        (
            {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": 5}]},
            "Invalid 'messages[0].content[0].content[0].text': Input should be a string.",
        ),
        (
            {"type": "tool_use", "id": "a", "name": "f", "input": 5},
            "Invalid 'messages[0].content[0].input': Input should be an object.",
        ),
    ],
)
def test_the_place_of_a_mistake_is_that_in_the_body(block: object, message: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat_of(user([block]))
    assert refused.value.message == message


def test_members_that_nobody_reads_are_named_wherever_their_type_stands() -> None:
    inner = {"type": "text", "text": "Word.", "of_text": 1}
    document = {"type": "document", "source": {"type": "content", "content": [inner], "of_source": 1}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{**document, "of_block": 1}]}
    messages = [{"role": "user", "content": [document, result]}]
    ignored: list[str] = []
    read(CountTokensBody, {"model": "m", "messages": messages}, Limits(), ignored.append)
    assert ignored == [
        "messages[].content[].content[].of_block",
        "messages[].content[].content[].source.content[].of_text",
        "messages[].content[].content[].source.of_source",
        "messages[].content[].source.content[].of_text",
        "messages[].content[].source.of_source",
    ]
