"""What clients of other servers send beside OpenAI's fields: taken and named, done in an older form, or refused."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from penstock.priority.lanes import Lane
from tests.gateway.endpoints.test_tools import (
    CHAT,
    FUNCTION,
    RESPONSES,
    SAID,
    TOOL,
    answered,
    gateway,
    openai_client,
)
from tests.gateway.harness import MODEL, chat_body, client

pytestmark = pytest.mark.anyio

IGNORED = "x-penstock-ignored"
CALL = {"id": "a", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
EXTRAS: dict[str, Any] = {
    "role": "assistant",
    "content": [{"type": "text", "text": "Yes.", "cache_control": {"type": "ephemeral"}}],
    "reasoning_details": [{"type": "reasoning.text", "text": "Hm."}],
    "provider_specific_fields": {"a": 1},
    "tool_calls": [{**CALL, "extra_content": {"google": {"thought_signature": "x"}}}],
    "thinking_blocks": None,
}
PLAIN = {"role": "assistant", "content": "Yes.", "tool_calls": [CALL]}
HI, GO_ON = {"role": "user", "content": "Hi"}, {"role": "user", "content": "Go on."}
NAMED = [
    "messages[].content[].cache_control",
    "messages[].provider_specific_fields",
    "messages[].reasoning_details",
    "messages[].tool_calls[].extra_content",
]


async def test_extras_of_messages_are_taken_and_named() -> None:
    here = gateway()
    with_extras, request = await answered(here, {"model": MODEL, "messages": [HI, EXTRAS, GO_ON]}, "Well.")
    assert with_extras.headers[IGNORED].split(", ") == NAMED
    plain, other = await answered(here, {"model": MODEL, "messages": [HI, PLAIN, GO_ON]}, "Well.")
    assert IGNORED not in plain.headers
    assert request.prompt_token_ids == other.prompt_token_ids


async def test_extras_of_a_response_are_taken_and_named() -> None:
    here = gateway()
    async with openai_client(here) as api:
        part = {"type": "input_text", "text": "Hi", "x": 1}
        asked: Any = {
            "store": False,
            "text": {"verbosity": "low"},
            "input": [{"role": "user", "content": [part]}],
        }
        asking = api.responses.with_raw_response.create(model=MODEL, **asked)
        reply = await here.answering(asking, "Well.")
        assert reply.headers[IGNORED].split(", ") == ["text.verbosity", "input[].content[].x"]
        assert reply.parse().text.verbosity == "low"


async def test_names_in_the_header_are_few_and_plain() -> None:
    odd = {f"x{i:02}": 1 for i in range(40)} | {"a\r\nset-cookie: b": 1, "é": 1, "y" * 200: 1}
    reply, _ = await answered(gateway(), {"model": MODEL, "messages": [{**HI, **odd}]}, "Well.")
    assert reply.headers[IGNORED].split(", ") == [f"messages[].x{i:02}" for i in range(16)]
    assert "set-cookie" not in reply.headers


async def test_strict_refuses_them() -> None:
    async with client(gateway(strict=True).app) as http:
        reply = await http.post(CHAT, json={"model": MODEL, "messages": [HI, EXTRAS, GO_ON]})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, NAMED[0])


# Functions, the older form of tools


@pytest.mark.parametrize("streamed", [False, True])
async def test_functions_are_called_in_the_older_form(streamed: bool) -> None:
    here = gateway()
    asked: Any = {"model": MODEL, "messages": [HI], "functions": [FUNCTION]}
    async with openai_client(here) as api:
        reply = await here.answering(api.chat.completions.create(**asked, stream=streamed), *SAID)
        if streamed:
            chunks = [chunk.choices[0] async for chunk in reply]
            calls = [choice.delta.function_call for choice in chunks if choice.delta.function_call]
            name, reason = calls[0].name, chunks[-1].finish_reason
            arguments = "".join(call.arguments or "" for call in calls)
            assert all(choice.delta.tool_calls is None for choice in chunks)
        else:
            (choice,) = reply.choices
            assert choice.message.tool_calls is None
            name, arguments = choice.message.function_call.name, choice.message.function_call.arguments
            reason = choice.finish_reason
    assert (name, arguments, reason) == ("clock", '{"zone": "UTC"}', "function_call")


async def test_functions_are_told_to_the_model_as_tools() -> None:
    here = gateway()
    _, as_functions = await answered(here, chat_body(functions=[FUNCTION], function_call="auto"), "Well.")
    _, as_tools = await answered(here, chat_body(tools=[TOOL]), "Well.")
    _, forced = await answered(here, chat_body(functions=[FUNCTION], function_call={"name": "clock"}), *SAID)
    _, untold = await answered(here, chat_body(functions=[FUNCTION], function_call="none"), "Well.")
    assert as_functions.prompt_token_ids == as_tools.prompt_token_ids == forced.prompt_token_ids
    assert forced.sampling.grammar is not None
    assert "clock" not in here.prompt_of(untold)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": [FUNCTION], "tools": [TOOL]}, "functions"),
        ({"functions": [FUNCTION], "tool_choice": "auto"}, "functions"),
        ({"functions": [FUNCTION, FUNCTION]}, "functions"),
        ({"functions": [{"name": ""}]}, "functions[0].name"),
        ({"functions": [FUNCTION], "function_call": {"name": "other"}}, "function_call"),
        ({"functions": [FUNCTION], "function_call": "required"}, "function_call"),
        ({"function_call": {"name": "clock"}}, "functions"),
        ({"functions": [FUNCTION] * 513}, "functions"),
        ({"functions": [FUNCTION], "stream": True, "stream_options": {"resumable": True}}, "functions"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "a"}}}, "tool_choice.type"),
    ],
)
async def test_what_functions_cannot_be(fields: dict[str, Any], param: str) -> None:
    async with client(gateway().app) as http:
        reply = await http.post(CHAT, json=chat_body(**fields))
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


# Tiers, hosted tools, reasoning that is sent back


@pytest.mark.parametrize("tier", ["scale", "ultrafast"])
async def test_tiers_in_a_hurry_are_the_interactive_lane(tier: str) -> None:
    reply, request = await answered(gateway(), chat_body(service_tier=tier), "Well.")
    assert (request.lane, reply.json()["service_tier"]) == (Lane.INTERACTIVE, "priority")


HOSTED = [
    "web_search",
    "file_search",
    "code_interpreter",
    "image_generation",
    "computer_use_preview",
    "mcp",
    "custom",
]


@pytest.mark.parametrize("kind", HOSTED)
async def test_tools_that_others_run_are_left_out_unless_they_have_to_be_called(kind: str) -> None:
    here = gateway()
    tools: Any = [{"type": "function", **FUNCTION}, {"type": kind}]
    async with openai_client(here) as api:
        asking = api.responses.with_raw_response.create(model=MODEL, input="Hi", tools=tools)
        reply = await here.answering(asking, "Well.")
        assert reply.headers[IGNORED] == f"tools[].{kind}"
        assert [tool.name for tool in reply.parse().tools] == [FUNCTION["name"]]
        choice: Any = {"type": kind}
        with pytest.raises(openai.BadRequestError, match=kind) as refused:
            await api.responses.create(model=MODEL, input="Hi", tools=tools[:1], tool_choice=choice)
        assert refused.value.param == "tool_choice.type"


@pytest.mark.parametrize("streamed", [False, True])
async def test_sealed_reasoning_comes_back(streamed: bool) -> None:
    here = gateway()
    asked: Any = {"model": MODEL, "input": "Hi", "store": False}
    async with openai_client(here) as api:
        include: Any = ["reasoning.encrypted_content"]
        reply = await here.answering(
            api.responses.create(**asked, include=include, stream=streamed), *SAID[:4], ""
        )
        if streamed:
            reply = [event async for event in reply][-1].response
        reasoning, message = reply.output
        assert reasoning.content[0].text == "Hm."
        kept: Any = [
            {"role": "user", "content": "Hi"},
            {
                "type": "reasoning",
                "id": reasoning.id,
                "summary": [],
                "encrypted_content": reasoning.encrypted_content,
            },
            message.model_dump(),
            {"role": "user", "content": "And?"},
        ]
        asking = asyncio.create_task(api.responses.create(model=MODEL, input=kept, store=False))
        request = await here.taken()
        assert "(Hm.)" in here.prompt_of(request)
        here.answer(request, "Well.")
        await asking


async def test_it_is_sealed_where_that_is_asked_for_and_what_others_sealed_is_left_out() -> None:
    here = gateway()
    plain, _ = await answered(here, {"model": MODEL, "input": "Hi"}, *SAID[:4], "", path=RESPONSES)
    assert "encrypted_content" not in plain.json()["output"][0]
    for foreign in ("gAAAAABo", "penstock1.!", "penstock1./w=="):
        items = [
            {"type": "reasoning", "summary": [], "encrypted_content": foreign},
            {"role": "user", "content": "Hi"},
        ]
        _, request = await answered(here, {"model": MODEL, "input": items}, "Well.", path=RESPONSES)
        assert "(" not in here.prompt_of(request)
