"""Fields of Ollama's API: zeros of Go's types, special values of options, long chats, and models that are there."""

from __future__ import annotations

import asyncio
from typing import Any

import ollama
import pytest

from penstock.engine.planning.request import Request
from penstock.gateway.service import ServiceOptions
from tests.gateway.endpoints.test_ollama_client import connected
from tests.gateway.harness import MODEL, TEMPLATE, Gateway, client, make_tokenizer

pytestmark = pytest.mark.anyio

HI = {"role": "user", "content": "Hi"}
CHAT, GENERATE = "/api/chat", "/api/generate"
MESSAGE_ZEROS = {"thinking": "", "images": None, "tool_calls": None, "tool_name": "", "tool_call_id": ""}
# Every field of the structs in Ollama's api/types.go, with Go's zero of its type.
ZEROS: dict[str, dict[str, Any]] = {
    CHAT: {
        "model": MODEL,
        "messages": [{**HI, **MESSAGE_ZEROS}],
        **dict.fromkeys(("stream", "format", "keep_alive", "tools", "options", "think", "truncate", "shift")),
        **{"_debug_render_only": False, "logprobs": False, "top_logprobs": 0},
    },
    GENERATE: {
        "model": MODEL,
        "prompt": "Hi",
        **dict.fromkeys(("suffix", "system", "template"), ""),
        **{"context": [], "images": []},
        **dict.fromkeys(("stream", "format", "keep_alive", "options", "think", "truncate", "shift")),
        **{"raw": False, "_debug_render_only": False, "logprobs": False, "top_logprobs": 0},
    },
    "/api/embed": {
        "model": MODEL,
        "input": "Hi",
        "dimensions": 0,
        **dict.fromkeys(("keep_alive", "truncate", "options")),
    },
    "/api/embeddings": {"model": MODEL, "prompt": "Hi", "keep_alive": None, "options": None},
}
SHOW = {"model": MODEL, "system": "", "template": "", "verbose": False, "options": None, "name": ""}
PULL = {"model": MODEL, "insecure": False, "username": "", "password": "", "stream": False, "name": ""}
CREATE = {
    "model": MODEL,
    "stream": False,
    **dict.fromkeys(
        ("quantize", "draft_quantize", "from", "remote_host", "template", "system", "renderer", "parser"), ""
    ),
    **dict.fromkeys(("files", "draft_files", "adapters", "license", "parameters", "messages", "info")),
    **dict.fromkeys(("requires", "name", "quantization"), ""),
}


async def requested(path: str, body: dict[str, Any], gateway: Gateway | None = None) -> Request:
    """Returns the request that the engine gets."""
    gateway = gateway or Gateway()
    async with client(gateway.app) as http:
        asking = asyncio.create_task(http.post(path, json=body))
        taken = asyncio.create_task(gateway.taken())
        await asyncio.wait([asking, taken], return_when=asyncio.FIRST_COMPLETED)
        assert taken.done(), (await asking).text
        asking.cancel()
    return taken.result()


@pytest.mark.parametrize("path", ZEROS)
async def test_zeros_are_not_given(path: str) -> None:
    body = {name: value for name, value in ZEROS[path].items() if value or name == "messages"}
    plain, zeros = await requested(path, body), await requested(path, ZEROS[path])
    assert plain.prompt_token_ids == zeros.prompt_token_ids
    assert plain.sampling.max_tokens == zeros.sampling.max_tokens


@pytest.mark.parametrize(
    ("given", "system"),
    [({"system": "Be brief."}, "Be brief."), ({"system": ""}, "Be yourself."), ({}, "Be yourself.")],
)
async def test_a_prompt_has_the_system_of_its_body_or_else_of_the_template(
    given: dict[str, str], system: str
) -> None:
    default = "{% if messages[0].role != 'system' %}<|system|>Be yourself.<|end|>{% endif %}"
    gateway = Gateway(tokenizer=make_tokenizer(default + TEMPLATE))
    request = await requested(GENERATE, {"model": MODEL, "prompt": "Hi", **given}, gateway)
    prompt = gateway.prompt_of(request).replace("<|bos|>", "")
    assert prompt == f"<|system|>{system}<|end|><|user|>Hi<|end|><|assistant|>"


