"""Chat completions that can be followed again: over real connections, with the engine in the test's hands."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from engine.planning.request import Request
from gateway.access.keys import digest_of
from gateway.http.connections import Timeouts
from gateway.service import ServiceOptions
from priority.lanes import Tenant
from tests.gateway.desk import MODEL, Desk, chat_body, client, serving, settled, step_report
from tests.gateway.raw import Event, dialled, get, post, read_events

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
RESUMABLE: dict[str, Any] = {"stream": True, "stream_options": {"resumable": True}}
UNKNOWN = "chatcmpl-" + "0" * 32


def said(events: list[Event]) -> str:
    chunks = [json.loads(event.data) for event in events if event.data != "[DONE]"]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"])


def numbers(events: list[Event]) -> list[int]:
    return [int(event.id) for event in events if event.data != "[DONE]"]


async def finished(desk: Desk, texts: list[str], **fields: Any) -> tuple[str, list[Event]]:
    """Id and events of a resumable reply that was read to its end."""
    async with serving(desk.app) as url, dialled(url) as line:
        line.send(post(CHAT, chat_body(**{**RESUMABLE, **fields})))
        request = await desk.taken()
        for text in texts[:-1]:
            desk.bring(request, text)
            await settled()
        desk.finish(request, texts[-1])
        events = read_events((await line.answer()).body)
    return json.loads(events[0].data)["id"], events


async def test_every_event_has_the_next_number() -> None:
    _, events = await finished(Desk(), ["a", "", "b", "c"])
    assert events[-1].data == "[DONE]"
    assert said(events) == "abc"
    assert numbers(events) == [0, 1, 2, 3, 4]


async def test_steps_that_come_together_stay_events_apart() -> None:
    desk = Desk()
    async with serving(desk.app) as url, dialled(url) as line:
        line.send(post(CHAT, chat_body(**RESUMABLE)))
        request = await desk.taken()
        desk.service.deliver(*(step_report(desk.output(request, text)) for text in "ab"))
        desk.finish(request, "c")
        events = read_events((await line.answer()).body)
    assert said(events) == "abc"
    assert numbers(events) == [0, 1, 2, 3, 4]


async def test_a_stream_that_did_not_ask_has_no_numbers() -> None:
    _, events = await finished(Desk(), ["a", "b"], stream_options=None)
    assert {event.id for event in events} == {""}


async def test_from_every_event_on_the_rest_is_the_same() -> None:
    desk = Desk()
    id, events = await finished(
        desk, ["a", "b", "", "c"], stream_options={"resumable": True, "include_usage": True}
    )
    async with serving(desk.app) as url, dialled(url) as line:
        for position in [-1, *numbers(events)]:
            line.send(get(f"{CHAT}/{id}?starting_after={position}"))
            assert read_events((await line.answer()).body) == events[position + 1 :]
        line.send(get(f"{CHAT}/{id}", "last-event-id: 1"))
        assert read_events((await line.answer()).body) == events[2:]


async def test_a_reply_goes_on_without_its_client_and_is_followed_again() -> None:
    desk = Desk()
    async with serving(desk.app) as url:
        async with dialled(url) as line:
            line.send(post(CHAT, chat_body(**RESUMABLE)))
            request = await desk.taken()
            desk.bring(request, "a")
            await line.head()
            first = read_events(await anext(line.chunks()))
            line.hang_up()
        desk.bring(request, "b")
        async with dialled(url) as line:
            line.send(get(f"{CHAT}/{json.loads(first[0].data)['id']}?starting_after={numbers(first)[-1]}"))
            await line.head()
            desk.bring(request, "c")
            desk.finish(request, "d")
            rest = read_events(b"".join([chunk async for chunk in line.chunks()]))
    assert desk.engine.cancelled == []
    assert said(first) == "a"
    assert said(rest) == "bcd"
    assert numbers(rest) == [2, 3, 4, 5]


async def test_two_clients_follow_one_reply() -> None:
    desk = Desk()
    async with serving(desk.app) as url, dialled(url) as line, dialled(url) as other:
        line.send(post(CHAT, chat_body(**RESUMABLE)))
        request = await desk.taken()
        desk.bring(request, "a")
        await line.head()
        id = json.loads(read_events(await anext(line.chunks()))[0].data)["id"]
        other.send(get(f"{CHAT}/{id}"))
        await other.head()
        desk.bring(request, "b")
        desk.finish(request, "c")
        here = read_events(b"".join([chunk async for chunk in line.chunks()]))
        there = read_events(b"".join([chunk async for chunk in other.chunks()]))
    assert said(here) == "bc"
    assert said(there) == "abc"


async def test_what_nobody_reads_for_too_long_is_cancelled() -> None:
    desk = Desk(ServiceOptions(models=(MODEL,), timeouts=Timeouts(detached_s=60)))
    async with serving(desk.app) as url:
        async with dialled(url) as line:
            line.send(post(CHAT, chat_body(**RESUMABLE)))
            request = await desk.taken()
            desk.bring(request, "a")
            await line.head()
            line.hang_up()
        await settled_until_detached(desk, request)
        desk.clock.now += 59
        desk.service.tick(desk.clock())
        assert desk.engine.cancelled == []
        desk.clock.now += 2
        desk.service.tick(desk.clock())
        await desk.left()
    assert desk.engine.cancelled == [request.request_id]


async def settled_until_detached(desk: Desk, request: Request) -> None:
    recording = await desk.service.recordings.find(request.tenant, request.request_id)
    assert recording is not None
    while recording.is_read:
        await settled()


async def test_deleting_stops_and_forgets() -> None:
    desk = Desk()
    async with serving(desk.app) as url, dialled(url) as line, dialled(url) as other:
        line.send(post(CHAT, chat_body(**RESUMABLE)))
        request = await desk.taken()
        desk.bring(request, "a")
        await line.head()
        events = read_events(await anext(line.chunks()))
        id = json.loads(events[0].data)["id"]
        other.send(get(f"{CHAT}/{id}").replace(b"GET", b"DELETE", 1))
        answer = await other.answer()
        assert json.loads(answer.body) == {"id": id, "object": "chat.completion.deleted", "deleted": True}
        rest = read_events(b"".join([chunk async for chunk in line.chunks()]))
        assert json.loads(rest[-2].data)["error"]["code"] == "cancelled"
        assert rest[-1].data == "[DONE]"
        other.send(get(f"{CHAT}/{id}"))
        assert (await other.answer()).status == 404
    assert desk.engine.cancelled == [request.request_id]
    assert len(desk.service.recordings) == 0


async def test_what_has_ended_is_forgotten_after_a_while() -> None:
    desk = Desk()
    id, _ = await finished(desk, ["a"])
    desk.clock.now += desk.service.recordings.keeping.keep_s + 1
    desk.service.tick(desk.clock())
    async with client(desk.app) as http:
        assert (await http.get(f"{CHAT}/{id}")).status_code == 404


async def test_a_beginning_that_is_forgotten_is_410(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.sessions.recordings.recording.MAX_TEXT_BYTES", 500)
    desk = Desk()
    id, events = await finished(desk, ["a", "b", "c", "d", "e"])
    async with client(desk.app) as http:
        reply = await http.get(f"{CHAT}/{id}")
        assert reply.status_code == 410
        error = reply.json()["error"]
        assert (error["param"], error["code"]) == ("starting_after", "position_expired")
        first = int(error["message"].rpartition("starting_after=")[2].rstrip("."))
        reply = await http.get(f"{CHAT}/{id}?starting_after={first}")
        assert read_events(reply.content) == events[first + 1 :]
        assert (await http.get(f"{CHAT}/{id}?starting_after={first - 1}")).status_code == 410


KEYS = {digest_of(f"the-key-of-{name}"): Tenant(name=name) for name in ("ann", "bob")}


async def test_another_tenants_reply_is_as_unknown_as_none() -> None:
    desk = Desk(ServiceOptions(models=(MODEL,), clients=KEYS))
    ann, bob = ({"authorization": f"Bearer the-key-of-{name}"} for name in ("ann", "bob"))
    async with serving(desk.app) as url, httpx.AsyncClient(base_url=url) as http:
        sent = asyncio.create_task(http.post(CHAT, json=chat_body(**RESUMABLE), headers=ann))
        request = await desk.taken()
        desk.answer(request, "secret")
        await sent
        path = f"{CHAT}/{request.request_id}"
        assert (await http.get(path, headers=ann)).status_code == 200
        for method in ("GET", "DELETE"):
            foreign = await http.request(method, path, headers=bob)
            unknown = await http.request(method, f"{CHAT}/{UNKNOWN}", headers=bob)
            assert foreign.status_code == unknown.status_code == 404
            assert foreign.text.replace(request.request_id, UNKNOWN) == unknown.text


@pytest.mark.parametrize(
    ("path", "status", "param"),
    [
        (f"{CHAT}/chatcmpl-1", 400, "id"),
        (f"{CHAT}/{UNKNOWN}?starting_after=x", 400, "starting_after"),
        (f"{CHAT}/{UNKNOWN}?starting_after=-2", 400, "starting_after"),
        (f"{CHAT}/{UNKNOWN}", 404, "id"),
    ],
)
async def test_bad_addresses_are_refused_by_name(path: str, status: int, param: str) -> None:
    async with client(Desk().app) as http:
        reply = await http.get(path)
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param)


@pytest.mark.parametrize(("field", "value"), [("n", 2), ("logprobs", True)])
async def test_what_cannot_be_resumed_is_refused_by_name(field: str, value: Any) -> None:
    async with client(Desk().app) as http:
        reply = await http.post(CHAT, json=chat_body(**RESUMABLE, **{field: value}))
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)
