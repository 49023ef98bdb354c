"""`/v1/conversations`: messages that clients and responses add to, and the thread that the model has of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Annotated
from weakref import WeakValueDictionary

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from gateway.endpoints.intake import Intake, route
from gateway.http.errors import invalid, not_found, unavailable
from gateway.http.off_loop import off_loop
from gateway.service import Service
from gateway.sessions.responses.objects import JsonObject, as_messages, input_items, new_id, page
from gateway.sessions.responses.schemas import (
    InputMessage,
    PageQuery,
    check_id,
    check_items,
    check_metadata,
    read_page_query,
)
from gateway.sessions.responses.threads import Thread, pack, unpack
from gateway.store.interface import Key, Store, StoreUnavailable
from gateway.wire.frames import Json
from gateway.wire.schemas import Many, StrictBody

log = logging.getLogger("penstock.gateway")

KIND = "conversation"
TTL_S = 24 * 3600.0
"""A conversation is forgotten so long after it was last read or changed."""
MAX_ITEMS_A_CALL = 20
MAX_ITEMS = 2000
MAX_BYTES = 1024 * 1024
"""Of one conversation's text."""
MAX_LISTED_CONVERSATIONS = 10_000
MAX_TITLE_CHARS = 60


@dataclass(slots=True)
class Conversation:
    """One record."""

    id: str
    created_at: int
    metadata: dict[str, str] = field(default_factory=dict)
    items: list[JsonObject] = field(default_factory=list)
    token_ids: tuple[int, ...] = ()
    """The context that the last answer was generated in; see Thread."""

    def thread(self) -> Thread:
        return Thread(tuple(as_messages(self.items)), self.token_ids)

    @property
    def title(self) -> str:
        """What the client called it, or the first words that a user said."""
        said = next((item for item in self.items if item["role"] == "user"), None)
        first = "" if said is None else as_messages([said])[0]["content"]
        return self.metadata.get("title") or _first_words(first)

    def add(self, items: Sequence[JsonObject], param: str) -> None:
        """Raises 400 if there is no room, or if an item is there already."""
        if len(self.items) + len(items) > MAX_ITEMS:
            raise invalid(f"A conversation may have at most {MAX_ITEMS} items.", param, "conversation_full")
        if _num_bytes([*self.items, *items]) > MAX_BYTES:
            message = f"The items of a conversation may have at most {MAX_BYTES} bytes of text."
            raise invalid(message, param, "conversation_full")
        known = {item["id"] for item in self.items}
        for i, item in enumerate(items):
            if item["id"] in known:
                message = f"The conversation has an item '{item['id']}' already."
                raise invalid(message, f"{param}[{i}].id")
        self.items += items

    def item(self, item_id: str) -> JsonObject:
        """Raises 404 if there is no such item."""
        for item in self.items:
            if item["id"] == item_id:
                return item
        raise not_found(f"Item with id '{item_id}' not found in conversation '{self.id}'.")

    def as_json(self) -> JsonObject:
        """OpenAI's object, which has no items."""
        return {
            "id": self.id,
            "object": "conversation",
            "created_at": self.created_at,
            "metadata": self.metadata,
        }


# In the store


async def load(store: Store, tenant: str, conversation_id: str) -> Conversation | None:
    """The conversation, for another `TTL_S`; None if this tenant has none of that id.

    Raises:
        StoreUnavailable: it cannot be said.
    """
    return await _read(store, Key(KIND, tenant, conversation_id), TTL_S)


async def find(store: Store, tenant: str, conversation_id: str, param: str) -> Conversation:
    """The conversation that a client named.

    Raises:
        ApiError: 400 for what is no id, 404 if this tenant has none of that id, 503 if that cannot be said.
    """
    check_id(param, conversation_id, "conv")
    with _answering_unavailable():
        return _found(await load(store, tenant, conversation_id), conversation_id)


async def append(
    store: Store,
    tenant: str,
    conversation_id: str,
    input_items: Sequence[JsonObject],
    output_item: JsonObject,
    thread: Thread,
) -> None:
    """Adds a response to the conversation, if it is still there. The second time, nothing is changed.

    Args:
        thread: what the conversation's thread has become.

    Raises:
        StoreUnavailable: nothing was added; it is worth trying again.
    """
    async with _changing(store, Key(KIND, tenant, conversation_id)) as conversation:
        if conversation is None:
            return
        known = {item["id"] for item in conversation.items}
        if output_item["id"] not in known:
            conversation.items += [item for item in input_items if item["id"] not in known]
            conversation.items.append(output_item)
            conversation.token_ids = thread.token_ids