@pytest.mark.parametrize(("path", "body"), [("show", SHOW), ("pull", PULL), ("create", CREATE)])
async def test_zeros_of_bodies_about_models(path: str, body: dict[str, Any]) -> None:
    async with client(Gateway().app) as http:
        assert (await http.post(f"/api/{path}", json=body)).status_code == 200


async def test_roles_calls_and_tools_as_go_writes_them() -> None:
    call = {"id": "", "function": {"index": 0, "name": "f", "arguments": None}}
    parameters = {"type": "", "properties": None}
    tools = [
        {"type": "", "items": None, "function": {"name": "f", "description": "", "parameters": parameters}}
    ]
    messages = [
        {**HI, "role": "USER"},
        {"role": "Assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_name": "f"},
    ]
    async with client(Gateway().app) as http:
        reply = await http.post(CHAT, json={"model": MODEL, "messages": messages, "tools": tools})
    # The harness's template takes no tools, which is said once all of this was understood.
    assert (reply.status_code, reply.json()) == (400, {"error": "This model's chat template takes no tools."})


# Options


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        ({"num_predict": 5}, "max_tokens", 5),
        ({"num_predict": 5.0}, "max_tokens", 5),
        ({"num_predict": 0, "num_ctx": 8192.0, "num_gpu": -1}, "max_tokens", 506),
        ({"num_predict": -1, "draft_num_predict": 4}, "max_tokens", 506),
        ({"num_predict": -2}, "max_tokens", 506),
        ({"top_k": 0}, "top_k", 0),
        ({"top_k": 40.0}, "top_k", 40),
        ({"top_p": 0}, "top_p", 1e-6),
        ({"temperature": 0}, "temperature", 0),
        ({"temperature": 2.5}, "temperature", 2.5),
        ({"seed": 0}, "seed", 0),
        ({"seed": 7.0}, "seed", 7),
        ({"repeat_penalty": 1.5, "repeat_last_n": -1}, "repetition_penalty", 1.5),
        ({"repeat_penalty": 1.5, "repeat_last_n": 0.0}, "repetition_penalty", 1),
    ],
)
async def test_special_values(options: dict[str, Any], name: str, value: float) -> None:
    request = await requested(CHAT, {"model": MODEL, "messages": [HI], "options": options})
    assert getattr(request.sampling, name) == value


@pytest.mark.parametrize("path", [CHAT, GENERATE])
async def test_a_seed_of_minus_one_is_another_each_time(path: str) -> None:
    body = {**ZEROS[path], "options": {"seed": -1}}
    seeds = {(await requested(path, body)).sampling.seed for _ in range(4)}
    assert len(seeds) == 4


@pytest.mark.parametrize("keep_alive", [-1, 0, "-1", "5m", 300.5])
async def test_the_model_stays_whatever_is_said(keep_alive: object) -> None:
    await requested(CHAT, {"model": MODEL, "messages": [HI], "keep_alive": keep_alive})


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        (CHAT, {"options": {"num_predict": -3}}, "options.num_predict"),
        (CHAT, {"options": {"num_ctx": 8192.5}}, "options.num_ctx"),
        (CHAT, {"options": {"mirostat": 2}}, "options.mirostat"),
        (CHAT, {"think": "deeply"}, "think"),
        (CHAT, {"_debug_render_only": True}, "_debug_render_only"),
        (GENERATE, {"images": ["aaaa"]}, "images"),
        (GENERATE, {"template": "{{ .Prompt }}"}, "template"),
        ("/api/create", {"system": "Be brief."}, "system"),
        ("/api/create", {"from": "another"}, "another"),
        ("/api/copy", {"source": MODEL, "destination": "another"}, "destination"),
        ("/api/copy", {"source": "another", "destination": MODEL}, "another"),
        ("/api/pull", {"model": "another"}, "another"),
    ],
)
async def test_what_is_refused_by_name(path: str, fields: dict[str, Any], named: str) -> None:
    body = fields if path == "/api/copy" else {**ZEROS.get(path, {"model": MODEL}), **fields}
    async with client(Gateway().app) as http:
        reply = await http.post(path, json=body)
    assert reply.status_code == (404 if named == "another" else 400)
    assert named in reply.json()["error"]


