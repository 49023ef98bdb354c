"""`/v1/chat/completions` with `store: true`: completions are kept, listed, shown, changed and forgotten."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Literal

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.gateway.endpoints.intake import Endpoints, Intake
from penstock.gateway.endpoints.operation import ANY, BY_ID, follows, looks_up, serves
from penstock.gateway.endpoints.replies import chat_recorder
from penstock.gateway.errors import ApiError, answering_unavailable, existing
from penstock.gateway.http.json_response import JsonResponse
from penstock.gateway.off_loop import off_loop
from penstock.gateway.service import Service
from penstock.gateway.sessions.chats import CHATS, KIND, StoredChat, fits
from penstock.gateway.sessions.recordings.kinds import CHAT, IDS
from penstock.gateway.sessions.responses.objects import page, place_after
from penstock.gateway.sessions.responses.schemas import PageQuery
from penstock.gateway.store.interface import Key, StoreUnavailable
from penstock.gateway.wire.schemas import Metadata, check_metadata
from penstock.gateway.wire.strict import StrictBody, validated

MAX_LISTED = 1000
_READ_AT_ONCE = 32

_answering = partial(answering_unavailable, "Stored completions")


class ChatsQuery(PageQuery):
    """The query of a list of stored completions, without `metadata[KEY]`."""

    order: Literal["asc", "desc"] = "asc"
    model: str | None = None


class ChatUpdateBody(StrictBody):
    """The body of `POST /v1/chat/completions/{id}`."""

    metadata: Metadata | None


class StoredChatsApi(Endpoints):
    """The stored chat completions of one service."""

    def __init__(self, service: Service, intake: Intake) -> None:
        super().__init__(service, intake)
        self._store = service.store
        recorder = chat_recorder(service, intake)
        self._follow, self._discard = recorder.show, recorder.discard

    @looks_up("/v1/chat/completions", ANY, query=ChatsQuery, statuses=(503,))
    async def list_chats(self, http: HttpRequest) -> Response:
        """List stored answers."""
        tenant = self._intake.tenant(http)
        values = dict(http.query_params)
        metadata = {name[9:-1]: values.pop(name) for name in list(values) if name.startswith("metadata[")}
        query = validated(ChatsQuery, values)
        with _answering():
            newest_first = await self._store.list(KIND, tenant, MAX_LISTED)
            ids = newest_first if query.order == "desc" else newest_first[::-1]
            ids = ids[place_after(ids, query.after) :]
            fitting = await self._fitting(tenant, ids, query, metadata)
        shown = [chat.as_json() for chat in fitting[: query.limit]]
        ends = {"first_id": shown[0]["id"] if shown else "", "last_id": shown[-1]["id"] if shown else ""}
        listed = {"object": "list", "data": shown, **ends, "has_more": len(fitting) > len(shown)}
        return await off_loop(sum(chat.num_bytes for chat in fitting), JsonResponse, listed)

    async def _fitting(
        self, tenant: str, ids: Sequence[str], query: ChatsQuery, metadata: Mapping[str, str]
    ) -> list[StoredChat]:
        """The completions of a page, and one beyond it if there is one."""
        fitting: list[StoredChat] = []
        for start in range(0, len(ids), _READ_AT_ONCE):
            read = await CHATS.some(self._store, tenant, ids[start:][:_READ_AT_ONCE])
            fitting += [chat for chat in read if fits(chat, query.model, metadata)]
            if len(fitting) > query.limit:
                break
        return fitting[: query.limit + 1]

    @follows("/v1/chat/completions/{id}")
    async def show(self, http: HttpRequest) -> Response:
        """Show a stored answer, or follow a resumable one, after the event that was seen last.

        A stored one is shown unless its events are asked for.
        """
        tenant, follows = self._intake.tenant(http), http.query_params or "last-event-id" in http.headers
        try:
            chat = None if follows else await self._read(tenant, http)
        except StoreUnavailable:
            return await _alone(self._follow(http))
        return await self._follow(http) if chat is None else await _shown(chat)

    @serves("POST /v1/chat/completions/{id}", BY_ID, ChatUpdateBody)
    async def update(self, http: HttpRequest) -> Response:
        """Replace the metadata of a stored answer."""
        tenant = self._intake.tenant(http)
        body = await self._intake.read(http, ChatUpdateBody)
        check_metadata(body.metadata)
        _known(await self._found(tenant, http))

        def edit(chat: StoredChat) -> None:
            chat.metadata = body.metadata or {}

        with _answering():
            chat = await CHATS.change(self._store, tenant, http.path_params["id"], edit)
        return await _shown(_known(chat))

    @serves("DELETE /v1/chat/completions/{id}", BY_ID)
    async def delete(self, http: HttpRequest) -> Response:
        """Forget a stored answer, or stop and forget a resumable one.

        It may be stored or recorded or both.
        """
        tenant, id = self._intake.tenant(http), http.path_params["id"]
        try:
            if await self._read(tenant, http) is None:
                return await self._discard(http)
        except StoreUnavailable:
            return await _alone(self._discard(http))
        with _answering():
            await self._store.delete(Key(KIND, tenant, id))
            try:
                await self._discard(http)
            except ApiError as error:
                if error.status != HTTPStatus.NOT_FOUND:
                    raise
        return JsonResponse({"id": id, "object": "chat.completion.deleted", "deleted": True})

    @looks_up("/v1/chat/completions/{id}/messages", BY_ID, query=PageQuery)
    async def list_messages(self, http: HttpRequest) -> Response:
        """List the messages that a stored answer is for."""
        tenant = self._intake.tenant(http)
        query = validated(PageQuery, {"order": "asc", **http.query_params})
        return JsonResponse(page(_known(await self._found(tenant, http)).messages_as_json(), query))

    async def _found(self, tenant: str, http: HttpRequest) -> StoredChat | None:
        with _answering():
            return await self._read(tenant, http)

    async def _read(self, tenant: str, http: HttpRequest) -> StoredChat | None:
        """Returns the stored completion, if there is one; raises StoreUnavailable."""
        id = http.path_params["id"]
        return await CHATS.get(self._store, tenant, id) if IDS[CHAT].fullmatch(id) else None


async def _shown(chat: StoredChat) -> Response:
    return await off_loop(chat.num_bytes, JsonResponse, chat.as_json())


async def _alone(recorded: Awaitable[Response]) -> Response:
    """Answers while nothing can be said of stored completions: what is recorded is in memory, too."""
    try:
        return await recorded
    except ApiError as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise
    with _answering():
        raise StoreUnavailable("whether it is a stored one")


def _known(chat: StoredChat | None) -> StoredChat:
    return existing(chat, "There is no stored completion of that id.", "id")
