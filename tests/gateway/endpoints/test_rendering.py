"""Rendered requests, asked for as llm-d and vLLM's own tests do, are the ones that the model would get."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.gateway.service import ServiceOptions
from tests.gateway.endpoints.test_counted import HeldTokenizer
from tests.gateway.endpoints.test_tools import TOOL
from tests.gateway.endpoints.test_tools import gateway as gateway_with_tools
from tests.gateway.harness import MODEL, Gateway, chat_body, client, completion_body

pytestmark = pytest.mark.anyio

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


async def rendered(path: str, body: dict[str, Any], gateway: Gateway | None = None) -> Any:
    async with client((gateway or Gateway()).app) as http:
        reply = await http.post(f"{path}/render", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
        {"tools": [TOOL]},
        {"add_generation_prompt": False},
        {
            "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "We"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
        {"truncate_prompt_tokens": 3},
    ],
)
async def test_a_chats_tokens_are_those_that_the_model_gets(fields: dict[str, Any]) -> None:
    gateway, body = gateway_with_tools(), {**chat_body(), **fields}
    data = await rendered(CHAT, body, gateway)
    async with client(gateway.app) as http:
        asking = asyncio.create_task(http.post(CHAT, json=body))
        request = await gateway.taken()
        gateway.answer(request, "x")
        await asking
    assert tuple(data["token_ids"]) == request.prompt_token_ids
    assert (data["model"], data["features"], data["stream"]) == (MODEL, None, False)
    assert data["request_id"].startswith("chatcmpl-")
    assert data["sampling_params"]["max_tokens"] == request.sampling.max_tokens


async def test_each_prompt_is_rendered() -> None:
    for prompt, num in (("Hello", 1), (["Hello", "Bye"], 2), ([5, 6, 7], 1), ([[5, 6], [7]], 2)):
        data = await rendered(TEXT, completion_body(prompt))
        assert len(data) == num
        assert all(one["request_id"].startswith("cmpl-") and one["token_ids"] for one in data)
    assert data[0]["token_ids"] == [5, 6]
    body = {"model": MODEL, "prompt": "Hi"}
    assert (await rendered(TEXT, body))[0]["sampling_params"]["max_tokens"] == 16


async def test_the_sampling_parameters_are_vllms() -> None:
    fields = {
        "temperature": 0.123,
        "top_p": 0.456,
        "frequency_penalty": 1.1,
        "stop": "END",
        "stop_token_ids": [9, 7],
        "seed": 4,
        "logprobs": True,
        "top_logprobs": 2,
        "max_tokens": 5,
    }
    sampling = (await rendered(CHAT, {**chat_body(), **fields}))["sampling_params"]
    changed = {"stop": ["END"], "stop_token_ids": [7, 9], "logprobs": 2}
    expected = {name: value for name, value in {**fields, **changed}.items() if name != "top_logprobs"}
    assert {name: sampling[name] for name in expected} == expected


async def test_a_stream_is_rendered_whole_and_its_options_are_kept() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    data = await rendered(CHAT, chat_body(stream=True, stream_options=options))
    assert (data["stream"], data["stream_options"]) == (True, options)


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        (CHAT, {"model": "other"}, 404, "model"),
        (TEXT, {"model": "other"}, 404, "model"),
        (CHAT, {"messages": []}, 400, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 600}]}, 400, "messages"),
        (CHAT, {"max_tokens": 507}, 400, "max_tokens"),
        (CHAT, {"temperature": 101}, 400, "temperature"),
        (CHAT, {"use_beam_search": True, "n": 2}, 400, "use_beam_search"),
        (TEXT, {"prompt": []}, 400, "prompt"),
        (TEXT, {"prompt": "x" * 600}, 400, "prompt"),
        (TEXT, {"stop_token_ids": [10_000]}, 400, "stop_token_ids"),
    ],
)
async def test_what_would_be_refused_is_not_rendered(
    path: str, fields: dict[str, Any], status: int, param: str
) -> None:
    body = {**(chat_body() if path == CHAT else completion_body("Hi")), **fields}
    async with client(Gateway().app) as http:
        reply = await http.post(f"{path}/render", json=body)
    assert reply.status_code == status, reply.text
    assert reply.json()["error"]["param"] == param


async def test_long_texts_are_rendered_off_the_loop_and_beside_prompts() -> None:
    tokenizer = HeldTokenizer()
    gateway = Gateway(ServiceOptions(models=(MODEL,)), tokenizer=tokenizer)
    gateway.engine.max_sequence_tokens = 10_000
    async with client(gateway.app) as http:
        body = completion_body("held" + "All work and no play. " * 100)
        held = asyncio.ensure_future(http.post(f"{TEXT}/render", json=body))
        assert await asyncio.to_thread(tokenizer.holds.wait, 30)
        await gateway.answering(http.post(TEXT, json=completion_body("x" * 2000)), "ok")
        tokenizer.go_on.set()
        assert (await held).status_code == 200
