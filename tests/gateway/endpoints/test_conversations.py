"""Conversations on the server, as the real openai package asks for them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any, cast

import httpx
import openai
import pytest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException

from penstock.gateway.access.keys import Access, digest_of
from penstock.gateway.endpoints.conversations import ConversationsApi
from penstock.gateway.endpoints.intake import Intake
from penstock.gateway.endpoints.operation import routes_of
from penstock.gateway.errors import ApiError
from penstock.gateway.http.refusals import answer_api_error, answer_http_error
from penstock.gateway.service import Service, ServiceOptions
from penstock.gateway.sessions.conversations import (
    CONVERSATIONS,
    KIND,
    MAX_BYTES,
    MAX_ITEMS,
    TTL_S,
    Conversation,
    ConversationLocks,
    append,
    find,
)
from penstock.gateway.sessions.owners import tag_of
from penstock.gateway.sessions.responses.objects import Item, input_items, message_item
from penstock.gateway.sessions.responses.schemas import InputMessage, Role
from penstock.gateway.sessions.responses.threads import Thread
from penstock.gateway.store import link
from penstock.gateway.store.interface import Key, Store, StoreUnavailable
from penstock.gateway.store.memory import MemoryStore
from penstock.gateway.store.redis import RedisStore
from penstock.gateway.store.shared import SharedStore
from penstock.priority.lanes import Tenant
from tests.clock import Clock
from tests.gateway.harness import serving
from tests.redis_server import RedisServer

pytestmark = pytest.mark.anyio

OURS, THEIRS = "a-key-of-ours-16", "a-key-of-theirs-16"
HI: Any = {"role": "user", "content": "Hi"}
UNKNOWN = "conv_" + "0" * 48


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is not to look like a Redis that is gone."""
    for name in ("WORK_S", "POOL_WAIT_S"):
        monkeypatch.setattr(link, name, 3.0)


class Switch(MemoryStore):
    """A store that can be taken away."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.away = False
        self.slow = False

    async def get(self, key: Key, ttl_s: float | None = None) -> bytes | None:
        if self.away:
            raise StoreUnavailable
        value = await super().get(key, ttl_s)
        if self.slow:
            await asyncio.sleep(0)
        return value

    async def list(self, kind: str, tenant: str, limit: int) -> list[str]:
        if self.away:
            raise StoreUnavailable
        return await super().list(kind, tenant, limit)


class Place:
    """The conversations of one service, and nothing else of it."""

    def __init__(self, keys: tuple[str, ...] = ()) -> None:
        self.clock = Clock()
        self.store = Switch(self.clock)
        service = cast(
            Service,
            SimpleNamespace(
                access=Access({digest_of(key): Tenant(name=key) for key in keys}),
                store=self.store,
                grammars=None,
                tag=tag_of("fake"),
                options=ServiceOptions(models=("fake",)),
            ),
        )
        self.app = Starlette(
            routes=routes_of(ConversationsApi(service, Intake(service))),
            exception_handlers={ApiError: answer_api_error, HTTPException: answer_http_error},
        )

    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://penstock")


@contextlib.asynccontextmanager
async def connected(place: Place, api_key: str = "none") -> AsyncIterator[Any]:
    """The client's conversations."""
    async with (
        serving(place.app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0, timeout=20) as api,
    ):
        yield api.conversations


def item(item_id: str, role: Role = "user", text: str = "x") -> Item:
    return message_item(item_id, role, [text], "completed")


async def put(store: Store, conversation_id: str = UNKNOWN, tenant: str = "default", **fields: Any) -> None:
    record = {"id": conversation_id, "created_at": 1, "metadata": {}, "items": [], "token_ids": "", **fields}
    await store.put(Key(KIND, tenant, conversation_id), json.dumps(record).encode(), 100.0)


@contextlib.contextmanager
def refusal(status: int, code: str | None = None, param: str | None = None) -> Iterator[None]:
    with pytest.raises(openai.APIStatusError) as error:
        yield
    assert (error.value.status_code, error.value.code) == (status, code or error.value.code)
    assert param is None or error.value.param == param


# As the client sees it


