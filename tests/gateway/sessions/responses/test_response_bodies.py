"""Bodies and queries of the Responses API: what is taken, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.gateway.errors import ApiError
from penstock.gateway.limits import Limits
from penstock.gateway.sessions.responses.objects import as_messages, input_items
from penstock.gateway.sessions.responses.schemas import (
    PageQuery,
    ResponseBody,
    check_id,
    read_stream_query,
)
from penstock.gateway.wire.strict import read, validated
from tests.gateway.harness import MODEL
from tests.gateway.sessions.responses.recorded_responses import body_of

HARMLESS: dict[str, Any] = {
    "background": False,
    "conversation": None,
    "include": ["reasoning.encrypted_content"],
    "instructions": "Be brief.",
    "max_output_tokens": 1,
    "max_tool_calls": 3,
    "metadata": {"k" * 64: "v" * 512},
    "n": None,
    "parallel_tool_calls": True,
    "previous_response_id": "resp_0a",
    "prompt": None,
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "reasoning": None,
    "safety_identifier": "s",
    "seed": 7,
    "service_tier": "flex",
    "stop": ["END"],
    "store": False,
    "stream": True,
    "stream_options": {"include_obfuscation": False},
    "temperature": 0.0,
    "text": {"format": {"type": "text"}, "verbosity": "medium"},
    "tool_choice": "auto",
    "tools": [],
    "top_k": 40,
    "top_logprobs": 0,
    "top_p": 0.5,
    "truncation": "disabled",
    "user": "u",
}

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"background": True, "store": False}, "background", "invalid_value"),
    ({"conversation": "conv_"}, "conversation", "invalid_value"),
    ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "previous_response_id", "invalid_value"),
    ({"conversation": {"id": "resp_1"}}, "conversation", "invalid_value"),
    ({"conversation": {"name": "conv_1"}}, "conversation", "invalid_value"),
    ({"input": []}, "input", "invalid_value"),
    ({"input": 7}, "input", "invalid_value"),
    ({"input": ["Hi"]}, "input[0]", "invalid_value"),
    ({"input": [{"role": "user", "content": []}]}, "input[0].content", "invalid_value"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "invalid_value"),
    ({"input": [{"content": "x"}]}, "input[0].role", "missing_required_parameter"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0].type",
        "invalid_value",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "output_text", "text": "x"}]}]},
        "input[0].content[0].type",
        "invalid_value",
    ),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type", "unsupported_value"),
    (
        {"input": ["Hi", {"type": "function_call_output", "call_id": "c", "output": "1"}]},
        "input[0]",
        "invalid_value",
    ),
    ({"input": [{"role": "user", "content": "x", "id": "item-1"}]}, "input[0].id", "invalid_value"),
    ({"input": [{"role": "user", "content": "x", "id": "msg_1"}] * 2}, "input[1].id", "invalid_value"),
    ({"instructions": ["Be brief."]}, "instructions", "invalid_value"),
    ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
    ({"max_tokens": 5}, "max_tokens", "unsupported_parameter"),
    ({"messages": [{}]}, "messages", "unknown_parameter"),
    ({"metadata": {"k" * 65: "v"}}, "metadata", "invalid_value"),
    ({"metadata": {"k": "v" * 513}}, "metadata", "invalid_value"),
    ({"metadata": {"k": 1}}, "metadata.k", "invalid_value"),
    ({"metadata": {str(k): "v" for k in range(17)}}, "metadata", "invalid_value"),
    ({"model": ""}, "model", "invalid_value"),
    ({"n": 1}, "n", "unsupported_parameter"),
    ({"previous_response_id": "conv_1"}, "previous_response_id", "invalid_value"),
    ({"previous_response_id": "resp_a/b"}, "previous_response_id", "invalid_value"),
    ({"previous_response_id": "resp_" + "a" * 65}, "previous_response_id", "invalid_value"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt", "unsupported_parameter"),
    ({"reasoning": {"effort": 1}}, "reasoning.effort", "invalid_value"),
    ({"stop": [""]}, "stop", "invalid_value"),
    (
        {"stream": True, "stream_options": {"include_usage": True}},
        "stream_options.include_usage",
        "unsupported_parameter",
    ),
    (
        {"stream": True, "store": False, "stream_options": {"resumable": True}},
        "stream_options.resumable",
        "invalid_value",
    ),
    ({"stream_options": {}}, "stream_options", "invalid_value"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_value"),
    ({"text": {"verbosity": "loud"}}, "text.verbosity", "invalid_value"),
    ({"tool_choice": "often"}, "tool_choice", "invalid_value"),
    ({"tool_choice": {"type": "function", "nam": "f"}}, "tool_choice.name", "missing_required_parameter"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "missing_required_parameter"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "invalid_value"),
    ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
]


def test_all_of_it_together() -> None:
    body = body_of(**HARMLESS)
    assert (body.max_output_tokens, body.seed, body.stop, body.stored) == (1, 7, ["END"], False)


@pytest.mark.parametrize(("fields", "param", "code"), REFUSED)
def test_the_rest_is_refused_by_name(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        body_of(**fields) if "input" not in fields else body_of(fields["input"])
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.code == (code or "unsupported_value")
    assert caught.value.message


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ApiError) as caught:
        read(ResponseBody, {"model": MODEL}, Limits())
    assert (caught.value.param, caught.value.code) == ("input", "missing_required_parameter")


def test_counts_are_bounded() -> None:
    messages = {"model": MODEL, "input": [{"role": "user", "content": "x"}] * 3}
    with pytest.raises(ApiError) as caught:
        read(ResponseBody, messages, Limits(max_messages=2))
    assert caught.value.param == "input"
    parts = [{"type": "input_text", "text": "x"}] * 3
    in_parts = {"model": MODEL, "input": [{"role": "user", "content": parts}]}
    with pytest.raises(ApiError) as caught:
        read(ResponseBody, in_parts, Limits(max_content_parts=2))
    assert caught.value.param == "input[0].content"


def test_what_is_too_much_is_refused_before_it_is_looked_at() -> None:
    with pytest.raises(ApiError) as caught:
        read(ResponseBody, {"model": MODEL, "input": [7] * 3}, Limits(max_messages=2))
    assert caught.value.param == "input"


def test_a_conversation_is_named_by_its_id_alone_or_in_an_object() -> None:
    assert body_of(conversation="conv_1").conversation == "conv_1"
    assert body_of(conversation={"id": "conv_1"}).conversation == "conv_1"
    assert body_of().conversation is None


def test_every_form_of_input_becomes_messages() -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]},
        {
            "type": "message",
            "id": "msg_1",
            "status": "incomplete",
            "role": "assistant",
            "phase": None,
            "content": [{"type": "output_text", "text": "c", "annotations": [], "logprobs": None}],
        },
        {"role": "user", "content": "d"},
    ]
    made = input_items(body_of(items).input)
    assert as_messages(made) == [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    assert (made[2]["id"], made[2]["status"]) == ("msg_1", "incomplete")
    assert len({item["id"] for item in made}) == 4
    assert as_messages(input_items("e")) == [{"role": "user", "content": "e"}]


# Ids and queries


@pytest.mark.parametrize("bad", ["", "resp", "resp_", "resp_ä", "resp_a b", "resp_1\n", "RESP_1", "msg_1"])
def test_what_is_no_id_is_refused(bad: str) -> None:
    with pytest.raises(ApiError) as caught:
        check_id("response_id", bad, "resp")
    assert (caught.value.status, caught.value.param) == (400, "response_id")


def test_where_to_go_on_in_a_stream() -> None:
    def asked(**query: str) -> tuple[bool, int | None]:
        found = read_stream_query(query)
        return found.stream, found.starting_after

    assert asked() == (False, None)
    assert asked(stream="true") == (True, None)
    assert asked(stream="true", starting_after="0") == (True, 0)
    assert asked(**{"stream": "false", "include[]": "x"}) == (False, None)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"stream": "yes"}, "stream"),
        ({"starting_after": "1"}, "starting_after"),
        ({"stream": "true", "starting_after": "-1"}, "starting_after"),
        ({"stream": "true", "starting_after": "one"}, "starting_after"),
        ({"stream": "true", "starting_after": "1.5"}, "starting_after"),
        ({"stream": "true", "starting_after": "٣"}, "starting_after"),
        ({"stream": "true", "starting_after": "9" * 5000}, "starting_after"),
        ({"stream": "true", "include_obfuscation": "1"}, "include_obfuscation"),
        ({"from": "1"}, "from"),
    ],
)
def test_a_wrong_stream_query_is_named(query: dict[str, str], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_stream_query(query)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "101"}, "limit"),
        ({"limit": ""}, "limit"),
        ({"limit": " 5"}, "limit"),
        ({"limit": "1_0"}, "limit"),
        ({"order": "up"}, "order"),
        ({"before": "msg_1"}, "before"),
    ],
)
def test_a_wrong_page_query_is_named(query: dict[str, str], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        validated(PageQuery, query)
    assert (caught.value.status, caught.value.param) == (400, param)