class ConversationLocks:
    """The conversations that a response is at work on: there is one at a time."""

    def __init__(self) -> None:
        self._taken: set[tuple[str, str]] = set()

    def take(self, tenant: str, conversation_id: str) -> None:
        """Raises 409 if another response has it."""
        if (tenant, conversation_id) in self._taken:
            message = f"Another response is at work on the conversation '{conversation_id}'."
            raise invalid(message, "conversation", "conversation_locked", HTTPStatus.CONFLICT)
        self._taken.add((tenant, conversation_id))

    def release(self, tenant: str, conversation_id: str) -> None:
        """Idempotent."""
        self._taken.discard((tenant, conversation_id))


_writers: WeakValueDictionary[Key, asyncio.Lock] = WeakValueDictionary()
"""Of this process. Of two processes that change one conversation at a time, the later one wins."""


@contextlib.asynccontextmanager
async def _changing(store: Store, key: Key) -> AsyncIterator[Conversation | None]:
    """The conversation to be changed, and written when that went well; one change at a time."""
    async with _writing(key):
        conversation = await _read(store, key, TTL_S)
        yield conversation
        if conversation is not None:
            await _write(store, key, conversation)


@contextlib.asynccontextmanager
async def _writing(key: Key) -> AsyncIterator[None]:
    lock = _writers.setdefault(key, asyncio.Lock())
    async with lock:
        yield


async def _read(store: Store, key: Key, ttl_s: float | None) -> Conversation | None:
    value = await store.get(key, ttl_s)
    try:
        return None if value is None else await off_loop(len(value), _decode, key.id, value)
    except (ValueError, RecursionError) as error:
        log.warning("the record of conversation %s is corrupt: %s", key.id, error)
        return None


async def _write(store: Store, key: Key, conversation: Conversation) -> None:
    num_bytes = _num_bytes(conversation.items) + 4 * len(conversation.token_ids)
    await store.put(key, await off_loop(num_bytes, _encode, conversation), TTL_S)


def _encode(conversation: Conversation) -> bytes:
    record = {
        "created_at": conversation.created_at,
        "metadata": conversation.metadata,
        "items": conversation.items,
        "token_ids": pack(conversation.token_ids),
    }
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()


def _decode(conversation_id: str, value: bytes) -> Conversation:
    record = json.loads(value)
    if not (
        isinstance(record, dict)
        and isinstance(record.get("created_at"), int)
        and _is_text_to_text(record.get("metadata"))
        and isinstance(record.get("items"), list)
        and all(map(_is_item, record["items"]))
    ):
        raise ValueError("it has other fields")
    token_ids = unpack(record.get("token_ids"))
    return Conversation(conversation_id, record["created_at"], record["metadata"], record["items"], token_ids)


def _is_text_to_text(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _is_item(value: object) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("id"), str)
        and isinstance(value.get("role"), str)
        and isinstance(value.get("content"), list)
        and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in value["content"])
    )


@contextlib.contextmanager
def _answering_unavailable() -> Iterator[None]:
    try:
        yield
    except StoreUnavailable:
        raise unavailable("Conversations cannot be read now.", "store_unavailable") from None


def _found(conversation: Conversation | None, conversation_id: str) -> Conversation:
    if conversation is None:
        raise not_found(f"Conversation with id '{conversation_id}' not found.")
    return conversation


def _num_bytes(items: Sequence[JsonObject]) -> int:
    return sum(len(part["text"].encode()) for item in items for part in item["content"])


def _first_words(text: str) -> str:
    words = " ".join(text[: 8 * MAX_TITLE_CHARS].split())
    if len(words) <= MAX_TITLE_CHARS:
        return words
    return (words[: MAX_TITLE_CHARS + 1].rpartition(" ")[0] or words[:MAX_TITLE_CHARS]) + "…"


# Over HTTP


_MOST: dict[str, str | int] = {
    "items": MAX_ITEMS_A_CALL,
    "items[].content": "max_content_parts",
    "metadata": "max_metadata",
}


class _CreateBody(StrictBody):
    MOST = _MOST

    items: Many[InputMessage] | None = None
    metadata: dict[str, str] | None = None


class _UpdateBody(StrictBody):
    MOST = _MOST

    metadata: dict[str, str] | None