async def test_a_conversation_from_its_beginning_to_its_end() -> None:
    async with connected(Place()) as api:
        made = await api.create(items=[HI], metadata={"topic": "rivers"})
        assert made.id.startswith("conv_")
        assert len(made.id) >= 5 + 32
        assert made.metadata == {"topic": "rivers"}
        assert await api.retrieve(made.id) == made
        changed = await api.update(made.id, metadata={"topic": "gates"})
        assert (changed.metadata, changed.created_at) == ({"topic": "gates"}, made.created_at)
        assert (await api.update(made.id, metadata=None)).metadata == {}
        gone = await api.delete(made.id)
        assert gone.deleted
        for asking in (api.retrieve(made.id), api.delete(made.id), api.items.list(made.id)):
            with refusal(404, "not_found"):
                await asking


async def test_items() -> None:
    async with connected(Place()) as api:
        made = await api.create()
        added = await api.items.create(
            made.id,
            items=[
                {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
                {"type": "message", "role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Ho"},
            ],
        )
        assert (added.first_id, added.last_id, added.has_more) == (added.data[0].id, added.data[2].id, False)
        for found in added.data:
            assert await api.items.retrieve(found.id, conversation_id=made.id) == found
        assert [found.content[0].type for found in added.data] == ["input_text", "input_text", "output_text"]
        assert [found.role for found in added.data] == ["developer", "user", "assistant"]
        left = await api.items.delete(added.data[1].id, conversation_id=made.id)
        assert left == made
        with refusal(404, "not_found"):
            await api.items.retrieve(added.data[1].id, conversation_id=made.id)
        with refusal(404, "not_found"):
            await api.items.delete(added.data[1].id, conversation_id=made.id)
        assert [found.id async for found in api.items.list(made.id, order="asc")] == [
            added.data[0].id,
            added.data[2].id,
        ]


async def test_items_are_listed_in_pages() -> None:
    async with connected(Place()) as api:
        made = await api.create(items=[{"role": "user", "content": str(number)} for number in range(7)])

        async def texts(**query: Any) -> list[str]:
            return [found.content[0].text async for found in api.items.list(made.id, **query)]

        assert await texts() == list("6543210")
        assert await texts(order="asc", limit=3) == list("0123456")
        page = await api.items.list(made.id, limit=2, include=[])
        assert [found.content[0].text for found in page.data] == ["6", "5"]
        assert page.has_more
        assert await texts(after=page.last_id) == list("43210")
        with refusal(400, param="after"):
            await api.items.list(made.id, after="msg_other")
        for limit in (0, 101):
            with refusal(400, param="limit"):
                await api.items.list(made.id, limit=limit)
        with refusal(400, param="order"):
            await api.items.list(made.id, order="up")


async def test_an_item_keeps_the_id_that_it_has() -> None:
    async with connected(Place()) as api:
        part = {"type": "output_text", "text": "Ho", "annotations": []}
        said = {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "status": "incomplete",
            "content": [part],
        }
        made = await api.create(items=[HI, said])
        assert (await api.items.retrieve("msg_1", conversation_id=made.id)).status == "incomplete"
        with refusal(400, param="items[1].id"):
            await api.items.create(made.id, items=[HI, said])
        with refusal(400, param="items[1].id"):
            await api.create(items=[said, said])


async def test_the_callers_own_are_listed_newest_first_with_titles() -> None:
    place = Place()
    long = "Why does   the\nriver run faster where the gate is open and the wheel turns? " * 3
    async with place.http() as http:
        bodies: list[dict[str, Any]] = [
            {"items": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": long}, HI]},
            {"items": [HI], "metadata": {"title": "Of gates"}},
            {},
            {"items": [{"role": "user", "content": "water" * 20}]},
        ]
        made = [(await http.post("/v1/conversations", json=body)).json() for body in bodies]
        listed = (await http.get("/v1/conversations")).json()
        assert listed["data"] == [
            {**conversation, "title": title}
            for conversation, title in zip(
                reversed(made),
                [
                    "water" * 12 + "…",
                    "",
                    "Of gates",
                    "Why does the river run faster where the gate is open and the…",
                ],
                strict=True,
            )
        ]
        assert not listed["has_more"]
        first = (await http.get("/v1/conversations?limit=3")).json()
        assert (len(first["data"]), first["has_more"]) == (3, True)
        rest = (await http.get(f"/v1/conversations?after={first['last_id']}")).json()
        assert [one["id"] for one in rest["data"]] == [made[0]["id"]]
        assert (await http.get("/v1/conversations?limit=x")).json()["error"]["param"] == "limit"


async def test_two_tenants_never_see_each_others() -> None:
    place = Place(keys=(OURS, THEIRS))
    async with connected(place, OURS) as ours, connected(place, THEIRS) as theirs:
        made = await ours.create(items=[HI])
        [said] = (await ours.items.list(made.id)).data
        with pytest.raises(openai.NotFoundError) as unknown:
            await theirs.retrieve(UNKNOWN)
        calls = [
            theirs.retrieve(made.id),
            theirs.update(made.id, metadata={}),
            theirs.delete(made.id),
            theirs.items.list(made.id),
            theirs.items.create(made.id, items=[HI]),
            theirs.items.retrieve(said.id, conversation_id=made.id),
            theirs.items.delete(said.id, conversation_id=made.id),
        ]
        for call in calls:
            with pytest.raises(openai.NotFoundError) as foreign:
                await call
            assert foreign.value.message.replace(made.id, UNKNOWN) == unknown.value.message
        assert (await ours.items.list(made.id)).data == [said]
    async with place.http() as http:
        for key, ids in ((OURS, [made.id]), (THEIRS, [])):
            reply = await http.get("/v1/conversations", headers={"authorization": f"Bearer {key}"})
            assert [one["id"] for one in reply.json()["data"]] == ids
        for path in ("", "/x", f"/{made.id}", f"/{made.id}/items", f"/{made.id}/items?limit=x"):
            assert (await http.get(f"/v1/conversations{path}")).status_code == 401


# What is refused


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"items": [HI] * 21}, "items"),
        ({"items": [{"role": "tool", "content": "x"}]}, "items[0].role"),
        ({"items": [{"role": "user", "content": []}]}, "items[0].content"),
        ({"items": [{"type": "computer_call", "role": "user", "content": "x"}]}, "items[0].type"),
        ({"items": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "items[0].call_id"),
        ({"items": [{"role": "user", "content": "x", "id": "x"}]}, "items[0].id"),
        ({"items": "Hi"}, "items"),
        ({"metadata": {"x": 1}}, "metadata.x"),
        ({"metadata": {"x" * 65: ""}}, "metadata"),
        ({"metadata": {"x": "x" * 513}}, "metadata"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"title": "x"}, "title"),
    ],
)
async def test_a_wrong_field_is_named(body: dict[str, Any], param: str) -> None:
    async with Place().http() as http:
        headers = {"content-type": "application/json"}
        reply = await http.post("/v1/conversations", content=json.dumps(body), headers=headers)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"].startswith(param)


