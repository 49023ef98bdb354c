"""Chat completions with `store: true` by OpenAI's own client: they are listed, shown, changed and forgotten."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import orjson
import pytest

from penstock.engine.planning.request import FinishReason
from penstock.gateway.access.keys import digest_of
from penstock.gateway.service import ServiceOptions
from penstock.priority.lanes import Tenant
from tests.gateway.endpoints.test_openai_client import HI, connected
from tests.gateway.endpoints.test_tools import SAID, TOOL, gateway
from tests.gateway.harness import MODEL, Gateway, chat_body, client, logprobs

pytestmark = pytest.mark.anyio


def stored(api: openai.AsyncOpenAI, **fields: Any) -> Any:
    return api.chat.completions.create(**{"model": MODEL, "messages": HI, "store": True, **fields})


async def streamed(here: Gateway, asking: Any, *texts: str, **fields: Any) -> list[Any]:
    """The chunks of a stream."""
    task = asyncio.ensure_future(asking)
    request = await here.taken()
    for text in texts:
        for index in range(request.n):
            here.bring(request, text, index, **fields)
    for index in range(request.n):
        here.finish(request, index=index)
    return [chunk async for chunk in await task]


async def test_a_completion_is_stored_shown_changed_and_forgotten() -> None:
    here = Gateway()
    async with connected(here) as api:
        made = await here.answering(stored(api, metadata={"of": "a test"}, n=2), "Yes.")
        shown = await api.chat.completions.retrieve(made.id)
        assert shown.to_dict() == {**made.to_dict(), "metadata": {"of": "a test"}}
        changed = await api.chat.completions.update(made.id, metadata={"of": "another"})
        assert (changed.id, changed.metadata) == (made.id, {"of": "another"})
        (message,) = (await api.chat.completions.messages.list(made.id)).data
        assert (message.id, message.role, message.content) == (f"{made.id}-0", "user", "Hi")
        deleted = await api.chat.completions.delete(made.id)
        assert (deleted.id, deleted.deleted) == (made.id, True)
        for asking in (api.chat.completions.retrieve(made.id), api.chat.completions.delete(made.id)):
            with pytest.raises(openai.NotFoundError):
                await asking


@pytest.mark.parametrize("fields", [{"store": False}, {"store": None}, {"store": True, "n": 0}])
async def test_nothing_else_is_stored(fields: Any) -> None:
    here = Gateway()
    async with connected(here) as api:
        asking = stored(api, **fields)
        if "n" in fields:
            with pytest.raises(openai.BadRequestError):
                await asking
        else:
            await here.answering(asking, "Yes.")
        assert not (await api.chat.completions.list()).data


async def test_a_stream_is_stored_as_the_whole_reply_would_be() -> None:
    asked: Any = {"n": 2, "logprobs": True, "top_logprobs": 1}
    told = [logprobs((7, -0.5))]
    here = Gateway()
    async with connected(here) as api:
        whole = asyncio.ensure_future(stored(api, **asked))
        request = await here.taken()
        for text in ("Hel", "lo"):
            for index in range(2):
                here.bring(request, text, index, logprobs=told)
        for index in range(2):
            here.finish(request, index=index)
        made = await whole
        usage: Any = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = await streamed(here, stored(api, **asked, **usage), "Hel", "lo", logprobs=told)
        shown = await api.chat.completions.retrieve(chunks[0].id)
    same = {"choices", "usage", "object", "model", "service_tier"}
    assert shown.model_dump(include=same) == made.model_dump(include=same)


async def test_metadata_is_named_where_nothing_comes_of_it() -> None:
    here = Gateway()
    async with client(here.app) as http:
        cases: list[tuple[dict[str, Any], str | None]] = [
            ({"store": True}, None),
            ({}, "metadata"),
            ({"store": False}, "metadata"),
        ]
        for fields, named in cases:
            asking = http.post("/v1/chat/completions", json=chat_body(metadata={"k": "v"}, **fields))
            reply = await here.answering(asking, "Yes.")
            assert reply.headers.get("x-penstock-ignored") == named


async def test_reasoning_and_calls_of_a_stream_are_put_together() -> None:
    here = gateway()
    async with connected(here) as connection:
        api: Any = connection
        made = await here.answering(stored(api, tools=[TOOL]), *SAID)
        chunks = await streamed(here, stored(api, tools=[TOOL], stream=True), *SAID)
        (shown,) = (await api.chat.completions.retrieve(chunks[0].id)).to_dict()["choices"]
    (expected,) = made.to_dict()["choices"]
    assert shown["message"]["tool_calls"][0].pop("id").startswith("call_")
    del expected["message"]["tool_calls"][0]["id"]
    assert shown == expected
    assert expected["message"]["reasoning_content"] == "Hm."


@pytest.mark.parametrize("stream", [True, False])
async def test_a_recorded_completion_is_stored_although_its_client_is_gone(stream: bool) -> None:
    here = Gateway()
    asked: Any = {"extra_headers": {"Idempotency-Key": "1"}, "metadata": {"k": "v"}, "stream": stream}
    async with connected(here) as api:
        asking = asyncio.ensure_future(stored(api, **asked))
        request = await here.taken()
        if stream:
            here.bring(request, "Hel")
            await (await asking).close()
        else:
            asking.cancel()
        here.answer(request, *(("lo",) if stream else ("Hel", "lo")))
        await asyncio.gather(*here.service.recordings._settling.values())
        shown = await api.chat.completions.retrieve(request.request_id)
    assert shown.choices[0].message.content == "Hello"
    assert (shown.metadata, shown.usage and shown.usage.completion_tokens) == ({"k": "v"}, 2)


async def test_the_body_is_read_once_and_the_reply_never(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[bytes] = []
    loads = orjson.loads

    def noting(text: bytes) -> Any:
        read.append(text)
        return loads(text)

    monkeypatch.setattr(orjson, "loads", noting)
    here = Gateway()
    async with connected(here) as api:
        await streamed(here, stored(api, stream=True), "Yes.")
    assert [b'"store"' in text for text in read] == [True]


async def test_a_stream_that_fails_is_not_stored() -> None:
    here = Gateway()
    async with connected(here) as api:
        asking = asyncio.ensure_future(stored(api, stream=True))
        request = await here.taken()
        here.bring(request, "x")
        stream = await asking
        here.finish(request, reason=FinishReason.FAILED, error="logits were not finite")
        with pytest.raises(openai.APIError, match="not finite"):
            [chunk async for chunk in stream]
        assert not (await api.chat.completions.list()).data


async def test_a_list_has_pages_an_order_and_filters() -> None:
    here = Gateway(ServiceOptions(models=(MODEL, "other")))
    async with connected(here) as api:
        asked: list[Any] = [{"metadata": {"k": "1"}}, {"model": "other"}, {"metadata": {"k": "1", "l": "2"}}]
        ids = [(await here.answering(stored(api, **fields), "Yes.")).id for fields in asked]
        assert [one.id async for one in api.chat.completions.list(limit=1)] == ids
        assert [one.id async for one in api.chat.completions.list(order="desc")] == ids[::-1]
        assert [one.id async for one in api.chat.completions.list(model="other")] == ids[1:2]
        assert [one.id async for one in api.chat.completions.list(metadata={"k": "1"})] == ids[::2]
        assert [one.id async for one in api.chat.completions.list(metadata={"k": "1", "l": "2"})] == ids[2:]
        with pytest.raises(openai.BadRequestError, match="There is no item"):
            await api.chat.completions.list(after="x")


async def test_stored_completions_are_their_tenants_own() -> None:
    clients = {digest_of(name): Tenant(name=name) for name in ("a", "b")}
    here = Gateway(ServiceOptions(models=(MODEL,), clients=clients))
    async with connected(here, api_key="a") as api:
        made = await here.answering(stored(api), "Yes.")
        other = api.with_options(api_key="b")
        assert not (await other.chat.completions.list()).data
        for asking in (
            other.chat.completions.retrieve(made.id),
            other.chat.completions.update(made.id, metadata={}),
            other.chat.completions.delete(made.id),
            other.chat.completions.messages.list(made.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await asking
        assert (await api.chat.completions.retrieve(made.id)).id == made.id


async def test_parts_of_a_message_are_told_apart_from_text() -> None:
    here = Gateway()
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    async with connected(here) as api:
        made = await here.answering(stored(api, messages=messages), "Yes.")
        (message,) = (await api.chat.completions.messages.list(made.id)).data
    assert (message.content, [part.type for part in message.content_parts or ()]) == (None, ["text"])


UNKNOWN = "/v1/chat/completions/chatcmpl-" + 32 * "0"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param"),
    [
        ("GET", "/v1/chat/completions?limit=0", None, 400, "limit"),
        ("GET", "/v1/chat/completions?more=0", None, 400, "more"),
        ("GET", f"{UNKNOWN}/messages", None, 404, "id"),
        ("GET", "/v1/chat/completions/x/messages", None, 404, "id"),
        ("POST", UNKNOWN, {"metadata": {}}, 404, "id"),
        ("POST", UNKNOWN, {}, 400, "metadata"),
        ("POST", UNKNOWN, {"metadata": {"k" * 65: "v"}}, 400, "metadata"),
        ("POST", "/v1/chat/completions", chat_body(store=True, metadata={"k" * 65: "v"}), 400, "metadata"),
        ("POST", "/v1/chat/completions", chat_body(store=True, metadata={"k": 1}), 400, "metadata.k"),
    ],
)
async def test_what_is_refused(method: str, path: str, body: Any, status: int, param: str) -> None:
    async with client(Gateway().app) as http:
        reply = await http.request(method, path, json=body)
    assert reply.status_code == status, reply.text
    assert reply.json()["error"]["param"] == param


async def test_what_is_stored_has_as_many_log_probabilities_as_other_replies_that_are_kept() -> None:
    here = Gateway()
    asked: Any = {"logprobs": True, "top_logprobs": 20, "store": True, "max_completion_tokens": 2_000}
    here.engine.max_sequence_tokens = 4_000
    async with client(here.app) as http:
        for stream in (False, True):
            refused = await http.post("/v1/chat/completions", json=chat_body(**asked, stream=stream))
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_completion_tokens")
