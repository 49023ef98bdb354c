"""Chat completions that clients had stored: their records."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from penstock.gateway.off_loop import OFF_LOOP_BYTES, off_loop
from penstock.gateway.store.interface import Store, StoreUnavailable
from penstock.gateway.store.records import Records

KIND = "chat_completion"
KEPT_S = 24 * 3600.0
"""A completion is kept for so long after it was stored or asked for."""

_LARGE = OFF_LOOP_BYTES + 1
"""The size of work that always leaves the event loop, for nobody knows yet how large it is."""

log = logging.getLogger("penstock.gateway")


@dataclass(slots=True, kw_only=True)
class StoredChat:
    """The record of a chat completion."""

    completion: dict[str, Any]
    """Its fields; the choices, which may be large, as JSON."""
    messages: list[dict[str, Any]]
    metadata: dict[str, str] = field(default_factory=dict)
    num_bytes: int

    def as_json(self) -> dict[str, Any]:
        """The completion as OpenAI's API shows it."""
        choices = self.completion["choices"]
        if isinstance(choices, str):  # an older server kept a list
            choices = orjson.Fragment(choices)
        return {**self.completion, "choices": choices, "metadata": self.metadata}

    def messages_as_json(self) -> list[dict[str, Any]]:
        """The messages that it answers as OpenAI's API shows them."""
        return [_message(f"{self.completion['id']}-{i}", message) for i, message in enumerate(self.messages)]


CHATS = Records(KIND, StoredChat, KEPT_S, lambda chat: chat.num_bytes)


async def keep(
    store: Store, tenant: str, request: Mapping[str, Any], completion: dict[str, Any], num_bytes: int
) -> None:
    """Stores a completion with the `messages` and `metadata` of its request; its client gets it in any case.

    Args:
        num_bytes: of the completion as JSON.
    """
    messages = await off_loop(_LARGE, orjson.dumps, request["messages"])
    chat = StoredChat(completion=completion, num_bytes=num_bytes + len(messages), **request)
    try:
        await CHATS.put(store, tenant, completion["id"], chat)
    except StoreUnavailable as error:
        log.warning("the completion %s is not stored: %s", completion["id"], error)


def _message(id: str, message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    is_text = content is None or isinstance(content, str)
    return {
        **message,
        "id": id,
        "content": content if is_text else None,
        "content_parts": None if is_text else content,
    }


def fits(chat: StoredChat, model: str | None, metadata: Mapping[str, str]) -> bool:
    """Returns whether a completion is of that model and has all of that metadata."""
    is_of_model = model in (None, chat.completion["model"])
    return is_of_model and metadata.items() <= chat.metadata.items()
