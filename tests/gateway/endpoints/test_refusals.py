"""Every 4xx: OpenAI's error object, naming the field."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest

from penstock.gateway.limits import Limits
from penstock.gateway.service import ServiceOptions
from tests.gateway.harness import MODEL, Gateway, chat_body, client, completion_body, make_tokenizer

pytestmark = pytest.mark.anyio

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


async def post(path: str, body: Any, gateway: Gateway | None = None, **kwargs: Any) -> Any:
    gateway = gateway or Gateway()
    async with client(gateway.app) as http:
        response = await asyncio.wait_for(http.post(path, json=body, **kwargs), 10)
    assert sum(gateway.queue.depths().values()) == 0
    return response


def error_of(response: Any, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert response.headers["x-request-id"]
    return error


WRONG_CHAT = [
    ({"temperature": 100.1}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"min_p": 1.5}, "min_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"seed": "x"}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": "2"}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 3}, "max_tokens"),
    ({"max_tokens": 507}, "max_tokens"),
    ({"max_completion_tokens": 507}, "max_completion_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "x" * 257}, "stop"),
    ({"stop": 7}, "stop"),
    ({"stop": [7]}, "stop[0]"),
    ({"stop_token_ids": [10_000]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"10000": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"logprobs": 1}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"stream": True, "stream_options": {"include_obfuscation": 1}}, "stream_options.include_obfuscation"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"tools": [7]}, "tools[0]"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"moderation": {}}, "moderation"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"reasoning_effort": 1}, "reasoning_effort"),
    ({"thinking_token_budget": -2}, "thinking_token_budget"),
    ({"thinking_token_budget": 1.5}, "thinking_token_budget"),
    ({"thinking_token_budget": "9"}, "thinking_token_budget"),
    ({"thinking_budget_tokens": True}, "thinking_budget_tokens"),
    ({"thinking_token_budget": 9, "thinking_budget_tokens": 9}, "thinking_budget_tokens"),
    ({"modalities": ["audio"]}, "modalities[0]"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}},
        "response_format.json_schema.name",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
        "response_format.json_schema.schema",
    ),
    ({"structured_outputs": {}, "guided_regex": "("}, "guided_regex"),
    ({"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a"] * 1025}}, "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    (
        {"structured_outputs": {"json": {"type": "integer", "minimum": 2, "maximum": 1}}},
        "structured_outputs.json",
    ),
    ({"structured_outputs": {"disable_fallback": True}}, "structured_outputs.disable_fallback"),
    ({"guided_json": 7}, "guided_json"),
    ({"guided_choice": ["a"], "response_format": {"type": "json_object"}}, "guided_choice"),
    ({"store": 1}, "store"),
    ({"temprature": 1}, "temprature"),
    ({"model": ""}, "model"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "critic", "content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": "Hi"}] * 2049}, "messages"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 257}]},
        "messages[0].content",
    ),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 9000}]}, "messages"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG_CHAT)
async def test_a_wrong_chat_is_refused_by_field(fields: dict[str, Any], param: str) -> None:
    error = error_of(await post(CHAT, {**chat_body(), **fields}))
    assert error["param"] == param, error
    assert error["type"] == "invalid_request_error"
    assert param in error["message"] or error["code"] in ("invalid_value", "context_length_exceeded")


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"stream_options": 1}, "Input should be an object."),
        ({"tools": {}}, "Input should be an array."),
        ({"stop": 7}, "Input should be a string or an array."),
        ({"messages": []}, "Input should have at least 1 item, not 0."),
        ({"tool_choice": 1}, "Input should be 'none', 'auto' or 'required'."),
    ],
)
async def test_what_would_be_right_is_said_in_the_words_of_json(fields: dict[str, Any], wanted: str) -> None:
    error = error_of(await post(CHAT, {**chat_body(), **fields}))
    assert error["message"].endswith(wanted)


async def test_of_several_types_the_one_that_was_meant_is_spoken_of() -> None:
    error = error_of(await post("/v1/responses", {"model": MODEL, "input": []}))
    assert error["message"] == "Invalid 'input': Input should have at least 1 item, not 0."


WRONG_COMPLETIONS = [
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1, "x"]}, "prompt"),
    ({"prompt": 7}, "prompt"),
    ({"prompt": [10_000]}, "prompt"),
    ({"prompt": [1, -1]}, "prompt"),
    ({"prompt": [5] * 600}, "prompt"),
    ({"prompt": "x" * 600}, "prompt"),
    ({"prompt": ["x"] * 65}, "prompt"),
    ({"prompt": ["x"] * 64, "n": 3}, "n"),
    ({"best_of": 129}, "best_of"),
    ({"prompt": ["x"] * 64, "best_of": 3}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"messages": [{}]}, "messages"),
    ({"max_tokens": 512}, "max_tokens"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG_COMPLETIONS)
async def test_a_wrong_completion_is_refused_by_field(fields: dict[str, Any], param: str) -> None:
    allowed = Gateway(ServiceOptions(models=(MODEL,), limits=Limits(max_prompts=64)))
    error = error_of(await post(COMPLETIONS, {**completion_body("ab"), **fields}, allowed))
    assert (error["param"] or "").split("[")[0] == param, error


async def test_what_is_missing_is_named() -> None:
    error = error_of(await post(CHAT, {"model": MODEL}))
    assert (error["param"], error["code"]) == ("messages", "missing_required_parameter")


@pytest.mark.parametrize("field", ["tools", "tool_choice", "suffix", "functions"])
async def test_null_asks_for_nothing(field: str) -> None:
    path, body = (
        (COMPLETIONS, completion_body("x" * 600)) if field == "suffix" else (CHAT, chat_body("x" * 600))
    )
    error = error_of(await post(path, {**body, field: None}))
    assert error["param"] in ("prompt", "messages")


async def test_too_long_a_prompt_has_its_own_code() -> None:
    for body in (chat_body("x" * 600), chat_body("x" * 9000), chat_body(max_tokens=600)):
        assert error_of(await post(CHAT, body))["code"] == "context_length_exceeded"


async def test_a_prompt_far_too_long_is_not_tokenised() -> None:
    gateway = Gateway()

    def encode(*_: object, **__: object) -> list[int]:
        raise AssertionError("tokenised")

    gateway.service.tokenizer.encode = encode  # type: ignore[method-assign]
    error_of(await post(CHAT, chat_body("x" * 512 * 17), gateway))
    error_of(await post(COMPLETIONS, completion_body("x" * 512 * 17), gateway))


async def test_an_unknown_model_is_a_404() -> None:
    error = error_of(await post(CHAT, chat_body(model="gpt-9")), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")


async def test_a_model_without_a_template_has_no_chat() -> None:
    error = error_of(await post(CHAT, chat_body(), Gateway(tokenizer=make_tokenizer(None))))
    assert (error["param"], error["code"]) == ("messages", "no_chat_template")


async def test_what_the_template_says_reaches_the_client() -> None:
    gateway = Gateway(tokenizer=make_tokenizer("{{ raise_exception('roles must alternate') }}"))
    error = error_of(await post(CHAT, chat_body(), gateway))
    assert error["param"] == "messages"
    assert "roles must alternate" in error["message"]


@pytest.mark.parametrize(
    "content",
    [b"{", b"", b"[]", b'"x"', b"\xff\xfe", b'{"n": NaN}', b'{"n": ' + b"9" * 5000 + b"}", b"{} {}"],
)
async def test_what_is_no_json_object_is_refused(content: bytes) -> None:
    async with client(Gateway().app) as http:
        response = await http.post(CHAT, content=content, headers={"content-type": "application/json"})
    assert error_of(response)["code"] == "invalid_json"


async def test_deep_json_is_refused_before_it_is_parsed() -> None:
    content = b'{"messages":' + b"[" * 10_000
    async with client(Gateway().app) as http:
        response = await http.post(CHAT, content=content, headers={"content-type": "application/json"})
    assert error_of(response)["code"] == "json_too_deep"


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_only_json_is_taken(media_type: str) -> None:
    async with client(Gateway().app) as http:
        content = json.dumps(chat_body())
        response = await http.post(CHAT, content=content, headers={"content-type": media_type})
    assert error_of(response, 415)["code"] == "unsupported_media_type"


async def test_a_compressed_body_is_not_taken() -> None:
    async with client(Gateway().app) as http:
        headers = {"content-type": "application/json", "content-encoding": "gzip"}
        response = await http.post(CHAT, content=gzip.compress(b"{}"), headers=headers)
    error = error_of(response, 415)
    assert error["code"] == "unsupported_content_encoding"
    assert "'Content-Encoding: gzip'" in error["message"]


async def test_a_body_that_is_too_long_is_refused_declared_or_not() -> None:
    options = ServiceOptions(models=(MODEL,), limits=Limits(max_body_bytes=1000))
    headers = {"content-type": "application/json"}

    async def pieces() -> Any:
        for _ in range(20):
            yield b"x" * 100

    for content in (b"x" * 1001, pieces()):
        async with client(Gateway(options).app) as http:
            response = await http.post(CHAT, content=content, headers=headers)
        assert error_of(response, 413)["code"] == "body_too_large"


@pytest.mark.parametrize(
    "headers", [{"x": "y" * 40_000}, {f"x-{i}": "y" for i in range(101)}, {"content-length": "-1"}]
)
async def test_headers_are_bounded(headers: dict[str, str]) -> None:
    async with client(Gateway().app) as http:
        response = await http.get("/v1/models", headers=headers)
    assert response.status_code in (413, 431)
    assert response.json()["error"]["code"] in ("headers_too_large", "body_too_large")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "unknown_url"),
        ("GET", "/v1/models/", 404, "model_not_found"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("OPTIONS", CHAT, 405, "method_not_allowed"),
        ("POST", CHAT + "/", 404, "unknown_url"),
    ],
)
async def test_unknown_urls_and_methods(method: str, path: str, status: int, code: str) -> None:
    async with client(Gateway().app) as http:
        response = await http.request(method, path)
    assert error_of(response, status)["code"] == code
    assert status != 405 or response.headers["allow"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_harmless_fields_change_nothing(path: str) -> None:
    harmless = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "service_tier": None,
        "stop": None,
        "logit_bias": None,
    }
    too_long = chat_body("x" * 600) if path == CHAT else completion_body("x" * 600)
    # Whatever is refused now is refused for its length alone.
    assert error_of(await post(path, {**too_long, **harmless}))["code"] == "context_length_exceeded"


@pytest.mark.parametrize("field", ["user", "stop", "metadata"])
async def test_half_a_character_is_refused_wherever_it_is(field: str) -> None:
    half = {"metadata": {"a": "\ud800"}}.get(field, "\ud800")
    content = json.dumps({**chat_body(), field: half})
    headers = {"content-type": "application/json", "idempotency-key": "k"}
    async with client(Gateway().app) as http:
        response = await http.post(CHAT, content=content, headers=headers)
    assert error_of(response)["code"] == "invalid_json"


@pytest.mark.parametrize("name", ["int", "str", "none", "list[x]", "function-f"])
async def test_an_unknown_field_is_named_whatever_its_name(name: str) -> None:
    async with client(Gateway().app) as http:
        error = (await http.post("/v1/chat/completions", json={**chat_body(), name: 1})).json()["error"]
    assert (error["param"], error["code"]) == (name, "unknown_parameter")


async def test_a_model_may_have_a_name_of_one_letter() -> None:
    async with client(Gateway(ServiceOptions(models=("m",))).app) as http:
        refused = await http.post(CHAT, json=chat_body(model="m", n=0))
    assert refused.json()["error"]["param"] == "n"
