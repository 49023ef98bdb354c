"""`/v1/messages/batches` with Anthropic's own client: what a batch comes to, and what is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import pytest

from penstock.gateway.access.keys import digest_of
from penstock.gateway.service import ServiceOptions
from penstock.gateway.sessions.batches import batch as batches
from penstock.gateway.sessions.batches import run
from penstock.priority.lanes import Lane, Tenant
from tests.gateway.endpoints.test_anthropic_client import connected
from tests.gateway.harness import MODEL, Gateway, client

pytestmark = pytest.mark.anyio

PATH = "/v1/messages/batches"
UNKNOWN = "msgbatch_" + 32 * "0"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "WRITE_S", 0.01)


def asked(custom_id: str, text: str = "Hi", **fields: Any) -> Any:
    params = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": text}], **fields}
    return {"custom_id": custom_id, "params": params}


async def ended(api: anthropic.AsyncAnthropic, batch_id: str) -> Any:
    while (batch := await api.messages.batches.retrieve(batch_id)).processing_status != "ended":
        await asyncio.sleep(0.01)
    return batch


async def results(api: anthropic.AsyncAnthropic, batch_id: str) -> dict[str, Any]:
    """The results by custom_id; none is there twice."""
    found = [one async for one in await api.messages.batches.results(batch_id)]
    assert len({one.custom_id for one in found}) == len(found)
    return {one.custom_id: one.result for one in found}


async def test_a_batch_from_its_requests_to_its_results() -> None:
    gateway = Gateway()
    async with connected(gateway) as api:
        requests = [asked("a", speed="fast"), asked("b", temperature=7), asked("c")]
        batch = await api.messages.batches.create(requests=requests)
        assert (batch.processing_status, batch.request_counts.processing) == ("in_progress", 3)
        assert (batch.results_url, batch.ended_at) == (None, None)
        for request in [await gateway.taken(), await gateway.taken()]:
            assert request.lane == Lane.BATCH, "they are in nobody's way"
            gateway.answer(request, "yes")
        batch = await ended(api, batch.id)
        assert batch.request_counts.to_dict() == {
            **{"processing": 0, "succeeded": 2, "errored": 1},
            **{"canceled": 0, "expired": 0},
        }
        assert batch.created_at <= batch.ended_at < batch.expires_at
        found = await results(api, batch.id)
        assert found["a"].message.content[0].text == "yes"
        assert found["a"].message.usage.service_tier == "batch"
        assert found["b"].error.error.type == "invalid_request_error"
        assert "temperature" in found["b"].error.error.message
        assert found["c"].type == "succeeded"
        assert [one.id async for one in await api.messages.batches.list()] == [batch.id]
        deleted = await api.messages.batches.delete(batch.id)
        assert (deleted.id, deleted.type) == (batch.id, "message_batch_deleted")
        with pytest.raises(anthropic.NotFoundError):
            await api.messages.batches.retrieve(batch.id)
    async with client(gateway.app) as http:
        assert (await http.get("/v1/files")).json()["data"] == [], "its files are gone with it"


async def test_a_batch_that_is_cancelled_keeps_what_it_has() -> None:
    gateway = Gateway()
    async with connected(gateway) as api:
        batch = await api.messages.batches.create(requests=[asked("a"), asked("b")])
        first, second = await gateway.taken(), await gateway.taken()
        with pytest.raises(anthropic.BadRequestError, match="has not ended"):
            await api.messages.batches.delete(batch.id)
        gateway.answer(first, "yes")
        stopped = await api.messages.batches.cancel(batch.id)
        assert (stopped.processing_status, stopped.cancel_initiated_at is None) == ("canceling", False)
        counts = (await ended(api, batch.id)).request_counts
        assert (counts.succeeded, counts.canceled) == (1, 1)
        found = await results(api, batch.id)
        assert {one.type for one in found.values()} == {"succeeded", "canceled"}
        assert (await api.messages.batches.cancel(batch.id)).processing_status == "ended"
    assert gateway.engine.cancelled == [second.request_id]


async def test_what_is_not_done_in_time_has_expired(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = Gateway()
    async with connected(gateway) as api:
        batch = await api.messages.batches.create(requests=[asked("a"), asked("b")])
        gateway.answer(await gateway.taken(), "yes")
        await gateway.taken()
        monkeypatch.setattr(batches, "WINDOW_S", 0)
        counts = (await ended(api, batch.id)).request_counts
        assert (counts.succeeded, counts.expired, counts.errored) == (1, 1, 0)
        assert {one.type for one in (await results(api, batch.id)).values()} == {"succeeded", "expired"}


async def test_a_batch_that_fails_says_so_of_each_request_that_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run, "MAX_RESULT_BYTES", 10)
    monkeypatch.setattr(run, "LINES_AT_ONCE", 1)
    gateway = Gateway()
    async with connected(gateway) as api:
        batch = await api.messages.batches.create(requests=[asked("a"), asked("b")])
        gateway.answer(await gateway.taken(), "yes")
        counts = (await ended(api, batch.id)).request_counts
        assert (counts.succeeded, counts.errored) == (1, 1)
        found = await results(api, batch.id)
        assert "more than 10 bytes" in found["b"].error.error.message


async def test_pages_of_a_list() -> None:
    gateway = Gateway()
    async with connected(gateway) as api:
        ids = [(await api.messages.batches.create(requests=[asked("a")])).id for _ in range(3)]
        for _ in ids:
            gateway.answer(await gateway.taken(), "yes")
        for id in ids:
            await ended(api, id)
        listed = [one.id async for one in await api.messages.batches.list(limit=1)]
        assert sorted(listed) == sorted(ids)
        before = await api.messages.batches.list(limit=1, before_id=listed[2])
        assert ([one.id for one in before.data], before.has_more) == (listed[1:2], True)
        before = await api.messages.batches.list(limit=2, before_id=listed[2])
        assert ([one.id for one in before.data], before.has_more) == (listed[:2], False)
        assert (await client_json(gateway, "/v1/batches"))["data"] == [], "OpenAI's batches are others"


async def client_json(gateway: Gateway, path: str) -> Any:
    async with client(gateway.app) as http:
        return (await http.get(path)).json()


async def test_a_batch_is_its_tenants_own() -> None:
    clients = {digest_of(name): Tenant(name=name) for name in ("a", "b")}
    gateway = Gateway(ServiceOptions(models=(MODEL,), clients=clients))
    async with connected(gateway, api_key="a") as api:
        batch = await api.messages.batches.create(requests=[asked("a")])
        other = api.with_options(api_key="b")
        with pytest.raises(anthropic.NotFoundError):
            await other.messages.batches.cancel(batch.id)
        assert not [one async for one in await other.messages.batches.list()]


async def test_a_tenants_batches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MAX_AT_WORK", 0)
    gateway = Gateway()
    async with connected(gateway) as api:
        with pytest.raises(anthropic.RateLimitError, match="batches at work"):
            await api.messages.batches.create(requests=[asked("a")])
    assert (await client_json(gateway, "/v1/files"))["data"] == [], "its input is not kept"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "told"),
    [
        ("POST", PATH, {}, 400, "requests"),
        ("POST", PATH, {"requests": []}, 400, "requests"),
        ("POST", PATH, {"requests": [asked("a"), asked("a")]}, 400, "requests[1].custom_id"),
        ("POST", PATH, {"requests": [asked("a b")]}, 400, "requests[0].custom_id"),
        ("POST", PATH, {"requests": [asked("a", stream=True)]}, 400, "requests[0].params.stream"),
        ("POST", PATH, {"requests": [{"custom_id": "a"}]}, 400, "requests[0].params"),
        ("POST", PATH, {"requests": [asked("a")], "more": 1}, 400, "more"),
        ("GET", f"{PATH}?limit=0", None, 400, "limit"),
        ("GET", f"{PATH}?after_id=x", None, 400, "after_id"),
        ("GET", f"{PATH}?before_id=x", None, 400, "before_id"),
        ("GET", f"{PATH}/x", None, 404, "message batch"),
        ("GET", f"{PATH}/{UNKNOWN}", None, 404, "message batch"),
        ("GET", f"{PATH}/{UNKNOWN}/results", None, 404, "message batch"),
        ("POST", f"{PATH}/{UNKNOWN}/cancel", None, 404, "message batch"),
        ("DELETE", f"{PATH}/{UNKNOWN}", None, 404, "message batch"),
    ],
)
async def test_what_is_refused(method: str, path: str, body: Any, status: int, told: str) -> None:
    async with client(Gateway().app) as http:
        reply = await http.request(method, path, json=body)
    assert reply.status_code == status, reply.text
    assert reply.json()["type"] == "error"
    assert told in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "url"),
    [
        ({}, "http://penstock"),
        ({"x-forwarded-host": "llm.example.com", "x-forwarded-proto": "https"}, "https://llm.example.com"),
        ({"x-forwarded-host": "a:8443, b", "x-forwarded-proto": "https, http"}, "https://a:8443"),
    ],
)
async def test_its_results_are_where_the_client_can_reach_them(headers: dict[str, str], url: str) -> None:
    gateway = Gateway()
    async with client(gateway.app) as http:
        made = (await http.post(PATH, json={"requests": [asked("a")]})).json()["id"]
        gateway.answer(await gateway.taken(), "yes")
        while (shown := (await http.get(f"{PATH}/{made}", headers=headers)).json())["results_url"] is None:
            await asyncio.sleep(0.01)
    assert shown["results_url"] == f"{url}{PATH}/{made}/results"
