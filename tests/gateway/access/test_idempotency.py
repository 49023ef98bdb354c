"""`Idempotency-Key`: sent twice, done once."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from penstock.gateway.access.quotas import QuotaReservation
from penstock.priority.lanes import DEFAULT_POLICIES, Lane
from tests.gateway.harness import MODEL, Gateway, chat_body, client, events, serving, settled

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
KEY = {"idempotency-key": "order-1"}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_second_gets_the_reply_of_the_first(stream: bool) -> None:
    gateway = Gateway()
    async with serving(gateway.app) as url, httpx.AsyncClient(base_url=url) as http:
        send = http.post(CHAT, json=chat_body(stream=stream), headers=KEY)
        first = asyncio.create_task(send)
        request = await gateway.taken()
        # While it is being made, and once it is.
        second = asyncio.create_task(http.post(CHAT, json=chat_body(stream=stream), headers=KEY))
        gateway.answer(request, "a", "b")
        third = await http.post(CHAT, json=chat_body(stream=stream), headers=KEY)
        replies = [await first, await second, third]
    assert {reply.status_code for reply in replies} == {200}
    assert len({reply.text for reply in replies}) == 1
    if not stream:
        assert [choice["index"] for choice in replies[0].json()["choices"]] == [0]
    assert sum(gateway.queue.depths().values()) == 0


async def test_another_request_under_the_same_key_is_refused() -> None:
    gateway = Gateway()
    async with serving(gateway.app) as url, httpx.AsyncClient(base_url=url) as http:
        first = asyncio.create_task(http.post(CHAT, json=chat_body(), headers=KEY))
        gateway.answer(await gateway.taken(), "a")
        await first
        reply = await http.post(CHAT, json=chat_body("Something else"), headers=KEY)
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "idempotency_key_reused"
    assert reply.json()["error"]["param"] == "Idempotency-Key"


async def test_a_request_that_was_not_let_in_may_come_again() -> None:
    gateway = Gateway()
    gateway.service.begin_drain()
    async with client(gateway.app) as http:
        assert (await http.post(CHAT, json=chat_body(), headers=KEY)).status_code == 503
        gateway.service.dispatch.draining = False
        too_long = chat_body(max_tokens=10**6)
        assert (await http.post(CHAT, json=too_long, headers=KEY)).status_code == 400
        reply = asyncio.create_task(http.post(CHAT, json=chat_body(), headers=KEY))
        gateway.answer(await gateway.taken(), "a")
        assert (await reply).status_code == 200


async def test_one_that_comes_before_the_first_has_begun_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gateway = Gateway()
    reserve, go_on = gateway.service.quotas.reserve, asyncio.Event()

    async def slowly(*arguments: Any) -> QuotaReservation:
        await go_on.wait()
        return await reserve(*arguments)

    monkeypatch.setattr(gateway.service.quotas, "reserve", slowly)
    async with client(gateway.app) as http:
        sent = [asyncio.create_task(http.post(CHAT, json=chat_body(), headers=KEY)) for _ in range(3)]
        await settled()
        go_on.set()
        gateway.answer(await gateway.taken(), "a")
        replies = await asyncio.gather(*sent)
    assert {reply.status_code for reply in replies} == {200}
    assert len({reply.text for reply in replies}) == 1


async def test_a_reply_that_is_not_here_is_a_conflict() -> None:
    gateway = Gateway()
    async with serving(gateway.app) as url, httpx.AsyncClient(base_url=url) as http:
        first = asyncio.create_task(http.post(CHAT, json=chat_body(), headers=KEY))
        request = await gateway.taken()
        gateway.answer(request, "a")
        await first
        recording = await gateway.service.recordings.find(request.tenant, request.request_id)
        assert recording is not None
        await gateway.service.recordings.discard(recording)
        reply = await http.post(CHAT, json=chat_body(), headers=KEY)
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "idempotency_reply_not_here")


async def test_a_key_whose_reply_was_abandoned_is_as_good_as_new() -> None:
    gateway = Gateway()
    async with serving(gateway.app) as url, httpx.AsyncClient(base_url=url) as http:
        first = asyncio.create_task(http.post(CHAT, json=chat_body(), headers=KEY))
        recording = await gateway.service.recordings.find("default", (await gateway.taken()).request_id)
        assert recording is not None
        while recording.is_read:
            first.cancel()
            await settled()
        gateway.clock.now += 61
        gateway.service.tick(gateway.clock.now)
        await settled()
        again = asyncio.create_task(http.post(CHAT, json=chat_body(), headers=KEY))
        gateway.answer(await gateway.taken(), "a")
        assert (await again).status_code == 200


async def test_other_keys_are_other_requests() -> None:
    gateway = Gateway()
    async with serving(gateway.app) as url, httpx.AsyncClient(base_url=url) as http:
        ids = set()
        for key in ("one", "two"):
            headers = {"idempotency-key": key}
            sent = asyncio.create_task(http.post(CHAT, json=chat_body(stream=True), headers=headers))
            gateway.answer(await gateway.taken(), "a")
            ids.add(events((await sent).text)[0]["id"])
    assert len(ids) == 2


@pytest.mark.parametrize("key", ["", "x" * 256, "caf\xe9"])
async def test_a_key_that_is_none_is_refused_by_name(key: str) -> None:
    async with client(Gateway().app) as http:
        headers = [(b"idempotency-key", key.encode("latin-1")), (b"content-type", b"application/json")]
        reply = await http.post(CHAT, content=json.dumps(chat_body()), headers=headers)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "Idempotency-Key")


@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
async def test_a_repeat_is_answered_though_the_lane_is_full(path: str) -> None:
    bounds = {Lane.STANDARD: replace(DEFAULT_POLICIES[Lane.STANDARD], max_requests=1)}
    gateway = Gateway(bounds=bounds)
    body = chat_body() if path == CHAT else {"model": MODEL, "input": "Hi"}
    async with serving(gateway.app) as url, httpx.AsyncClient(base_url=url) as http:
        first = asyncio.create_task(http.post(path, json=body, headers=KEY))
        gateway.answer(await gateway.taken(), "a")
        waiting = asyncio.create_task(http.post(CHAT, json=chat_body("another")))
        await gateway.queued()
        refused = await http.post(path, json=body, headers={"idempotency-key": "order-2"})
        repeated = await http.post(path, json=body, headers=KEY)
        gateway.answer(await gateway.taken(), "b")
        assert (await waiting).status_code == 200
    assert refused.status_code in (429, 503)
    assert repeated.status_code == 200
    assert repeated.json() == (await first).json()
