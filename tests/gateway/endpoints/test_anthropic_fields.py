"""Fields and blocks of Anthropic's API: what becomes of each, and how a refusal is worded."""

from __future__ import annotations

import re
from typing import Any

import anthropic
import pytest

from penstock.gateway.access.keys import Client, digest_of
from penstock.gateway.errors import ApiError
from penstock.gateway.limits import Limits
from penstock.gateway.service import ServiceOptions
from penstock.gateway.store.interface import Quota
from penstock.gateway.wire.anthropic.bodies import MessagesBody, as_chat
from penstock.gateway.wire.schemas import ChatBody
from penstock.gateway.wire.strict import read
from penstock.priority.lanes import Tenant
from tests.gateway.endpoints.test_anthropic_client import connected
from tests.gateway.harness import MODEL, Gateway, client

LIMITS = Limits()
SCHEMA = {"type": "object", "properties": {}}
FORMAT = {"type": "json_schema", "schema": SCHEMA}
TEXT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Once."}}
PARTS = {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "Upon."}]}}
FOUND = {
    "type": "search_result",
    "source": "https://a.example",
    "title": "A",
    "content": [{"type": "text", "text": "Time."}],
}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}}


def body_of(content: object = "Hi", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": content}], **fields}


def result(*blocks: object) -> list[dict[str, object]]:
    return [{"type": "tool_result", "tool_use_id": "a", "content": list(blocks)}]


def chat_of(content: object = "Hi", **fields: Any) -> tuple[ChatBody, list[str]]:
    """Returns the chat, and the fields that are named as ignored."""
    told: list[str] = []
    body = read(MessagesBody, body_of(content, **fields), LIMITS, told.append)
    return as_chat(body, LIMITS), told


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([TEXT], "Once."),
        ([{**TEXT, "title": "Tale", "context": "Old"}], "Tale\nOld\nOnce."),
        ([{**TEXT, "title": None}, {"type": "text", "text": "What?"}], "Once.\nWhat?"),
        ([PARTS], "Upon."),
        ([{"type": "document", "source": {"type": "content", "content": "Upon."}}], "Upon."),
        ([FOUND], "A\nhttps://a.example\nTime."),
        (result(TEXT, FOUND, {"type": "text", "text": "End."}), "Once.\nA\nhttps://a.example\nTime.\nEnd."),
    ],
)
def test_documents_and_search_results_are_text(content: object, text: str) -> None:
    chat, told = chat_of(content)
    assert (chat.messages[0].content, told) == (text, [])


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ([{**TEXT, "citations": {"enabled": True}}] * 2, ["messages[].content[].citations.enabled"]),
        ([{**TEXT, "citations": {"enabled": False}}], []),
        (
            result({**FOUND, "citations": {"enabled": True}}),
            ["messages[].content[].content[].citations.enabled"],
        ),
    ],
)
def test_citations_are_named(content: object, told: list[str]) -> None:
    assert chat_of(content)[1] == told


@pytest.mark.parametrize(
    "fields", [{"output_format": FORMAT}, {"output_config": {"format": FORMAT}}, {"output_format": FORMAT} | {
        "output_config": {"format": FORMAT}
    }]
)  # fmt: skip
def test_the_format_has_two_places(fields: dict[str, Any]) -> None:
    format = chat_of(**fields)[0].response_format
    assert format is not None
    assert format.json_schema is not None
    assert format.json_schema.schema_ == SCHEMA


@pytest.mark.parametrize(
    "fields", [{"mcp_servers": []}, {"container": None}, {"output_config": {"effort": None}}, {"zzz": []}]
)
def test_what_says_nothing_passes(fields: dict[str, Any]) -> None:
    assert chat_of(**fields) == chat_of()


@pytest.mark.parametrize(
    ("content", "fields", "param"),
    [
        ([IMAGE], {}, "messages[0].content[0].type"),
        ([PDF], {}, "messages[0].content[0].source.type"),
        (result(IMAGE), {}, "messages[0].content[0].content[0].type"),
        (result({"type": "tool_reference", "tool_name": "f"}), {}, "messages[0].content[0].content[0].type"),
        ([{"type": "tool_result", "tool_use_id": 7}], {}, "messages[0].content[0].tool_use_id"),
        ([{"type": "text", "text": 7}], {}, "messages[0].content[0].text"),
        ([{"type": "thinking"}], {}, "messages[0].content[0].thinking"),
        ("Hi", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ("Hi", {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ("Hi", {"mcp_servers": [{"name": "a"}]}, "mcp_servers"),
        ("Hi", {"container": "c"}, "container"),
        ("Hi", {"max_tokens": 1.5}, "max_tokens"),
        (
            "Hi",
            {"output_format": FORMAT, "output_config": {"format": {**FORMAT, "schema": {}}}},
            "output_format",
        ),
    ],
)
def test_what_is_refused_by_name(content: object, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as found:
        chat_of(content, **fields)
    assert (found.value.status, found.value.param) == (400, param)
    assert param.rpartition(".")[0] in found.value.message


@pytest.mark.anyio
@pytest.mark.parametrize("num_chars", [600, 10_000])
async def test_a_prompt_that_is_too_long_is_said_to_be_in_anthropics_words(num_chars: int) -> None:
    async with client(Gateway().app) as http:
        reply = await http.post("/v1/messages", json=body_of("x" * num_chars))
    error = reply.json()["error"]
    assert (reply.status_code, error["type"]) == (400, "invalid_request_error")
    found = re.fullmatch(r"prompt is too long: (\d+) tokens > 511 maximum", error["message"])
    assert found is not None
    assert int(found[1]) > 511


@pytest.mark.anyio
async def test_where_a_tenant_stands_is_said_under_anthropics_names() -> None:
    quota = Quota(requests_per_minute=2, tokens_per_minute=1000)
    clients = {digest_of("k"): Client(Tenant(name="ours"), quota)}
    gateway = Gateway(ServiceOptions(models=(MODEL,), clients=clients))
    headers, start = {"x-api-key": "k"}, "anthropic-ratelimit-requests"
    async with client(gateway.app) as http:
        asking = http.post("/v1/messages", json=body_of(), headers=headers)
        reply = await gateway.answering(asking, "Hello")
        assert (reply.headers[f"{start}-limit"], reply.headers[f"{start}-remaining"]) == ("2", "1")
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", reply.headers[f"{start}-reset"])
        assert reply.headers["anthropic-ratelimit-tokens-limit"] == "1000"
        await http.post("/v1/messages/count_tokens", json=body_of(max_tokens=None), headers=headers)
        late = await http.post("/v1/messages", json=body_of(), headers=headers)
        assert (late.status_code, late.headers[f"{start}-remaining"]) == (429, "0")
        models = await http.get("/v1/models", headers=headers)
        assert f"{start}-limit" not in models.headers


@pytest.mark.anyio
async def test_the_package_knows_the_refusal() -> None:
    async with connected(Gateway()) as api:
        tools: Any = [{"type": "web_search_20250305", "name": "web_search"}]
        with pytest.raises(anthropic.BadRequestError, match="has no tools of its own"):
            await api.messages.create(**body_of(tools=tools))
