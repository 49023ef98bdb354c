"""`/v1/conversations`: messages kept on the server, and read, added to and deleted by clients."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.gateway.endpoints.intake import Endpoints
from penstock.gateway.endpoints.operation import ANY, BY_ID, ONCE, looks_up, serves
from penstock.gateway.http.json_response import JsonResponse
from penstock.gateway.sessions import conversations
from penstock.gateway.sessions.conversations import CONVERSATIONS, KIND, Conversation
from penstock.gateway.sessions.owners import owned_id
from penstock.gateway.sessions.responses.objects import Item, input_items, page
from penstock.gateway.sessions.responses.schemas import (
    ITEM_PREFIXES,
    InputItem,
    PageQuery,
    check_id,
    check_items,
)
from penstock.gateway.store.interface import Key
from penstock.gateway.wire.schemas import Metadata, check_metadata
from penstock.gateway.wire.strict import Many, Most, StrictBody, validated

MAX_ITEMS_A_CALL = 20
MAX_LISTED_CONVERSATIONS = 10_000

Items = Annotated[Many[InputItem], Most(MAX_ITEMS_A_CALL)]


class CreateBody(StrictBody):
    items: Items | None = None
    metadata: Metadata | None = None


class UpdateBody(StrictBody):
    metadata: Metadata | None


class AddBody(StrictBody):
    items: Annotated[Items, Field(min_length=1)]


class ConversationsApi(Endpoints):
    """The HTTP interface to one service's conversations."""

    @serves("POST /v1/conversations", ONCE, CreateBody, statuses=(503,))
    async def create(self, http: HttpRequest) -> Response:
        """Begin a conversation."""
        tenant = self._intake.tenant(http)
        body = await self._intake.read(http, CreateBody)
        check_metadata(body.metadata)
        conversation = Conversation(
            owned_id("conv_", self._service.tag, 48), int(time.time()), body.metadata or {}
        )
        conversation.add(self._items(body.items or []), "items")
        await CONVERSATIONS.put(self._service.store, tenant, conversation.id, conversation)
        return JsonResponse(conversation.as_json())

    @looks_up("/v1/conversations", ANY, query=PageQuery, statuses=(503,))
    async def list_conversations(self, http: HttpRequest) -> Response:
        """List the caller's conversations.

        Each is shown with its title. Looking at them does not keep them alive.
        """
        tenant = self._intake.tenant(http)
        query = validated(PageQuery, http.query_params)
        store = self._service.store
        with conversations.answering():
            newest_first = await store.list(KIND, tenant, MAX_LISTED_CONVERSATIONS)
            listed = page([{"id": conversation_id} for conversation_id in reversed(newest_first)], query)
            read = await CONVERSATIONS.some(store, tenant, [entry["id"] for entry in listed["data"]])
        # The ids of the page stay, for the next one to go on after.
        listed["data"] = [{**one.as_json(), "title": one.title} for one in read]
        return JsonResponse(listed)

    @looks_up("/v1/conversations/{conversation_id}", BY_ID)
    async def show(self, http: HttpRequest) -> Response:
        """Show a conversation."""
        return JsonResponse((await self._find(http)).as_json())

    @serves("POST /v1/conversations/{conversation_id}", BY_ID, UpdateBody)
    async def update(self, http: HttpRequest) -> Response:
        """Replace the metadata of a conversation."""
        key = self._key(http)
        body = await self._intake.read(http, UpdateBody)
        check_metadata(body.metadata)

        def edit(conversation: Conversation) -> None:
            conversation.metadata = body.metadata or {}

        return JsonResponse((await self._change(key, edit)).as_json())

    @serves("DELETE /v1/conversations/{conversation_id}", BY_ID)
    async def delete(self, http: HttpRequest) -> Response:
        """Forget a conversation."""
        key = self._key(http)
        with conversations.answering():
            async with CONVERSATIONS.exclusive(key.tenant, key.id):
                there = await CONVERSATIONS.get(self._service.store, key.tenant, key.id, keep=False)
                conversations.existing_conversation(there, key.id)
                await self._service.store.delete(key)
        return JsonResponse({"id": key.id, "object": "conversation.deleted", "deleted": True})

    @looks_up("/v1/conversations/{conversation_id}/items", BY_ID, query=PageQuery)
    async def list_items(self, http: HttpRequest) -> Response:
        """List the messages of a conversation."""
        conversation = await self._find(http)
        return JsonResponse(page(conversation.items, validated(PageQuery, http.query_params)))

    @serves("POST /v1/conversations/{conversation_id}/items", BY_ID | ONCE, AddBody)
    async def add_items(self, http: HttpRequest) -> Response:
        """Add messages to a conversation."""
        key = self._key(http)
        items = self._items((await self._intake.read(http, AddBody)).items)
        await self._change(key, lambda conversation: conversation.add(items, "items"))
        return JsonResponse(page(items, PageQuery(order="asc")))

    @looks_up("/v1/conversations/{conversation_id}/items/{item_id}", BY_ID)
    async def show_item(self, http: HttpRequest) -> Response:
        """Show a message."""
        item_id = check_id("item_id", http.path_params["item_id"], *ITEM_PREFIXES)
        return JsonResponse((await self._find(http)).item(item_id))

    @serves("DELETE /v1/conversations/{conversation_id}/items/{item_id}", BY_ID)
    async def delete_item(self, http: HttpRequest) -> Response:
        """Forget a message."""
        key = self._key(http)
        item_id = check_id("item_id", http.path_params["item_id"], *ITEM_PREFIXES)

        def edit(conversation: Conversation) -> None:
            conversation.items.remove(conversation.item(item_id))

        return JsonResponse((await self._change(key, edit)).as_json())

    def _items(self, items: list[InputItem]) -> list[Item]:
        check_items(items, "items")
        return input_items(items)

    def _key(self, http: HttpRequest) -> Key:
        """Returns the conversation's key, checking the client first so that ids stay secret."""
        tenant = self._intake.tenant(http)
        conversation_id = check_id("conversation_id", http.path_params["conversation_id"], "conv")
        return Key(KIND, tenant, conversation_id)

    async def _find(self, http: HttpRequest) -> Conversation:
        key = self._key(http)
        return await conversations.find(self._service.store, key.tenant, key.id, "conversation_id")

    async def _change(self, key: Key, edit: Callable[[Conversation], None]) -> Conversation:
        with conversations.answering():
            changed = await CONVERSATIONS.change(self._service.store, key.tenant, key.id, edit)
        return conversations.existing_conversation(changed, key.id)
