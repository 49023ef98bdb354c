"""Fields of other servers: what each means here, which are named as ignored, and which are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.gateway.errors import ApiError
from penstock.gateway.limits import Limits
from penstock.gateway.sessions.responses.schemas import ResponseBody
from penstock.gateway.wire.conversation import as_dict
from penstock.gateway.wire.dialects import HINTS, NAMES, OFF
from penstock.gateway.wire.schemas import ChatBody, CompletionBody
from penstock.gateway.wire.strict import StrictBody, read
from penstock.gateway.wire.structured import answer_form, form_of
from tests.gateway.harness import chat_body, completion_body

LIMITS = Limits()
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
RESPONSE = {"model": "m", "input": "Hi"}
BODIES: list[tuple[type[StrictBody], dict[str, Any]]] = [
    (ChatBody, chat_body()),
    (CompletionBody, completion_body()),
    (ResponseBody, RESPONSE),
]
EVERY_BODY = pytest.mark.parametrize(("kind", "body"), BODIES, ids=["chat", "text", "response"])


def chat_of(**fields: Any) -> ChatBody:
    return read(ChatBody, chat_body(**fields), LIMITS)


def refused(kind: type[StrictBody], body: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as found:
        read(kind, body, LIMITS)
    return found.value


# Other names and values


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"n_predict": 5}, "max_tokens", 5),
        ({"n_predict": -1}, "max_tokens", None),
        ({"max_tokens": -1}, "max_tokens", None),
        ({"n_cmpl": 3}, "n", 3),
        ({"repeat_penalty": 1.5}, "repetition_penalty", 1.5),
        ({"repeat_penalty": None, "repetition_penalty": 1.5}, "repetition_penalty", 1.5),
        ({"typ_p": 0.5}, "typical_p", 0.5),
        ({"random_seed": 7}, "seed", 7),
        ({"seed": -1}, "seed", None),
        ({"temperature": 3.5}, "temperature", 3.5),
        ({"repeat_last_n": 0, "repeat_penalty": 1.5}, "repetition_penalty", 1.0),
        ({"repeat_last_n": 64, "repeat_penalty": 1.5}, "repetition_penalty", 1.5),
        ({"samplers": ["top_k"], "top_k": 5}, "top_k", 5),
        ({"samplers": ["top_k"], "top_p": 0.5}, "top_p", 1.0),
        ({"samplers": ["top_k"], "temperature": 0.5}, "temperature", 1.0),
        ({"samplers": ["typical_p", "temperature"], "typ_p": 0.5}, "typical_p", 0.5),
        ({"samplers": ["penalties"], "typ_p": 0.5}, "typical_p", 1.0),
        ({"samplers": None, "top_p": 0.5}, "top_p", 0.5),
        ({"structured_outputs": {"structural_tag": None}}, "n", None),
        # Whole numbers, however they are written.
        ({"max_tokens": 5.0}, "max_tokens", 5),
        ({"seed": 7.0}, "seed", 7),
        ({"top_k": -1.0}, "top_k", -1),
        ({"stop_token_ids": [7, 8.0, 9.0]}, "stop_token_ids", [7, 8, 9]),
        ({"truncate_prompt_tokens": -1.0}, "truncate_prompt_tokens", -1),
        ({"thinking_budget": 8.0}, "thinking_token_budget", 8),
    ],
)
def test_what_a_field_means(fields: dict[str, Any], name: str, value: object) -> None:
    found = getattr(chat_of(**fields), name)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("prompt", "expected"), [([7.0, 8], [7, 8]), ([[7.0], [8.0, 9]], [[7], [8, 9]]), (["7.0"], ["7.0"])]
)
def test_token_ids_may_be_whole_numbers(prompt: Any, expected: Any) -> None:
    found = read(CompletionBody, completion_body(prompt), LIMITS).prompt
    assert repr(found) == repr(expected)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n_predict": 5, "max_tokens": 5}, "n_predict"),
        ({"repeat_penalty": 1.5, "repetition_penalty": 1.1}, "repeat_penalty"),
        ({"repeat_penalty": "much"}, "repeat_penalty"),
        ({"n_predict": 1.5}, "n_predict"),
        ({"n_cmpl": 1e9}, "n_cmpl"),
        ({"n": 129.0}, "n"),
        ({"max_tokens": "5.0"}, "max_tokens"),
        ({"samplers": "kpt"}, "samplers"),
        ({"reasoning_format": "none"}, "reasoning_format"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        (
            {"structured_outputs": {"disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
        ),
        ({"structured_outputs": {"other": 1}}, "structured_outputs.other"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"thinking": "deep"}, "thinking"),
        ({"reasoning": {"depth": 3}}, "reasoning.depth"),
        ({"echo": True}, "echo"),
        ({"priority_": 1}, "priority_"),
    ],
)
def test_what_is_refused_names_the_field_as_it_was_sent(fields: dict[str, Any], param: str) -> None:
    assert refused(ChatBody, chat_body(**fields)).param == param


@pytest.mark.parametrize("name", NAMES)
@EVERY_BODY
def test_another_name_is_never_given_twice(kind: type[StrictBody], body: dict[str, Any], name: str) -> None:
    assert refused(kind, {**body, NAMES[name]: 1, name: 1}).param == name


# Switched off, hints, nothing


@pytest.mark.parametrize("name", sorted(OFF))
@EVERY_BODY
def test_what_is_not_here_is_refused_unless_it_is_off(
    kind: type[StrictBody], body: dict[str, Any], name: str
) -> None:
    if name in kind.ALIASES:
        return
    for value in (*OFF[name], None, "", [], {}):
        read(kind, {**body, name: value}, LIMITS)
    if -1 in OFF[name]:
        read(kind, {**body, name: -3.5}, LIMITS)
    error = refused(kind, {**body, name: 0.5})
    assert (error.param, error.code) == (name, "unsupported_parameter")


@EVERY_BODY
def test_hints_change_nothing_and_are_named(kind: type[StrictBody], body: dict[str, Any]) -> None:
    told: list[str] = []
    plain = read(kind, body, LIMITS)
    assert read(kind, {**body, **dict.fromkeys(HINTS, 7)}, LIMITS, told.append) == plain
    assert set(told) == HINTS


@pytest.mark.parametrize("value", [None, "", [], {}], ids=str)
@EVERY_BODY
def test_an_unknown_field_that_says_nothing_passes(
    kind: type[StrictBody], body: dict[str, Any], value: object
) -> None:
    assert read(kind, {**body, "zzz": value}, LIMITS) == read(kind, body, LIMITS)
    for said in (0, False, "x", [0], {"a": 1}):
        assert refused(kind, {**body, "zzz": said}).param == "zzz"


def test_so_does_one_below() -> None:
    format = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "x": None}, "y": []}
    assert chat_of(response_format=format) == chat_of(
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    )


def test_numbers_of_schemas_and_arguments_stay_as_they_are() -> None:
    schema = {"type": "number", "multipleOf": 2.0}
    body = chat_of(response_format={"type": "json_object", "schema": schema}, max_tokens=3.0)
    assert body.response_format is not None
    assert repr(body.response_format.schema_) == repr(schema)


# Forms


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format.schema"),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "response_format.schema"),
        ({"json_schema": SCHEMA}, "json_schema"),
        ({"json_schema": '{"type": "object"}'}, "json_schema"),
        ({"grammar": 'root ::= "a"'}, "grammar"),
        ({"grammar": "", "json_schema": SCHEMA}, "json_schema"),
        ({"regex": "a+"}, "guided_regex"),
        ({"ebnf": 'root ::= "a"'}, "guided_grammar"),
    ],
)
def test_forms_of_answers(fields: dict[str, Any], field: str) -> None:
    body = chat_of(**fields)
    form = form_of(body, LIMITS, answer_form(body.response_format))
    assert form is not None
    assert form.field == field


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": SCHEMA, "grammar": 'root ::= "a"'}, "grammar"),
        (
            {"response_format": {"type": "json_schema", "schema": {}, "json_schema": {"name": "a"}}},
            "response_format.schema",
        ),
    ],
)
def test_forms_that_are_none(fields: dict[str, Any], param: str) -> None:
    body = chat_of(**fields)
    with pytest.raises(ApiError) as found:
        form_of(body, LIMITS, answer_form(body.response_format))
    assert found.value.param == param


# Reasoning


@pytest.mark.parametrize(
    ("fields", "is_on", "number", "effort", "shows"),
    [
        ({"enable_thinking": True}, True, None, None, True),
        ({"enable_thinking": False}, False, 0, None, True),
        ({"enable_thinking": True, "thinking_budget": 9}, True, 9, None, True),
        ({"enable_thinking": False, "thinking_budget": 9}, False, 0, None, True),
        ({"thinking": True}, True, None, None, True),
        ({"thinking": {"type": "enabled"}}, True, None, None, True),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, True, 9, None, True),
        ({"thinking": {"type": "enabled", "clear_thinking": False}}, True, None, None, True),
        ({"thinking": {"type": "disabled"}}, False, 0, None, True),
        ({"thinking": {"type": "auto"}}, None, None, None, True),
        ({"reasoning": {"effort": "high"}}, None, None, "high", True),
        ({"reasoning": {"max_tokens": 9}}, None, 9, None, True),
        ({"reasoning": {"enabled": True, "exclude": False}}, True, None, None, True),
        ({"reasoning": {"enabled": False}}, False, 0, None, True),
        ({"reasoning": {"exclude": True}}, None, None, None, False),
        ({"reasoning": {}}, None, None, None, True),
        ({"reasoning_format": "hidden"}, None, None, None, False),
        ({"reasoning_format": "deepseek"}, None, None, None, True),
        ({"include_reasoning": False}, None, None, None, False),
        ({"reasoning_budget_tokens": 9}, None, 9, None, True),
    ],
)
def test_switches_for_reasoning(
    fields: dict[str, Any], is_on: bool | None, number: int | None, effort: str | None, shows: bool
) -> None:
    body = chat_of(**fields)
    assert (body.is_on, body.num_thinking, body.effort, body.shows_reasoning) == (
        is_on,
        number,
        effort,
        shows,
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"enable_thinking": True, "thinking": {"type": "disabled"}}, "thinking"),
        ({"enable_thinking": False, "reasoning": {"enabled": True}}, "reasoning.enabled"),
        ({"reasoning_effort": "low", "reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"thinking_token_budget": 1, "reasoning": {"max_tokens": 2}}, "reasoning.max_tokens"),
    ],
)
def test_switches_that_disagree(fields: dict[str, Any], param: str) -> None:
    body = chat_of(**fields)
    with pytest.raises(ApiError) as found:
        _ = (body.is_on, body.num_thinking, body.effort)
    assert found.value.param == param


# Calls


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"a": 1}', {"a": 1}), ({"a": 1}, {"a": 1}), ({}, {}), (None, {}), ("", {}), ("no json", "no json")],
)
@pytest.mark.parametrize("older", [False, True])
def test_arguments_of_calls_are_texts_or_objects(arguments: object, expected: object, older: bool) -> None:
    function = {"name": "f", "arguments": arguments}
    call = {"id": "a", "type": "function", "function": function}
    said = {"function_call": function} if older else {"tool_calls": [call]}
    body = read(ChatBody, {"model": "m", "messages": [{"role": "assistant", **said}]}, LIMITS)
    (found,) = as_dict(body.messages[0])["tool_calls"]
    assert found["function"]["arguments"] == expected


# Responses


FUNCTION = {"type": "function", "name": "f"}
CODEX = [
    {
        "type": "custom",
        "name": "apply_patch",
        "format": {"type": "grammar", "syntax": "lark", "definition": ""},
    },
    {"type": "web_search", "external_web_access": False},
    {"type": "local_shell"},
]


def test_tools_that_are_not_functions_are_left_out_and_named() -> None:
    told: list[str] = []
    fields = {"tools": [*CODEX, FUNCTION, *CODEX], "client_metadata": {"x": "y"}}
    body = read(ResponseBody, {**RESPONSE, **fields}, LIMITS, told.append)
    assert body.tools == [FUNCTION]
    assert told == ["client_metadata", "tools[].custom", "tools[].local_shell", "tools[].web_search"]


@pytest.mark.parametrize("tool", [{"name": "f"}, {"type": 7}, "f", {"type": "function"}])
def test_what_is_no_tool_is_refused(tool: object) -> None:
    assert str(refused(ResponseBody, {**RESPONSE, "tools": [tool]}).param).startswith("tools[0]")


def test_arguments_of_a_call_that_comes_back() -> None:
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": {"a": 1}}
    body = read(ResponseBody, {"model": "m", "input": [call]}, LIMITS)
    assert body.input[0].arguments == '{"a":1}'  # type: ignore[union-attr]
