"""Conversations: messages that clients and responses add to, and the thread that the model has of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from weakref import WeakValueDictionary

from gateway.http.errors import invalid, not_found, unavailable
from gateway.http.off_loop import off_loop
from gateway.sessions.responses.objects import JsonObject, as_messages
from gateway.sessions.responses.schemas import (
    check_id,
)
from gateway.sessions.responses.threads import Thread, pack, unpack
from gateway.store.interface import Key, Store, StoreUnavailable

log = logging.getLogger("penstock.gateway")

KIND = "conversation"
TTL_S = 24 * 3600.0
"""A conversation is forgotten so long after it was last read or changed."""
MAX_ITEMS = 2000
MAX_BYTES = 1024 * 1024
"""Of one conversation's text."""
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
    return await read(store, Key(KIND, tenant, conversation_id), TTL_S)


async def find(store: Store, tenant: str, conversation_id: str, param: str) -> Conversation:
    """The conversation that a client named.

    Raises:
        ApiError: 400 for what is no id, 404 if this tenant has none of that id, 503 if that cannot be said.
    """
    check_id(param, conversation_id, "conv")
    with answering_unavailable():
        return found(await load(store, tenant, conversation_id), conversation_id)


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
    async with changing(store, Key(KIND, tenant, conversation_id)) as conversation:
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
async def changing(store: Store, key: Key) -> AsyncIterator[Conversation | None]:
    """The conversation to be changed, and written when that went well; one change at a time."""
    async with writing(key):
        conversation = await read(store, key, TTL_S)
        yield conversation
        if conversation is not None:
            await write(store, key, conversation)


@contextlib.asynccontextmanager
async def writing(key: Key) -> AsyncIterator[None]:
    lock = _writers.setdefault(key, asyncio.Lock())
    async with lock:
        yield


async def read(store: Store, key: Key, ttl_s: float | None) -> Conversation | None:
    value = await store.get(key, ttl_s)
    try:
        return None if value is None else await off_loop(len(value), _decode, key.id, value)
    except (ValueError, RecursionError) as error:
        log.warning("the record of conversation %s is corrupt: %s", key.id, error)
        return None


async def write(store: Store, key: Key, conversation: Conversation) -> None:
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
def answering_unavailable() -> Iterator[None]:
    try:
        yield
    except StoreUnavailable:
        raise unavailable("Conversations cannot be read now.", "store_unavailable") from None


def found(conversation: Conversation | None, conversation_id: str) -> Conversation:
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
