"""Replies in every API's format can be followed again, and a key that is sent twice brings one reply."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from penstock.engine.planning.request import Request
from penstock.gateway.errors import internal
from penstock.gateway.sessions.recordings.kinds import CHAT, MESSAGE, TEXT
from penstock.priority.lanes import DEFAULT_POLICIES, Lane
from tests.clock import Clock
from tests.gateway.harness import MODEL, Gateway, chat_body, client, completion_body, serving, settled
from tests.gateway.raw_http import connect, get, post
from tests.gateway.sessions.recordings.orphaning_store import OrphaningStore

pytestmark = pytest.mark.anyio

RESUMABLE = "x-penstock-resumable: true"
HI: Any = [{"role": "user", "content": "Hi"}]


def events_of(stream: bytes) -> list[tuple[str, bytes]]:
    """The numbered events: their numbers, and all of their bytes."""
    blocks = [block + b"\n\n" for block in stream.split(b"\n\n") if block.startswith(b"id: ")]
    return [(block.split(b"\n")[0].removeprefix(b"id: ").decode(), block) for block in blocks]


def lines_of(stream: bytes) -> list[tuple[str, bytes]]:
    lines = [line + b"\n" for line in stream.split(b"\n") if line]
    return [(str(json.loads(line)["sequence_number"]), line) for line in lines]


def of_chat(data: Any) -> str:
    return "".join(choice["delta"].get("content", "") for choice in data["choices"])


@dataclass(frozen=True)
class Api:
    path: str
    body: dict[str, Any]
    numbered: Callable[[bytes], list[tuple[str, bytes]]]
    text: Callable[[Any], str]
    """What the data of one event says."""


APIS = {
    CHAT: Api(
        "/v1/chat/completions",
        chat_body(),
        events_of,
        of_chat,
    ),
    TEXT: Api(
        "/v1/completions",
        completion_body(),
        events_of,
        lambda data: "".join(choice["text"] for choice in data["choices"]),
    ),
    MESSAGE: Api(
        "/v1/messages",
        {"model": MODEL, "messages": HI, "max_tokens": 9},
        events_of,
        lambda data: data.get("delta", {}).get("text", ""),
    ),
    "ollama's chat": Api(
        "/api/chat",
        {"model": MODEL, "messages": HI},
        lines_of,
        lambda data: data["message"]["content"],
    ),
    "ollama's generate": Api(
        "/api/generate",
        {"model": MODEL, "prompt": "Hi"},
        lines_of,
        lambda data: data["response"],
    ),
}


def data_of(frame: bytes) -> Any:
    (data,) = [line for line in frame.decode().splitlines() if line.startswith(("data: ", "{"))]
    return json.loads(data.removeprefix("data: "))


def said(api: Api, frames: list[tuple[str, bytes]]) -> str:
    return "".join(api.text(data_of(frame)) for _, frame in frames)


async def streamed(gateway: Gateway, url: str, api: Api, *texts: str) -> tuple[Request, bytes]:
    """A resumable stream that was read to its end."""
    async with connect(url) as connection:
        connection.send(post(api.path, {**api.body, "stream": True}, RESUMABLE))
        request = await gateway.taken()
        for text in texts[:-1]:
            gateway.bring(request, text)
            await settled()
        gateway.finish(request, texts[-1])
        return request, (await connection.answer()).body


@pytest.mark.parametrize("name", APIS)
async def test_from_every_event_on_the_rest_is_the_same(name: str) -> None:
    gateway, api = Gateway(), APIS[name]
    async with serving(gateway.app) as url, connect(url) as connection:
        request, stream = await streamed(gateway, url, api, "a", "", "b", "c")
        frames = api.numbered(stream)
        assert [int(number) for number, _ in frames] == list(range(len(frames)))
        assert said(api, frames) == "abc"
        for position in range(-1, len(frames)):
            connection.send(get(f"{api.path}/{request.request_id}?starting_after={position}"))
            answer = await connection.answer()
            assert answer.body == stream[sum(len(frame) for _, frame in frames[: position + 1]) :]
        connection.send(get(f"{api.path}/{request.request_id}", "last-event-id: 1"))
        assert api.numbered((await connection.answer()).body) == frames[2:]


@pytest.mark.parametrize("name", APIS)
async def test_a_reply_goes_on_without_its_client_and_is_followed_again(name: str) -> None:
    gateway, api = Gateway(), APIS[name]
    async with serving(gateway.app) as url:
        async with connect(url) as connection:
            connection.send(post(api.path, {**api.body, "stream": True}, RESUMABLE))
            request = await gateway.taken()
            gateway.bring(request, "a")
            await connection.head()
            first = await connection.chunk()
            while api.text(data_of(api.numbered(first)[-1][1])) != "a":
                first += await connection.chunk()
            connection.hang_up()
        gateway.bring(request, "b")
        async with connect(url) as connection:
            number = api.numbered(first)[-1][0]
            connection.send(get(f"{api.path}/{request.request_id}?starting_after={number}"))
            await connection.head()
            gateway.bring(request, "c")
            gateway.finish(request, "d")
            rest = await connection.chunked()
    assert gateway.engine.cancelled == []
    assert said(api, api.numbered(rest)) == "bcd"
    assert [int(n) for n, _ in api.numbered(first + rest)] == list(range(len(api.numbered(first + rest))))


@pytest.mark.parametrize("name", APIS)
async def test_who_did_not_ask_gets_no_numbers_and_is_cancelled_when_gone(name: str) -> None:
    gateway, api = Gateway(), APIS[name]
    async with serving(gateway.app) as url, connect(url) as connection:
        connection.send(post(api.path, {**api.body, "stream": True}))
        request = await gateway.taken()
        gateway.bring(request, "a")
        await connection.head()
        first = await connection.chunk()
        assert b"id: " not in first
        assert b"sequence_number" not in first
        connection.hang_up()
        await gateway.left()
    assert gateway.engine.cancelled == [request.request_id]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", APIS)
async def test_a_key_twice_is_one_reply(name: str, stream: bool) -> None:
    gateway, api = Gateway(), APIS[name]
    body = {**api.body, "stream": stream}
    async with serving(gateway.app) as url, httpx.AsyncClient(base_url=url) as http:
        plain = asyncio.create_task(http.post(api.path, json=body))
        gateway.answer(await gateway.taken(), "a", "b")
        headers = {"idempotency-key": "k"}
        first = asyncio.create_task(http.post(api.path, json=body, headers=headers))
        request = await gateway.taken()
        second = asyncio.create_task(http.post(api.path, json=body, headers=headers))
        gateway.answer(request, "a", "b")
        third = await http.post(api.path, json=body, headers=headers)
        replies = [await first, await second, third]
        other = await http.post(
            api.path, json=json.loads(json.dumps(body).replace('"Hi"', '"Ho"')), headers=headers
        )
        assert other.status_code == 400
    assert {reply.status_code for reply in replies} == {200}
    assert len({reply.text for reply in replies}) == 1
    assert sum(gateway.queue.depths().values()) == 0
    if not stream:
        own, whole = (await plain).json(), third.json()
        assert own.keys() <= whole.keys()
        told = ("choices", "content", "message", "response", "usage", "done_reason", "stop_reason")
        assert all(own.get(member) == whole.get(member) for member in told)


async def test_a_key_is_of_one_api() -> None:
    """Their bodies may come to the same chat."""
    gateway = Gateway()
    async with serving(gateway.app) as url, httpx.AsyncClient(base_url=url) as http:
        headers = {"idempotency-key": "k"}
        bodies = {APIS[name].path: {**APIS[name].body, "stream": False} for name in (CHAT, "ollama's chat")}
        (one, other) = bodies.items()
        first = asyncio.create_task(http.post(one[0], json=one[1], headers=headers))
        gateway.answer(await gateway.taken(), "a")
        assert (await first).status_code == 200
        assert (await http.post(other[0], json=other[1], headers=headers)).status_code == 400


@pytest.mark.parametrize("name", APIS)
async def test_deleting_stops_and_forgets(name: str) -> None:
    gateway, api = Gateway(), APIS[name]
    async with serving(gateway.app) as url, httpx.AsyncClient(base_url=url) as http:
        async with connect(url) as connection:
            connection.send(post(api.path, {**api.body, "stream": True}, RESUMABLE))
            request = await gateway.taken()
            gateway.bring(request, "a")
            await connection.head()
            path = f"{api.path}/{request.request_id}"
            deleted = await http.delete(path)
            assert (deleted.status_code, deleted.json()["id"]) == (200, request.request_id)
            assert b"cancelled" in await connection.chunked()
        assert (await http.get(path)).status_code == 404
    assert gateway.engine.cancelled == [request.request_id]


@pytest.mark.parametrize("name", APIS)
async def test_another_server_goes_on_with_it(name: str) -> None:
    """From every token on, under the same numbers."""
    api, texts = APIS[name], list("abcd")
    tokens = [ord(text) - ord("!") + 5 for text in texts]

    async def frames(num_before: int) -> bytes:
        store = OrphaningStore(Clock())
        gateway = Gateway(store=store, clock=store.clock)
        async with serving(gateway.app) as url, connect(url) as connection:
            connection.send(post(api.path, {**api.body, "stream": True}, RESUMABLE, "idempotency-key: k"))
            request = await gateway.taken()
            for text, token_id in list(zip(texts, tokens, strict=True))[:num_before]:
                gateway.bring(request, text, token_ids=[token_id])
            await gateway.service.recordings._write_down()
        store.orphan()
        gateway = Gateway(store=store, clock=store.clock)
        async with serving(gateway.app) as url, connect(url) as connection:
            connection.send(get(f"{api.path}/{request.request_id}"))
            again = await gateway.taken()
            assert again.output_token_ids == tuple(tokens[:num_before])
            for text, token_id in list(zip(texts, tokens, strict=True))[num_before:]:
                gateway.bring(again, text, token_ids=[token_id])
            gateway.finish(again, token_ids=[1])
            stream = (await connection.answer()).body
        return stream.replace(request.request_id.encode(), b"ID")

    whole = api.numbered(await frames(0))
    assert said(api, whole) == "abcd"
    for num_before in range(1, len(texts) + 1):
        assert without_times(api.numbered(await frames(num_before))) == without_times(whole)


def without_times(frames: list[tuple[str, bytes]]) -> list[tuple[str, Any]]:
    """The events but for what is of the process that made them."""
    of_process = {"timings", "created", "created_at", "context"}
    return [
        (number, {name: value for name, value in data_of(frame).items() if name not in of_process})
        for number, frame in frames
    ]


@pytest.mark.parametrize("path", ["/v1/messages", "/api/chat"])
async def test_a_header_that_is_neither_yes_nor_no_is_refused(path: str) -> None:
    (api,) = [api for api in APIS.values() if api.path == path]
    async with client(Gateway().app) as http:
        reply = await http.post(path, json=api.body, headers={"x-penstock-resumable": "1"})
    assert reply.status_code == 400
    assert "x-penstock-resumable" in reply.text


async def test_a_key_whose_request_waited_too_long_is_as_good_as_new() -> None:
    """Its client does as it is told, and sends the same again."""
    gateway, api = Gateway(), APIS[CHAT]
    async with serving(gateway.app) as url, httpx.AsyncClient(base_url=url) as http:
        headers = {"idempotency-key": "k"}
        first = asyncio.create_task(http.post(api.path, json=api.body, headers=headers))
        await gateway.queued()
        gateway.clock.now += DEFAULT_POLICIES[Lane.STANDARD].ttl_s + 1
        gateway.service.tick(gateway.clock.now)
        refused = await first
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_timeout")
        again = asyncio.create_task(http.post(api.path, json=api.body, headers=headers))
        gateway.answer(await gateway.taken(), "a")
        assert (await again).status_code == 200


async def test_a_key_whose_reply_failed_is_as_good_as_new() -> None:
    gateway, api = Gateway(), APIS[CHAT]
    async with serving(gateway.app) as url, httpx.AsyncClient(base_url=url) as http:
        headers = {"idempotency-key": "k"}
        first = asyncio.create_task(http.post(api.path, json=api.body, headers=headers))
        recording = await gateway.service.recordings.find("default", (await gateway.taken()).request_id)
        assert recording is not None
        gateway.service.dispatch._by_request[recording.id].fail(internal())
        assert (await first).status_code == 500
        again = asyncio.create_task(http.post(api.path, json=api.body, headers=headers))
        gateway.answer(await gateway.taken(), "a")
        assert (await again).status_code == 200


async def test_a_reply_that_takes_too_long_fails_and_counts_from_its_first_token() -> None:
    gateway, api = Gateway(), APIS[CHAT]
    max_age_s = gateway.service.recordings.keeping.max_age_s
    async with serving(gateway.app) as url, connect(url) as connection:
        connection.send(post(api.path, {**api.body, "stream": True}, RESUMABLE))
        request = await gateway.taken()
        gateway.clock.now += max_age_s + 1  # it waits in a lane where it may
        gateway.service.tick(gateway.clock.now)
        await settled()
        assert gateway.engine.cancelled == []
        gateway.bring(request, "a")
        gateway.service.tick(gateway.clock.now)
        gateway.clock.now += max_age_s - 1
        gateway.service.tick(gateway.clock.now)
        await settled()
        assert gateway.engine.cancelled == []
        gateway.clock.now += 2
        gateway.service.tick(gateway.clock.now)
        stream = (await connection.answer()).body
    assert gateway.engine.cancelled == [request.request_id]
    assert b'"generation_timeout"' in stream
