"""Conversations: messages that clients and responses add to, and the thread that the model has of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus

from penstock.gateway.errors import answering_unavailable, existing, invalid, not_found
from penstock.gateway.sessions.responses.objects import Item, JsonObject, as_messages, texts_of
from penstock.gateway.sessions.responses.schemas import check_id
from penstock.gateway.sessions.responses.threads import Thread
from penstock.gateway.store.interface import Store
from penstock.gateway.store.packing import TOKEN_BYTES, Tokens
from penstock.gateway.store.records import Records
from penstock.gateway.store.time_budget import retrying

KIND = "conversation"
TTL_S = 24 * 3600.0
"""A conversation is forgotten so long after it was last read or changed."""
MAX_ITEMS = 2000
MAX_BYTES = 1024 * 1024
"""The text of one conversation may have so many bytes."""
MAX_TITLE_CHARS = 60

answering = partial(answering_unavailable, "Conversations")
"""A store that does not answer is a 503 while this is entered."""


@dataclass(slots=True)
class Conversation:
    """A conversation, as it is kept."""

    id: str
    created_at: int
    metadata: dict[str, str] = field(default_factory=dict)
    items: list[Item] = field(default_factory=list)
    token_ids: Tokens = ()
    """The context that the last answer was generated in, as a Thread has it."""
    num_written: int = 0
    """The pieces of token ids that were written for it, as a Thread has them."""

    def thread(self) -> Thread:
        return Thread(tuple(as_messages(self.items)), self.token_ids, self.num_written)

    @property
    def title(self) -> str:
        """The title that the client gave, or the first words that a user said."""
        users = (item for item in self.items if item["type"] == "message" and item["role"] == "user")
        said = next(users, None)
        first = "" if said is None else as_messages([said])[0]["content"]
        return self.metadata.get("title") or _first_words(first)

    def add(self, items: Sequence[Item], param: str) -> None:
        """Adds items; raises 400 if there is no room, or if one of them is there already."""
        if len(self.items) + len(items) > MAX_ITEMS:
            raise invalid(f"A conversation may have at most {MAX_ITEMS} items.", param, "conversation_full")
        if _num_text_bytes([*self.items, *items]) > MAX_BYTES:
            message = f"The items of a conversation may have at most {MAX_BYTES} bytes of text."
            raise invalid(message, param, "conversation_full")
        ids = {item["id"] for item in self.items}
        for i, item in enumerate(items):
            if item["id"] in ids:
                message = f"The conversation has an item '{item['id']}' already."
                raise invalid(message, f"{param}[{i}].id")
        self.items += items

    def item(self, item_id: str) -> Item:
        """The item of that id; raises 404 if there is none."""
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


def _num_bytes(conversation: Conversation) -> int:
    return _num_text_bytes(conversation.items) + TOKEN_BYTES * len(conversation.token_ids)


CONVERSATIONS = Records(KIND, Conversation, TTL_S, _num_bytes)


async def find(store: Store, tenant: str, conversation_id: str, param: str) -> Conversation:
    """The conversation that a client named.

    Raises:
        ApiError: 400 for what is no id, 404 if this tenant has none of that id, 503 if that cannot be said.
    """
    check_id(param, conversation_id, "conv")
    with answering():
        kept = await retrying(lambda: CONVERSATIONS.get(store, tenant, conversation_id))
    return existing_conversation(kept, conversation_id)


async def append(
    store: Store,
    tenant: str,
    conversation_id: str,
    input_items: Sequence[Item],
    output_items: Sequence[Item],
    thread: Thread,
) -> None:
    """Adds a response to the conversation, if it is still there. The second time, nothing is changed.

    Args:
        thread: what the conversation's thread has become.

    Raises:
        StoreUnavailable: nothing was added; it is worth trying again.
    """

    def edit(conversation: Conversation) -> None:
        ids = {item["id"] for item in conversation.items}
        if output_items[0]["id"] not in ids:
            conversation.items += [item for item in input_items if item["id"] not in ids]
            conversation.items += output_items
            conversation.token_ids, conversation.num_written = thread.token_ids, thread.num_written

    await CONVERSATIONS.change(store, tenant, conversation_id, edit)


class ConversationLocks:
    """ConversationLocks are the conversations that a response is at work on: one at a time."""

    def __init__(self) -> None:
        self._taken: set[tuple[str, str]] = set()

    def take(self, tenant: str, conversation_id: str) -> None:
        """Takes a conversation for a response; raises 409 if another response has it."""
        if (tenant, conversation_id) in self._taken:
            message = f"Another response is at work on the conversation '{conversation_id}'."
            raise invalid(message, "conversation", "conversation_locked", HTTPStatus.CONFLICT)
        self._taken.add((tenant, conversation_id))

    def release(self, tenant: str, conversation_id: str) -> None:
        """Gives a conversation back, which may have been given back already."""
        self._taken.discard((tenant, conversation_id))


def existing_conversation(conversation: Conversation | None, conversation_id: str) -> Conversation:
    return existing(conversation, f"Conversation with id '{conversation_id}' not found.")


def _num_text_bytes(items: Sequence[Item]) -> int:
    return sum(len(text.encode()) for item in items for text in texts_of(item))


def _first_words(text: str) -> str:
    words = " ".join(text[: 8 * MAX_TITLE_CHARS].split())
    if len(words) <= MAX_TITLE_CHARS:
        return words
    return (words[: MAX_TITLE_CHARS + 1].rpartition(" ")[0] or words[:MAX_TITLE_CHARS]) + "…"