async def test_no_body_can_be_left_out() -> None:
    place = Place()
    await put(place.store)
    async with place.http() as http:
        for path, param in (("", "metadata"), ("/items", "items")):
            reply = await http.post(f"/v1/conversations/{UNKNOWN}{path}", json={})
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
        assert (await http.post(f"/v1/conversations/{UNKNOWN}/items", json={"items": []})).status_code == 400
        assert (await http.post("/v1/conversations", content="{}")).status_code == 415


@pytest.mark.parametrize(
    "wrong", ["x", "conv_", "conv_%20", "conv_é", "resp_" + "0" * 32, "conv_" + "0" * 65]
)
async def test_what_is_no_id_is_a_400(wrong: str) -> None:
    async with Place().http() as http:
        for path in ("", "/items", "/items/msg_1"):
            reply = await http.get(f"/v1/conversations/{wrong}{path}")
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "conversation_id")
        reply = await http.get(f"/v1/conversations/{UNKNOWN}/items/{wrong}")
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "item_id")


async def test_every_method_of_a_path_is_named() -> None:
    async with Place().http() as http:
        reply = await http.put(f"/v1/conversations/{UNKNOWN}")
        assert reply.status_code == 405
        assert set(reply.headers["allow"].split(", ")) == {"DELETE", "GET", "HEAD", "POST"}
        assert (await http.head("/v1/conversations")).status_code == 200