# Long chats: the harness has 512 tokens of context, a byte each


def turn(number: int, num_chars: int = 110) -> list[dict[str, str]]:
    asked = {"role": "user", "content": f"{number}" * num_chars}
    return [asked, {"role": "assistant", "content": f"{number}!"}]


LONG = [{"role": "system", "content": "Be brief."}, *turn(1), *turn(2), *turn(3), *turn(4), *turn(5), HI]


@pytest.mark.parametrize("fields", [{}, {"truncate": True}, {"truncate": None, "shift": False}])
async def test_the_oldest_turns_of_a_chat_go_first(fields: dict[str, Any]) -> None:
    gateway = Gateway()
    prompt = gateway.prompt_of(await requested(CHAT, {"model": MODEL, "messages": LONG, **fields}, gateway))
    assert prompt.startswith("<|bos|><|system|>Be brief.<|end|><|user|>333")
    assert prompt.endswith("<|user|>Hi<|end|><|assistant|>")


async def test_a_chat_that_fits_stays_whole() -> None:
    gateway = Gateway()
    prompt = gateway.prompt_of(await requested(CHAT, {"model": MODEL, "messages": [*LONG[:7], HI]}, gateway))
    assert "111" in prompt


async def test_a_chat_far_beyond_the_context_is_cut_as_well() -> None:
    gateway = Gateway()
    messages = [*turn(1, 20_000), *LONG]
    prompt = gateway.prompt_of(await requested(CHAT, {"model": MODEL, "messages": messages}, gateway))
    assert prompt.startswith("<|bos|><|system|>Be brief.<|end|><|user|>333")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": LONG, "truncate": False}),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 600}]}),
        (GENERATE, {"prompt": "x" * 600, "truncate": False}),
        (GENERATE, {"prompt": "Hi", "context": [9] * 512, "truncate": False}),
        (GENERATE, {"prompt": "x" * 600, "raw": True, "truncate": False}),
    ],
)
async def test_what_may_not_be_cut_is_refused(path: str, fields: dict[str, Any]) -> None:
    async with client(Gateway().app) as http:
        reply = await http.post(path, json={"model": MODEL, **fields})
    assert reply.status_code == 400
    assert "maximum context length is 512 tokens" in reply.json()["error"]


@pytest.mark.parametrize("fields", [{}, {"raw": True}, {"context": [9] * 600}])
@pytest.mark.parametrize("num_chars", [600, 20_000])
async def test_a_prompt_loses_its_beginning(fields: dict[str, Any], num_chars: int) -> None:
    gateway, body = Gateway(), {"model": MODEL, "prompt": "x" * num_chars + "end", **fields}
    request = await requested(GENERATE, body, gateway)
    assert request.num_prompt_tokens == 512 - 512 // 8
    assert "end" in gateway.prompt_of(request)
    assert "<|bos|>" not in gateway.prompt_of(request)


# Models, and the greeting


async def test_a_model_that_is_there_is_pulled_at_once() -> None:
    async with connected(Gateway(ServiceOptions(models=(MODEL, "other")))) as api:
        assert (await api.pull(f"{MODEL}:latest")).status == "success"
        assert [part.status async for part in await api.pull(MODEL, stream=True)] == ["success"]
        assert (await api.create(MODEL, from_="other")).status == "success"
        assert (await api.copy(MODEL, "other")).status == "success"
        with pytest.raises(ollama.ResponseError, match="another"):
            await api.pull("another")
