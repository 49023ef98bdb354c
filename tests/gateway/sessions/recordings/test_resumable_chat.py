"""Chat completions that can be followed again: over real connections, with the engine in the test's hands."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from penstock.engine.planning.request import Request, TokenLogprobs
from penstock.gateway.access.keys import digest_of
from penstock.gateway.http.connections import Timeouts
from penstock.gateway.service import ServiceOptions
from penstock.priority.lanes import Tenant
from tests.gateway.harness import (
    MODEL,
    Gateway,
    chat_body,
    client,
    completion_body,
    logprobs,
    serving,
    settled,
    step_report,
)
from tests.gateway.raw_http import Event, connect, get, post, read_events

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
RESUMABLE: dict[str, Any] = {"stream": True, "stream_options": {"resumable": True}}
UNKNOWN = "chatcmpl-" + "0" * 32


def said(events: list[Event]) -> str:
    chunks = [json.loads(event.data) for event in events if event.data != "[DONE]"]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"])


def numbers(events: list[Event]) -> list[int]:
    return [int(event.id) for event in events if event.data != "[DONE]"]


async def finished(gateway: Gateway, texts: list[str], **fields: Any) -> tuple[str, list[Event]]:
    """Id and events of a resumable reply that was read to its end."""
    async with serving(gateway.app) as url, connect(url) as connection:
        connection.send(post(CHAT, chat_body(**{**RESUMABLE, **fields})))
        request = await gateway.taken()
        for text in texts[:-1]:
            gateway.bring(request, text)
            await settled()
        gateway.finish(request, texts[-1])
        events = read_events((await connection.answer()).body)
    return json.loads(events[0].data)["id"], events


async def test_every_event_has_the_next_number() -> None:
    _, events = await finished(Gateway(), ["a", "", "b", "c"])
    assert events[-1].data == "[DONE]"
    assert said(events) == "abc"
    assert numbers(events) == [0, 1, 2, 3, 4]


async def test_steps_that_come_together_stay_events_apart() -> None:
    gateway = Gateway()
    async with serving(gateway.app) as url, connect(url) as connection:
        connection.send(post(CHAT, chat_body(**RESUMABLE)))
        request = await gateway.taken()
        gateway.service.deliver(*(step_report(gateway.output(request, text)) for text in "ab"))
        gateway.finish(request, "c")
        events = read_events((await connection.answer()).body)
    assert said(events) == "abc"
    assert numbers(events) == [0, 1, 2, 3, 4]


async def test_a_stream_that_did_not_ask_has_no_numbers() -> None:
    _, events = await finished(Gateway(), ["a", "b"], stream_options=None)
    assert {event.id for event in events} == {""}


async def test_from_every_event_on_the_rest_is_the_same() -> None:
    gateway = Gateway()
    id, events = await finished(
        gateway, ["a", "b", "", "c"], stream_options={"resumable": True, "include_usage": True}
    )
    async with serving(gateway.app) as url, connect(url) as connection:
        for position in [-1, *numbers(events)]:
            connection.send(get(f"{CHAT}/{id}?starting_after={position}"))
            assert read_events((await connection.answer()).body) == events[position + 1 :]
        connection.send(get(f"{CHAT}/{id}", "last-event-id: 1"))
        assert read_events((await connection.answer()).body) == events[2:]


async def test_a_reply_goes_on_without_its_client_and_is_followed_again() -> None:
    gateway = Gateway()
    async with serving(gateway.app) as url:
        async with connect(url) as connection:
            connection.send(post(CHAT, chat_body(**RESUMABLE)))
            request = await gateway.taken()
            gateway.bring(request, "a")
            await connection.head()
            first = read_events(await anext(connection.chunks()))
            connection.hang_up()
        gateway.bring(request, "b")
        async with connect(url) as connection:
            connection.send(
                get(f"{CHAT}/{json.loads(first[0].data)['id']}?starting_after={numbers(first)[-1]}")
            )
            await connection.head()
            gateway.bring(request, "c")
            gateway.finish(request, "d")
            rest = read_events(b"".join([chunk async for chunk in connection.chunks()]))
    assert gateway.engine.cancelled == []
    assert said(first) == "a"
    assert said(rest) == "bcd"
    assert numbers(rest) == [2, 3, 4, 5]


async def test_two_clients_follow_one_reply() -> None:
    gateway = Gateway()
    async with serving(gateway.app) as url, connect(url) as connection, connect(url) as other:
        connection.send(post(CHAT, chat_body(**RESUMABLE)))
        request = await gateway.taken()
        gateway.bring(request, "a")
        await connection.head()
        id = json.loads(read_events(await anext(connection.chunks()))[0].data)["id"]
        other.send(get(f"{CHAT}/{id}"))
        await other.head()
        gateway.bring(request, "b")
        gateway.finish(request, "c")
        here = read_events(b"".join([chunk async for chunk in connection.chunks()]))
        there = read_events(b"".join([chunk async for chunk in other.chunks()]))
    assert said(here) == "bc"
    assert said(there) == "abc"


async def test_what_nobody_reads_for_too_long_is_cancelled() -> None:
    gateway = Gateway(ServiceOptions(models=(MODEL,), timeouts=Timeouts(detached_s=60)))
    async with serving(gateway.app) as url:
        async with connect(url) as connection:
            connection.send(post(CHAT, chat_body(**RESUMABLE)))
            request = await gateway.taken()
            gateway.bring(request, "a")
            await connection.head()
            connection.hang_up()
        await settled_until_detached(gateway, request)
        gateway.clock.now += 59
        gateway.service.tick(gateway.clock())
        assert gateway.engine.cancelled == []
        gateway.clock.now += 2
        gateway.service.tick(gateway.clock())
        await gateway.left()
    assert gateway.engine.cancelled == [request.request_id]


async def settled_until_detached(gateway: Gateway, request: Request) -> None:
    recording = await gateway.service.recordings.find(request.tenant, request.request_id)
    assert recording is not None
    while recording.is_read:
        await settled()


async def test_deleting_stops_and_forgets() -> None:
    gateway = Gateway()
    async with serving(gateway.app) as url, connect(url) as connection, connect(url) as other:
        connection.send(post(CHAT, chat_body(**RESUMABLE)))
        request = await gateway.taken()
        gateway.bring(request, "a")
        await connection.head()
        events = read_events(await anext(connection.chunks()))
        id = json.loads(events[0].data)["id"]
        other.send(get(f"{CHAT}/{id}").replace(b"GET", b"DELETE", 1))
        answer = await other.answer()
        assert json.loads(answer.body) == {"id": id, "object": "chat.completion.deleted", "deleted": True}
        rest = read_events(b"".join([chunk async for chunk in connection.chunks()]))
        assert json.loads(rest[-2].data)["error"]["code"] == "cancelled"
        assert rest[-1].data == "[DONE]"
        other.send(get(f"{CHAT}/{id}"))
        assert (await other.answer()).status == 404
    assert gateway.engine.cancelled == [request.request_id]
    assert len(gateway.service.recordings) == 0


async def test_what_has_ended_is_forgotten_after_a_while() -> None:
    gateway = Gateway()
    id, _ = await finished(gateway, ["a"])
    gateway.clock.now += gateway.service.recordings.keeping.keep_s + 1
    gateway.service.tick(gateway.clock())
    async with client(gateway.app) as http:
        assert (await http.get(f"{CHAT}/{id}")).status_code == 404


async def test_a_beginning_that_is_forgotten_is_410(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.gateway.sessions.recordings.frames.MAX_KEPT_BYTES", 600)
    gateway = Gateway()
    id, events = await finished(gateway, ["a", "b", "c", "d", "e"])
    async with client(gateway.app) as http:
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
    gateway = Gateway(ServiceOptions(models=(MODEL,), clients=KEYS))
    ann, bob = ({"authorization": f"Bearer the-key-of-{name}"} for name in ("ann", "bob"))
    async with serving(gateway.app) as url, httpx.AsyncClient(base_url=url) as http:
        sent = asyncio.create_task(http.post(CHAT, json=chat_body(**RESUMABLE), headers=ann))
        request = await gateway.taken()
        gateway.answer(request, "secret")
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
    async with client(Gateway().app) as http:
        reply = await http.get(path)
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param)


@pytest.mark.parametrize("field", ["prompt_logprobs", "return_token_ids"])
async def test_what_cannot_be_resumed_is_refused_by_name(field: str) -> None:
    async with client(Gateway().app) as http:
        reply = await http.post(CHAT, json={**chat_body(**RESUMABLE), field: 1})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)


COMPLETIONS = "/v1/completions"
TOLD: dict[str, tuple[dict[str, Any], str]] = {
    CHAT: ({**chat_body(n=2), "logprobs": True, "top_logprobs": 1}, "/v1/chat/completions/{}"),
    COMPLETIONS: (completion_body(n=2, logprobs=1), "/v1/completions/{}"),
}


async def two_choices(gateway: Gateway, request: Request) -> None:
    """The first one is ahead, and longer."""
    for index, text in [(0, "a"), (0, "b"), (1, "x"), (0, ""), (0, "c")]:
        gateway.bring(request, text, index, token_ids=[ord(text or "_")], logprobs=[known(text or "_")])
        await settled()
    gateway.finish(request, "d", 0, token_ids=[ord("d")], logprobs=[known("d")])
    gateway.finish(request, "y", 1, token_ids=[ord("y")], logprobs=[known("y")])


def known(text: str) -> TokenLogprobs:
    return logprobs((ord(text), -0.5), (5, -1.25))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_choices_and_log_probabilities_are_as_where_nothing_is_recorded(path: str) -> None:
    gateway = Gateway()
    body, again = TOLD[path]
    found = {}
    for name, extra in (("plain", {}), ("recorded", RESUMABLE["stream_options"])):
        async with serving(gateway.app) as url, connect(url) as connection:
            connection.send(
                post(path, {**body, "stream": True, "stream_options": {**extra, "include_usage": True}})
            )
            request = await gateway.taken()
            await two_choices(gateway, request)
            events = read_events((await connection.answer()).body)
            found[name] = by_choice(events)
            if name == "recorded":
                assert numbers(events) == list(range(len(events) - 1))
                for position in [-1, *numbers(events)]:
                    connection.send(get(f"{again.format(request.request_id)}?starting_after={position}"))
                    assert read_events((await connection.answer()).body) == events[position + 1 :]
    assert found["plain"] == found["recorded"]
    assert found["plain"][0][0] == "abcd"
    assert found["plain"][1][0] == "xy"


def by_choice(events: list[Event]) -> dict[int, tuple[str, list[Any], str]]:
    """Text, log probabilities and the reason of each end."""
    texts: dict[int, str] = {}
    told: dict[int, list[Any]] = {}
    reasons: dict[int, str] = {}
    for event in events[:-1]:
        for choice in json.loads(event.data)["choices"]:
            index = choice["index"]
            texts[index] = texts.get(index, "") + (
                choice.get("text") or choice.get("delta", {}).get("content", "")
            )
            told.setdefault(index, []).extend(_entries(choice["logprobs"]))
            reasons[index] = choice["finish_reason"]
    return {index: (text, told[index], reasons[index]) for index, text in texts.items()}


def _entries(told: dict[str, Any] | None) -> list[Any]:
    if told is None:
        return []
    if "content" in told:
        return list(told["content"])
    return list(zip(*told.values(), strict=True))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_key_twice_is_one_reply_with_all_choices(path: str) -> None:
    gateway = Gateway()
    body, _ = TOLD[path]
    bodies: list[dict[str, Any]] = []
    async with serving(gateway.app) as url, httpx.AsyncClient(base_url=url) as http:
        for headers in ({}, {"Idempotency-Key": "k"}, {"Idempotency-Key": "k"}):
            sent = asyncio.create_task(http.post(path, json=body, headers=headers))
            if len(bodies) < 2:
                await two_choices(gateway, await gateway.taken())
            bodies.append((await sent).json())
    plain, first, second = bodies
    assert first == second
    assert first["choices"] == plain["choices"]
    assert first["usage"] == plain["usage"]


@pytest.mark.parametrize(("field", "value"), [("echo", True), ("best_of", 2), ("prompt", ["a", "b"])])
async def test_what_a_recorded_text_cannot_have_is_refused_by_name(field: str, value: Any) -> None:
    async with client(Gateway().app) as http:
        reply = await http.post(
            COMPLETIONS, json={**completion_body(), field: value}, headers={"Idempotency-Key": "k"}
        )
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)
