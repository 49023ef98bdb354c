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


def parts_of(path: str, whole: Any) -> list[Any]:
    """The reasoning, the text, and the call's name and arguments of a reply, each from where its API has it."""
    if path == CHAT:
        message = whole["choices"][0]["message"]
        (call,) = message["tool_calls"]
        function = call["function"]
        said = [message["reasoning_content"], message["content"]]
        return [*said, function["name"], json.loads(function["arguments"])]
    if path == RESPONSES:
        reasoning, message, call = whole["output"]
        said = [reasoning["content"][0]["text"], message["content"][0]["text"]]
        return [*said, call["name"], json.loads(call["arguments"])]
    thinking, text, use = whole["content"]
    return [thinking["thinking"], text["text"], use["name"], use["input"]]


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("template", REPLIES)
async def test_each_api_has_reasoning_text_and_call(template: str, path: str) -> None:
    whole = await replied(template, path, REPLIES[template], stream=False, tools=tools_of(path))
    assert parts_of(path, whole) == ["Hm.", "I look.", "clock", {"zone": "UTC"}]


@pytest.mark.parametrize("template", REPLIES)
async def test_a_stream_has_each_in_its_own_deltas(template: str) -> None:
    *chunks, _ = await replied(template, CHAT, REPLIES[template], stream=True, tools=tools_of(CHAT))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
    assert "".join(delta.get("content", "") for delta in deltas) == "I look."
    begun, *more = [delta["tool_calls"][0]["function"] for delta in deltas if "tool_calls" in delta]
    assert begun == {"name": "clock", "arguments": ""}
    assert len(more) > 1
    assert json.loads("".join(part["arguments"] for part in more)) == {"zone": "UTC"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


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
