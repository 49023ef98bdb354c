"""`/v1/chat/completions` with `store: true`: completions are kept, listed, shown, changed and forgotten."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, ClassVar, Literal

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from gateway.endpoints.completions import CHAT_ID
from gateway.endpoints.intake import Handler, Intake, route
from gateway.http.connections import WRITABLE, WRITE, ServerSendMiddleware
from gateway.http.errors import ApiError, not_found
from gateway.http.limits import parse_object
from gateway.http.off_loop import off_loop
from gateway.service import Service
from gateway.sessions.chats import CHATS, KIND, Chunks, StoredChat, fits
from gateway.sessions.responses.objects import page, place_after
from gateway.sessions.responses.schemas import PageQuery, check_metadata, read_page_query
from gateway.store.interface import Key, StoreUnavailable
from gateway.store.records import answering_unavailable
from gateway.wire.frames import Json
from gateway.wire.strict import StrictBody, validated

MAX_LISTED = 1000
_READ_AT_ONCE = 32
_CHATS, _CHAT = "/v1/chat/completions", "/v1/chat/completions/{id}"

_answering = partial(answering_unavailable, "Stored completions")

log = logging.getLogger("penstock.gateway")


class ChatsQuery(PageQuery):
    """The query of a list of stored completions, beside `metadata[KEY]`."""

    order: Literal["asc", "desc"] = "asc"
    model: str | None = None


class ChatUpdateBody(StrictBody):
    """The body of `POST /v1/chat/completions/{id}`."""

    MOST: ClassVar[Mapping[str, str | int]] = {"metadata": "max_metadata"}

    metadata: dict[str, str] | None


class StoredChatsApi:
    """The stored chat completions of one service."""

    def __init__(self, service: Service, intake: Intake, routes: Sequence[Route]) -> None:
        """`routes` make completions, and have those that are recorded."""
        self._store = service.store
        self._limits = service.options.limits
        self._intake = intake
        self._others = [route for route in routes if route.path not in (_CHATS, _CHAT)]
        by_path: dict[str, Handler] = {route.path: route.endpoint for route in routes}
        self._make, self._recorded = by_path[_CHATS], by_path[_CHAT]

    def routes(self) -> list[Route]:
        return [
            route(_CHATS, POST=self.create, GET=self.list_chats),
            route(_CHAT, GET=self.show, POST=self.update, DELETE=self.delete),
            route(f"{_CHAT}/messages", GET=self.list_messages),
            *self._others,
        ]

    async def create(self, http: HttpRequest) -> Response:
        tenant, asked = self._tenant(http), await self._asked(http)
        reply = await self._make(http)
        return reply if asked is None else _Kept(reply, lambda found: self._keep(tenant, asked, found))

    async def _asked(self, http: HttpRequest) -> dict[str, Any] | None:
        """The body of a request whose completion is to be stored."""
        body = await http.body()
        if b'"store"' not in body and b'"metadata"' not in body:
            return None
        try:
            asked: dict[str, Any] = await off_loop(len(body), parse_object, body, self._limits)
        except ApiError:  # whoever makes the completion says so
            return None
        metadata = asked.get("metadata")
        if asked.get("store") is not True:
            if metadata:
                self._intake.ignore("metadata")
            return None
        if isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values()):
            check_metadata(metadata)
        return asked

    async def _keep(self, tenant: str, asked: dict[str, Any], completion: dict[str, Any]) -> None:
        size = len(orjson.dumps([asked["messages"], completion]))
        chat = StoredChat(
            completion=completion,
            messages=asked["messages"],
            metadata=asked.get("metadata") or {},
            num_bytes=size,
        )
        try:
            await CHATS.put(self._store, tenant, completion["id"], chat)
        except StoreUnavailable as error:
            log.warning("the completion %s is not stored: %s", completion["id"], error)

    async def list_chats(self, http: HttpRequest) -> Response:
        tenant = self._tenant(http)
        asked = dict(http.query_params)
        metadata = {name[9:-1]: asked.pop(name) for name in list(asked) if name.startswith("metadata[")}
        query = validated(ChatsQuery, asked)
        with _answering():
            newest_first = await self._store.list(KIND, tenant, MAX_LISTED)
            ids = newest_first if query.order == "desc" else newest_first[::-1]
            ids = ids[place_after(ids, query.after) :]
            found = await self._fitting(tenant, ids, query, metadata)
        shown = [chat.as_json() for chat in found[: query.limit]]
        ends = {"first_id": shown[0]["id"] if shown else "", "last_id": shown[-1]["id"] if shown else ""}
        return Json({"object": "list", "data": shown, **ends, "has_more": len(found) > len(shown)})

    async def _fitting(
        self, tenant: str, ids: Sequence[str], query: ChatsQuery, metadata: Mapping[str, str]
    ) -> list[StoredChat]:
        """The completions of a page, and one beyond it if there is one."""
        found: list[StoredChat] = []
        for start in range(0, len(ids), _READ_AT_ONCE):
            asked = (CHATS.get(self._store, tenant, id, keep=False) for id in ids[start:][:_READ_AT_ONCE])
            read = await asyncio.gather(*asked)
            found += [chat for chat in read if chat is not None and fits(chat, query.model, metadata)]
            if len(found) > query.limit:
                break
        return found[: query.limit + 1]

    async def show(self, http: HttpRequest) -> Response:
        """Shows a stored completion, unless its events are asked for."""
        tenant, follows = self._tenant(http), http.query_params or "last-event-id" in http.headers
        try:
            chat = None if follows else await self._read(tenant, http)
        except StoreUnavailable:
            return await self._recorded_alone(http)
        return await self._recorded(http) if chat is None else Json(chat.as_json())

    async def update(self, http: HttpRequest) -> Response:
        tenant = self._tenant(http)
        body = await self._intake.read(http, ChatUpdateBody)
        check_metadata(body.metadata)
        _known(await self._found(tenant, http))

        def edit(chat: StoredChat) -> None:
            chat.metadata = body.metadata or {}

        with _answering():
            chat = await CHATS.change(self._store, tenant, http.path_params["id"], edit)
        return Json(_known(chat).as_json())

    async def delete(self, http: HttpRequest) -> Response:
        """Forgets a completion, whether it is stored or recorded or both."""
        tenant, id = self._tenant(http), http.path_params["id"]
        try:
            if await self._read(tenant, http) is None:
                return await self._recorded(http)
        except StoreUnavailable:
            return await self._recorded_alone(http)
        with _answering():
            await self._store.delete(Key(KIND, tenant, id))
            try:
                await self._recorded(http)
            except ApiError as error:
                if error.status != HTTPStatus.NOT_FOUND:
                    raise
        return Json({"id": id, "object": "chat.completion.deleted", "deleted": True})

    async def list_messages(self, http: HttpRequest) -> Response:
        tenant = self._tenant(http)
        query = read_page_query({"order": "asc", **http.query_params})
        return Json(page(_known(await self._found(tenant, http)).messages_as_json(), query))

    def _tenant(self, http: HttpRequest) -> str:
        return self._intake.client(http).tenant.name

    async def _recorded_alone(self, http: HttpRequest) -> Response:
        """Answers while nothing can be said of stored completions: what is recorded is in memory, too."""
        try:
            return await self._recorded(http)
        except ApiError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
        with _answering():
            raise StoreUnavailable("whether it is a stored one")

    async def _found(self, tenant: str, http: HttpRequest) -> StoredChat | None:
        with _answering():
            return await self._read(tenant, http)

    async def _read(self, tenant: str, http: HttpRequest) -> StoredChat | None:
        """
        Raises:
            StoreUnavailable: the store does not answer.
        """
        id = http.path_params["id"]
        return await CHATS.get(self._store, tenant, id) if CHAT_ID.fullmatch(id) else None


class _Kept(Response):
    """A reply whose completion is stored before its last byte is sent."""

    def __init__(self, reply: Response, keep: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
        self._reply = reply
        self._keep = keep
        self._status = 0
        self._is_stream = False
        self._chunks = Chunks()
        self._rest = b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def tee(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._status = message["status"]
                types = [value for name, value in message["headers"] if name == b"content-type"]
                self._is_stream = types[0].startswith(b"text/event-stream")
            elif self._status == 200:
                await self._read(message.get("body", b""), is_last=not message.get("more_body"))
            await send(message)

        # Bytes that a writer hands to the connection itself would be missed.
        others = {k: v for k, v in scope.get("extensions", {}).items() if k not in (WRITE, WRITABLE)}
        await ServerSendMiddleware(self._reply)({**scope, "extensions": others}, receive, tee)

    async def _read(self, body: bytes, *, is_last: bool) -> None:
        self._rest += body
        if self._is_stream:
            *frames, self._rest = self._rest.split(b"\n\n")
            for frame in frames:
                self._add(frame)
        if is_last and not self._chunks.is_failed:
            whole = self._chunks.completion() if self._is_stream else orjson.loads(self._rest)
            await self._keep(whole)

    def _add(self, frame: bytes) -> None:
        for line in frame.split(b"\n"):
            if line.startswith(b"data: {"):
                self._chunks.add(orjson.loads(line[6:]))


def _known(chat: StoredChat | None) -> StoredChat:
    if chat is None:
        raise not_found("There is no stored completion of that id.", "id")
    return chat