class _AddBody(StrictBody):
    MOST = _MOST

    items: Annotated[Many[InputMessage], Field(min_length=1)]


class ConversationsApi:
    """The HTTP interface to one service's conversations."""

    def __init__(self, service: Service, intake: Intake) -> None:
        self._service = service
        self._intake = intake

    def routes(self) -> list[Route]:
        one = "/v1/conversations/{conversation_id}"
        return [
            route("/v1/conversations", GET=self.list_conversations, POST=self.create),
            route(one, GET=self.show, POST=self.update, DELETE=self.delete),
            route(f"{one}/items", GET=self.list_items, POST=self.add_items),
            route(f"{one}/items/{{item_id}}", GET=self.show_item, DELETE=self.delete_item),
        ]

    async def create(self, http: HttpRequest) -> Response:
        tenant = self._tenant(http)
        body = await self._intake.read(http, _CreateBody)
        check_metadata(body.metadata)
        conversation = Conversation(new_id("conv"), int(time.time()), body.metadata or {})
        conversation.add(self._items(body.items or []), "items")
        await _write(self._service.store, Key(KIND, tenant, conversation.id), conversation)
        return Json(conversation.as_json())

    async def list_conversations(self, http: HttpRequest) -> Response:
        """This tenant's, each with its title. Looking at them does not keep them alive."""
        tenant = self._tenant(http)
        query = read_page_query(http.query_params)
        store = self._service.store
        with _answering_unavailable():
            newest_first = await store.list(KIND, tenant, MAX_LISTED_CONVERSATIONS)
            found = page([{"id": conversation_id} for conversation_id in reversed(newest_first)], query)
            keys = [Key(KIND, tenant, entry["id"]) for entry in found["data"]]
            conversations = await asyncio.gather(*(_read(store, key, None) for key in keys))
        # The ids of the page stay, for the next one to go on after.
        found["data"] = [{**one.as_json(), "title": one.title} for one in conversations if one is not None]
        return Json(found)

    async def show(self, http: HttpRequest) -> Response:
        return Json((await self._find(http)).as_json())

    async def update(self, http: HttpRequest) -> Response:
        key = self._key(http)
        body = await self._intake.read(http, _UpdateBody)
        check_metadata(body.metadata)
        async with self._changing(key) as conversation:
            conversation.metadata = body.metadata or {}
        return Json(conversation.as_json())

    async def delete(self, http: HttpRequest) -> Response:
        key = self._key(http)
        with _answering_unavailable():
            async with _writing(key):
                _found(await _read(self._service.store, key, None), key.id)
                await self._service.store.delete(key)
        return Json({"id": key.id, "object": "conversation.deleted", "deleted": True})

    async def list_items(self, http: HttpRequest) -> Response:
        conversation = await self._find(http)
        return Json(page(conversation.items, read_page_query(http.query_params)))

    async def add_items(self, http: HttpRequest) -> Response:
        key = self._key(http)
        items = self._items((await self._intake.read(http, _AddBody)).items)
        async with self._changing(key) as conversation:
            conversation.add(items, "items")
        return Json(page(items, PageQuery(order="asc")))

    async def show_item(self, http: HttpRequest) -> Response:
        item_id = check_id("item_id", http.path_params["item_id"], "msg")
        return Json((await self._find(http)).item(item_id))

    async def delete_item(self, http: HttpRequest) -> Response:
        key = self._key(http)
        item_id = check_id("item_id", http.path_params["item_id"], "msg")
        async with self._changing(key) as conversation:
            conversation.items.remove(conversation.item(item_id))
        return Json(conversation.as_json())

    def _tenant(self, http: HttpRequest) -> str:
        return self._intake.client(http).tenant.name

    def _items(self, messages: list[InputMessage]) -> list[JsonObject]:
        check_items(messages, "items")
        return input_items(messages)

    def _key(self, http: HttpRequest) -> Key:
        """Who asks, then for what: a stranger is told nothing about ids."""
        tenant = self._tenant(http)
        conversation_id = check_id("conversation_id", http.path_params["conversation_id"], "conv")
        return Key(KIND, tenant, conversation_id)

    async def _find(self, http: HttpRequest) -> Conversation:
        key = self._key(http)
        return await find(self._service.store, key.tenant, key.id, "conversation_id")

    @contextlib.asynccontextmanager
    async def _changing(self, key: Key) -> AsyncIterator[Conversation]:
        with _answering_unavailable():
            async with _changing(self._service.store, key) as conversation:
                yield _found(conversation, key.id)
