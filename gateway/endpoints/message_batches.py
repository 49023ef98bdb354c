"""`/v1/messages/batches` of Anthropic's API: the requests come in one body, and run as those of a file do."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, ClassVar

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from penstock.gateway.endpoints.batches import MAX_LISTED
from penstock.gateway.endpoints.cursors import CursorQuery, cursor_page, window
from penstock.gateway.endpoints.files import begun
from penstock.gateway.endpoints.intake import Endpoints, Intake
from penstock.gateway.endpoints.operation import ANY, BY_ID, ONCE, looks_up, serves
from penstock.gateway.errors import existing, invalid
from penstock.gateway.http.hosts import FORWARDED_HOST, FORWARDED_PROTO
from penstock.gateway.http.json_response import Json
from penstock.gateway.off_loop import off_loop
from penstock.gateway.service import Service
from penstock.gateway.sessions.batches.batch import BATCHES, KIND, MAX_LINES, MAX_RESULT_BYTES, Batch
from penstock.gateway.sessions.batches.files import Files, answering, new_file_id
from penstock.gateway.sessions.batches.messages import (
    MESSAGE_BATCH_ID,
    input_line,
    left_results,
    message_batch,
    new_message_batch_id,
    told_results,
)
from penstock.gateway.sessions.batches.running import Batches
from penstock.gateway.store.interface import Key
from penstock.gateway.wire.strict import StrictBody, validated


class BatchedMessage(StrictBody):
    """A request of a batch; its parameters are checked when its turn comes."""

    custom_id: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    params: dict[str, object]


class MessageBatchBody(StrictBody):
    """The body of `POST /v1/messages/batches`."""

    MOST: ClassVar[Mapping[str, str | int]] = {"requests": MAX_LINES}

    requests: Annotated[list[BatchedMessage], Field(min_length=1)]


class MessageBatchesApi(Endpoints):
    """The batches of messages of one service."""

    def __init__(self, service: Service, intake: Intake, files: Files, batches: Batches) -> None:
        super().__init__(service, intake)
        self._store = service.store
        self._files = files
        self._batches = batches

    @serves("POST /v1/messages/batches", ONCE, MessageBatchBody, statuses=(429, 503))
    async def create(self, http: HttpRequest) -> Response:
        """Run requests for messages."""
        tenant = self._intake.tenant(http)
        body = await self._intake.read(http, MessageBatchBody)
        _check_requests(body.requests)
        content = await off_loop(len(await http.body()), _input_of, body)
        batch_id = new_message_batch_id()
        file = await self._files.add(tenant, f"{batch_id}_input.jsonl", "batch", content)
        batch = Batch(
            id=batch_id,
            endpoint="/v1/messages",
            input_file_id=file.id,
            output_file_id=new_file_id(),
            error_file_id=new_file_id(),
            created_at=int(time.time()),
            num_lines=len(body.requests),
        )
        shown = message_batch(batch, _url(http, batch_id))
        try:
            with answering():
                await self._batches.create(tenant, batch)
        except BaseException:
            await self._files.delete(tenant, file)
            raise
        return Json(shown)

    @looks_up("/v1/messages/batches", ANY, query=CursorQuery, statuses=(503,))
    async def list_batches(self, http: HttpRequest) -> Response:
        """List batches of messages."""
        tenant = self._intake.tenant(http)
        query = validated(CursorQuery, http.query_params)
        with answering():
            known = await self._store.list(KIND, tenant, MAX_LISTED)
            ids, has_more = window([id for id in known if MESSAGE_BATCH_ID.fullmatch(id)], query)
            read = await BATCHES.some(self._store, tenant, ids)
        shown = [message_batch(batch, _url(http, batch.id)) for batch in read]
        return Json(cursor_page(shown, ids, has_more=has_more))

    @looks_up("/v1/messages/batches/{message_batch_id}", BY_ID)
    async def show(self, http: HttpRequest) -> Response:
        """Show a batch of messages."""
        return self._shown(http, await self._found(http))

    @serves("POST /v1/messages/batches/{message_batch_id}/cancel", BY_ID)
    async def cancel(self, http: HttpRequest) -> Response:
        """Stop a batch of messages.

        If it has ended, it is shown.
        """
        found = await self._found(http)
        with answering():
            return self._shown(http, await self._batches.cancel(self._intake.tenant(http), found.id) or found)

    @serves("DELETE /v1/messages/batches/{message_batch_id}", BY_ID)
    async def delete(self, http: HttpRequest) -> Response:
        """Forget a batch of messages that has ended."""
        tenant, batch = self._intake.tenant(http), await self._ended(http)
        for file in await self._files.all(tenant):
            if file.id in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
                await self._files.delete(tenant, file)
        with answering():
            await self._store.delete(Key(KIND, tenant, batch.id))
        return Json({"id": batch.id, "type": "message_batch_deleted"})

    @looks_up(
        "/v1/messages/batches/{message_batch_id}/results",
        BY_ID,
        answers=("application/x-jsonl",),
        statuses=(410,),
    )
    async def results(self, http: HttpRequest) -> Response:
        """Give the results of a batch of messages that has ended."""
        tenant, batch = self._intake.tenant(http), await self._ended(http)
        parts = await begun(self._results(tenant, batch))
        return StreamingResponse(parts, media_type="application/x-jsonl")

    async def _results(self, tenant: str, batch: Batch) -> AsyncIterator[bytes]:
        """Reads the result of each request; those that no process got to come last."""
        files = {file.id: file for file in await self._files.all(tenant)}
        told: set[str] = set()
        for file_id in (batch.output_file_id, batch.error_file_id):
            if file_id in files:
                async for lines in self._files.lines(tenant, files[file_id], MAX_RESULT_BYTES):
                    yield await off_loop(sum(map(len, lines)), told_results, lines, told)
        if len(told) < batch.num_lines and batch.input_file_id in files:
            async for lines in self._files.lines(tenant, files[batch.input_file_id], MAX_RESULT_BYTES):
                yield await off_loop(sum(map(len, lines)), left_results, lines, told, batch)

    async def _found(self, http: HttpRequest) -> Batch:
        """Returns the batch that the path names, checking the client first so that ids stay secret."""
        tenant, batch_id = self._intake.tenant(http), http.path_params["message_batch_id"]
        with answering():
            known = MESSAGE_BATCH_ID.fullmatch(batch_id) is not None
            batch = await BATCHES.get(self._store, tenant, batch_id, keep=False) if known else None
        return existing(batch, "There is no message batch of that id.", "message_batch_id")

    async def _ended(self, http: HttpRequest) -> Batch:
        batch = await self._found(http)
        if not batch.ended:
            raise invalid(f"The message batch '{batch.id}' has not ended yet.", "message_batch_id")
        return batch

    def _shown(self, http: HttpRequest, batch: Batch) -> Response:
        return Json(message_batch(batch, _url(http, batch.id)))


def _check_requests(requests: list[BatchedMessage]) -> None:
    known: set[str] = set()
    for number, one in enumerate(requests):
        if one.custom_id in known:
            message = f"requests[{number}].custom_id: '{one.custom_id}' is that of another request, too."
            raise invalid(message, f"requests[{number}].custom_id")
        if one.params.get("stream"):
            message = f"requests[{number}].params.stream cannot be asked for in a batch."
            raise invalid(message, f"requests[{number}].params.stream")
        known.add(one.custom_id)


def _input_of(body: MessageBatchBody) -> bytes:
    return b"\n".join(input_line(one.custom_id, one.params) for one in body.requests)


def _url(http: HttpRequest, batch_id: str) -> str:
    """Returns the batch's URL as its client can reach it: Anthropic's clients follow it as it is, with their key."""
    # Of several proxies the first one is the client's.
    scheme, host = (
        http.headers.get(name, given).partition(",")[0].strip()
        for name, given in ((FORWARDED_PROTO, http.url.scheme), (FORWARDED_HOST, http.url.netloc))
    )
    return f"{scheme}://{host}/v1/messages/batches/{batch_id}"
