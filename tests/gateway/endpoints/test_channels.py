"""Formats that mixtures of experts brought along, as clients see them: reasoning, text and calls on each API."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from penstock.gateway.service import ServiceOptions
from tests.gateway.endpoints.test_tools import CHAT, RESPONSES, TOOL
from tests.gateway.harness import MODEL, Gateway, client, events, make_tokenizer, settled

MESSAGES = "/v1/messages"
FRAME = "{{ tools | tojson if tools }}{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
HARMONY = (
    FRAME
    + "{# <|channel|>analysis<|message|><|end|> <|channel|>commentary <|channel|>final<|message|><|return|> #}"
    + "<|start|>assistant"
)
MINIMAX = FRAME + "<minimax:tool_call>{# </think> #}<think>\n"
REPLIES = {
    HARMONY: [
        *(
            "<|channel|>",
            "analysis",
            "<|message|>",
            "Hm",
            ".",
            "<|end|>",
            "<|start|>",
            "assistant",
            "<|channel|>",
        ),
        *("comment", "ary", "<|message|>", "I", " look.", "<|end|>", "<|start|>", "assistant", "<|channel|>"),
        *(
            "commentary",
            " to=",
            "functions",
            ".clock ",
            "<|constrain|>",
            "json",
            "<|message|>",
            '{"zone"',
            ': "UT',
            'C"}',
        ),
    ],
    MINIMAX: [
        *(
            "Hm.",
            "\n</th",
            "ink>\n\n",
            "I look.",
            "\n<minimax:",
            "tool_call>\n",
            '<invoke name="',
            'clock">\n<para',
        ),
        *('meter name="zone', '">', "U", "TC</", "parameter>\n", "</invoke>\n", "</minimax:tool_call>"),
    ],
}

pytestmark = pytest.mark.anyio


async def replied(template: str, path: str, texts: list[str], *, stream: bool, **fields: Any) -> Any:
    """The whole body, or all events."""
    here = Gateway(ServiceOptions(models=(MODEL,)), tokenizer=make_tokenizer(template))
    body = {"model": MODEL, "stream": stream, **fields}
    body |= {"input": "Hi"} if path == RESPONSES else {"messages": [{"role": "user", "content": "Hi"}]}
    if path == MESSAGES:
        body |= {"max_tokens": 99}
    async with client(here.app) as http:
        waiting = asyncio.create_task(http.post(path, json=body))
        request = await here.taken()
        for text in texts:
            here.bring(request, text)
            await settled()
        here.finish(request)
        reply = await waiting
    return events(reply.text) if stream else reply.json()


def tools_of(path: str) -> list[Any]:
    function = TOOL["function"]
    return {
        CHAT: [TOOL],
        RESPONSES: [{"type": "function", **function}],
        MESSAGES: [{"name": function["name"], "input_schema": function["parameters"]}],
    }[path]


@pytest.mark.parametrize("template", REPLIES)
async def test_chat(template: str) -> None:
    texts = REPLIES[template]
    whole = await replied(template, CHAT, texts, stream=False, tools=tools_of(CHAT))
    (choice,) = whole["choices"]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "I look.")
    assert choice["finish_reason"] == "tool_calls"
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("clock", {"zone": "UTC"})

    *chunks, _ = await replied(template, CHAT, texts, stream=True, tools=tools_of(CHAT))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
    assert "".join(delta.get("content", "") for delta in deltas) == "I look."
    begun, *more = [delta["tool_calls"][0]["function"] for delta in deltas if "tool_calls" in delta]
    assert begun == {"name": "clock", "arguments": ""}
    assert len(more) > 1
    assert json.loads("".join(part["arguments"] for part in more)) == {"zone": "UTC"}


@pytest.mark.parametrize("template", REPLIES)
async def test_responses(template: str) -> None:
    tools = tools_of(RESPONSES)
    whole = await replied(template, RESPONSES, REPLIES[template], stream=False, tools=tools)
    kinds = ["reasoning", "message", "function_call"]
    assert [item["type"] for item in whole["output"]] == kinds
    reasoning, message, call = whole["output"]
    assert (reasoning["content"][0]["text"], message["content"][0]["text"]) == ("Hm.", "I look.")
    assert (call["name"], json.loads(call["arguments"])) == ("clock", {"zone": "UTC"})
    told = await replied(template, RESPONSES, REPLIES[template], stream=True, tools=tools)
    added = [event["item"]["type"] for event in told if event["type"] == "response.output_item.added"]
    parts = [event["delta"] for event in told if event["type"] == "response.function_call_arguments.delta"]
    assert added == kinds
    assert json.loads("".join(parts)) == {"zone": "UTC"}


@pytest.mark.parametrize("template", REPLIES)
async def test_messages(template: str) -> None:
    tools = tools_of(MESSAGES)
    whole = await replied(template, MESSAGES, REPLIES[template], stream=False, tools=tools)
    thinking, text, use = whole["content"]
    assert (thinking["thinking"], text["text"]) == ("Hm.", "I look.")
    assert (use["name"], use["input"], whole["stop_reason"]) == ("clock", {"zone": "UTC"}, "tool_use")
    told = await replied(template, MESSAGES, REPLIES[template], stream=True, tools=tools)
    begun = [event["content_block"]["type"] for event in told if event["type"] == "content_block_start"]
    assert begun == ["thinking", "text", "tool_use"]


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_channels_without_tools(path: str) -> None:
    texts = [
        "<|channel|>analysis<|message|>Hm.",
        "<|end|><|start|>assistant",
        "<|channel|>final<|mess",
        "age|>Yes.",
    ]
    told = json.dumps(await replied(HARMONY, path, texts, stream=False))
    assert "Hm." in told
    assert "Yes." in told
    assert "<|" not in told