async def test_a_conversation_has_so_many_items_and_so_much_text() -> None:
    place = Place()
    await put(place.store, items=[item(f"msg_{i}") for i in range(MAX_ITEMS - 1)])
    async with connected(place) as api:
        with refusal(400, "conversation_full", "items"):
            await api.items.create(UNKNOWN, items=[HI, HI])
        await api.items.create(UNKNOWN, items=[HI])
        with refusal(400, "conversation_full", "items"):
            await api.items.create(UNKNOWN, items=[HI])
        # The bytes are those of UTF-8.
        half = "é" * (MAX_BYTES // 4)
        made = await api.create(items=[{"role": "user", "content": half}])
        await api.items.create(made.id, items=[{"role": "user", "content": half}])
        with refusal(400, "conversation_full", "items"):
            await api.items.create(made.id, items=[HI])
        texts = [found.content[0].text async for found in api.items.list(made.id)]
        assert texts == [half, half]


# When the store is not as it should be


async def test_without_the_store_nobody_is_told_that_there_is_nothing() -> None:
    place = Place()
    place.store.away = True
    async with place.http() as http:
        one = f"/v1/conversations/{UNKNOWN}"
        replies = [
            await http.get("/v1/conversations"),
            await http.get(one),
            await http.post(one, json={"metadata": {}}),
            await http.delete(one),
            await http.get(f"{one}/items"),
            await http.post(f"{one}/items", json={"items": [HI]}),
            await http.get(f"{one}/items/msg_1"),
            await http.delete(f"{one}/items/msg_1"),
        ]
    for reply in replies:
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "store_unavailable")
        assert int(reply.headers["retry-after"]) >= 1


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xff",
        b"[" * 100_000,
        b"[]",
        b"{}",
        {"items": [{}]},
        {"items": [item("msg_1"), {"id": "msg_2", "role": "user", "content": ["x"]}]},
        {"metadata": {"title": 1}},
        {"metadata": None},
        {"created_at": "x"},
        {"token_ids": "!"},
        {"token_ids": None},
    ],
)
async def test_a_corrupt_record_is_one_line_and_a_miss(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    place = Place()
    await put(place.store, **(value if isinstance(value, dict) else {}))
    if isinstance(value, bytes):
        await place.store.put(Key(KIND, "default", UNKNOWN), value, 100.0)
    with caplog.at_level(logging.WARNING, "penstock.gateway"):
        assert await CONVERSATIONS.get(place.store, "default", UNKNOWN) is None
    [line] = caplog.messages
    assert UNKNOWN in line
    assert "\n" not in line
    async with place.http() as http:
        assert (await http.get(f"/v1/conversations/{UNKNOWN}")).status_code == 404
        listed = (await http.get("/v1/conversations")).json()
        assert (listed["data"], listed["last_id"]) == ([], UNKNOWN)


async def test_a_day_after_it_was_last_used_it_is_forgotten() -> None:
    place = Place()
    async with place.http() as http:
        made = [(await http.post("/v1/conversations", json={})).json()["id"] for _ in range(2)]
        place.clock.now += TTL_S - 1
        assert (await http.get(f"/v1/conversations/{made[0]}")).status_code == 200
        assert len((await http.get("/v1/conversations")).json()["data"]) == 2
        place.clock.now += TTL_S - 1
        assert (await http.get(f"/v1/conversations/{made[0]}")).status_code == 200
        assert (await http.get(f"/v1/conversations/{made[1]}")).status_code == 404


# What responses do with them

ASKED, SAID = item("msg_1"), item("msg_2", "assistant", "Ho")
ANSWERED = Thread(({"role": "user", "content": "x"}, {"role": "assistant", "content": "Ho"}), (1, 2, 3, 4))


async def test_a_response_is_added_once() -> None:
    store = MemoryStore()
    await put(store)
    await append(store, "default", UNKNOWN, [ASKED], [SAID], ANSWERED)
    found = await find(store, "default", UNKNOWN, "conversation")
    assert (found.items, found.thread()) == ([ASKED, SAID], ANSWERED)
    later = Thread(({"role": "assistant", "content": "Ho"},), (9, 9))
    await append(store, "default", UNKNOWN, [ASKED], [SAID], later)
    assert await find(store, "default", UNKNOWN, "conversation") == found
    await append(store, "default", UNKNOWN, [ASKED, item("msg_3")], [item("msg_4", "assistant", "y")], later)
    again = await find(store, "default", UNKNOWN, "conversation")
    assert [one["id"] for one in again.items] == ["msg_1", "msg_2", "msg_3", "msg_4"]
    assert again.thread().token_ids == later.token_ids


async def test_a_response_does_not_bring_a_deleted_conversation_back() -> None:
    store = MemoryStore()
    await append(store, "default", UNKNOWN, [ASKED], [SAID], ANSWERED)
    assert await CONVERSATIONS.get(store, "default", UNKNOWN) is None


async def test_deleting_and_adding_items_leave_the_tokens_alone() -> None:
    place = Place()
    await put(place.store)
    await append(place.store, "default", UNKNOWN, [ASKED], [SAID], ANSWERED)
    async with connected(place) as api:
        await api.items.create(UNKNOWN, items=[HI])
        await api.items.delete("msg_1", conversation_id=UNKNOWN)
    thread = (await find(place.store, "default", UNKNOWN, "conversation")).thread()
    assert thread.token_ids == ANSWERED.token_ids
    assert [message["content"] for message in thread.messages] == ["Ho", "Hi"]


async def test_changes_at_the_same_time_all_count() -> None:
    place = Place()
    place.store.slow = True
    await put(place.store)
    async with place.http() as http:
        await asyncio.gather(
            *(http.post(f"/v1/conversations/{UNKNOWN}/items", json={"items": [HI]}) for _ in range(8)),
            *(
                append(place.store, "default", UNKNOWN, [], [item(f"msg_{i}", "assistant")], ANSWERED)
                for i in range(8)
            ),
        )
    assert len((await find(place.store, "default", UNKNOWN, "conversation")).items) == 16


@pytest.mark.usefixtures("patient")
async def test_changes_by_two_replicas_at_the_same_time_all_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a store of its own, before one Redis, and no lock of one process holds in the other."""
    monkeypatch.setattr(CONVERSATIONS, "exclusive", lambda *_: contextlib.nullcontext())
    with RedisServer() as server:
        stores = [
            SharedStore(MemoryStore(), RedisStore(server.url, namespace="n", replica=f"h:{n}"))
            for n in (1, 2)
        ]
        async with stores[0].running(), stores[1].running():
            await put(stores[0])
            await stores[0].flush()

            async def add(number: int) -> None:
                said = item(f"msg_{number}", "assistant")
                await append(stores[number % 2], "default", UNKNOWN, [], [said], ANSWERED)

            await asyncio.gather(*(add(number) for number in range(12)))
            for store in stores:
                assert len((await find(store, "default", UNKNOWN, "conversation")).items) == 12


async def test_what_cannot_be_read_can_be_tried_again() -> None:
    place = Place()
    await put(place.store)
    place.store.away = True
    with pytest.raises(StoreUnavailable):
        await append(place.store, "default", UNKNOWN, [ASKED], [SAID], ANSWERED)
    with pytest.raises(ApiError) as error:
        await find(place.store, "default", UNKNOWN, "conversation")
    assert error.value.status == 503
    place.store.away = False
    await append(place.store, "default", UNKNOWN, [ASKED], [SAID], ANSWERED)
    assert len((await find(place.store, "default", UNKNOWN, "conversation")).items) == 2


def test_room_for_a_response_is_asked_for_before_it_is_made() -> None:
    conversation = Conversation(UNKNOWN, 1, items=[item(f"msg_{i}") for i in range(MAX_ITEMS)])
    with pytest.raises(ApiError) as error:
        conversation.add(input_items([InputMessage(role="user", content="x")]), "input")
    assert (error.value.status, error.value.param) == (400, "input")
    assert len(conversation.items) == MAX_ITEMS


def test_one_response_at_a_time() -> None:
    locks = ConversationLocks()
    locks.take("ours", UNKNOWN)
    locks.take("theirs", UNKNOWN)
    with pytest.raises(ApiError) as error:
        locks.take("ours", UNKNOWN)
    assert (error.value.status, error.value.code) == (409, "conversation_locked")
    locks.release("ours", UNKNOWN)
    locks.release("ours", UNKNOWN)
    locks.take("ours", UNKNOWN)
