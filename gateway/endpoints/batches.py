"""`/v1/batches` runs the requests of a file: the server sends each to its endpoint when there is room for it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, ClassVar, Literal

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Message

from penstock.gateway.endpoints.intake import CLIENT, Endpoints, Intake
from penstock.gateway.endpoints.operation import ANY, BY_ID, ONCE, Handler, looks_up, serves
from penstock.gateway.errors import ApiError, existing, internal, invalid
from penstock.gateway.http.connections import ServerSendMiddleware
from penstock.gateway.http.correlation import CORRELATION, Correlation, log_failed, log_fault
from penstock.gateway.http.json_response import Json
from penstock.gateway.http.refusals import refusal
from penstock.gateway.service import Service
from penstock.gateway.sessions.batches.batch import BATCH_ID, BATCHES, KIND, Batch, Endpoint, new_batch_id
from penstock.gateway.sessions.batches.files import Files, answering, new_file_id
from penstock.gateway.sessions.batches.run import Answer
from penstock.gateway.sessions.batches.running import Batches
from penstock.gateway.sessions.responses.objects import page
from penstock.gateway.sessions.responses.schemas import PageQuery
from penstock.gateway.wire.metadata import check_metadata
from penstock.gateway.wire.strict import StrictBody, validated
from penstock.priority.lanes import Lane

MAX_LISTED = 1000
_LANE_FIELDS = frozenset({"service_tier", "speed"})
"""The fields of a request that would name another lane than that of batches."""


class BatchBody(StrictBody):
    """The body of `POST /v1/batches`."""

    MOST: ClassVar[Mapping[str, str | int]] = {"metadata": "max_metadata"}
    NOT_SUPPORTED = frozenset({"output_expires_after"})

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None


class BatchesApi(Endpoints):
    """The batches of one service."""

    def __init__(
        self, service: Service, intake: Intake, files: Files, handlers: Mapping[str, Mapping[str, Handler]]
    ) -> None:
        """`handlers` are those of the paths that lines can be sent to, by HTTP method."""
        super().__init__(service, intake)
        self._files = files
        self._handlers = handlers
        self.batches = Batches(
            service.store,
            service.dispatch,
            service.options.limits,
            files,
            self._ask,
            replica=service.options.replica,
            model=service.options.models[0],
        )

    def running(self) -> AbstractAsyncContextManager[None]:
        """Takes over batches of processes that are gone while it is entered."""
        return self.batches.running()

    @serves("POST /v1/batches", ONCE, BatchBody, statuses=(404, 429, 503))
    async def create(self, http: HttpRequest) -> Response:
        """Run the requests in a file."""
        tenant = self._intake.tenant(http)
        body = await self._intake.read(http, BatchBody)
        check_metadata(body.metadata)
        file = await self._files.find(tenant, body.input_file_id, "input_file_id")
        if file.purpose != "batch":
            raise invalid("A batch reads a file whose purpose is 'batch'.", "input_file_id")
        await self._files.room(tenant, "input_file_id")
        batch = Batch(
            id=new_batch_id(),
            endpoint=body.endpoint,
            input_file_id=file.id,
            output_file_id=new_file_id(),
            error_file_id=new_file_id(),
            created_at=int(time.time()),
            metadata=body.metadata,
        )
        shown = batch.as_json()
        await self.batches.create(tenant, batch)
        return Json(shown)

    @looks_up("/v1/batches", ANY, query=PageQuery, statuses=(503,))
    async def list_batches(self, http: HttpRequest) -> Response:
        """List batches."""
        tenant = self._intake.tenant(http)
        query, store = validated(PageQuery, http.query_params), self._service.store
        with answering():
            newest_first = await store.list(KIND, tenant, MAX_LISTED)
            ids = filter(BATCH_ID.fullmatch, reversed(newest_first))
            found = page([{"id": batch_id} for batch_id in ids], query)
            read = await BATCHES.some(store, tenant, [entry["id"] for entry in found["data"]])
        # The ids of the page stay, for the next one to go on after.
        found["data"] = [batch.as_json() for batch in read]
        return Json(found)

    @looks_up("/v1/batches/{batch_id}", BY_ID)
    async def show(self, http: HttpRequest) -> Response:
        """Show a batch."""
        tenant, batch_id = self._asked(http)
        with answering():
            batch = await BATCHES.get(self._service.store, tenant, batch_id, keep=False)
        return Json(_found(batch).as_json())

    @serves("POST /v1/batches/{batch_id}/cancel", BY_ID)
    async def cancel(self, http: HttpRequest) -> Response:
        """Stop a batch.

        If it has ended, it is shown.
        """
        tenant, batch_id = self._asked(http)
        with answering():
            return Json(_found(await self.batches.cancel(tenant, batch_id)).as_json())

    def _asked(self, http: HttpRequest) -> tuple[str, str]:
        """Returns the tenant and the id, checking the client first so that ids stay secret."""
        tenant, batch_id = self._intake.tenant(http), http.path_params["batch_id"]
        existing(BATCH_ID.fullmatch(batch_id), "There is no batch of that id.", "id")
        return tenant, batch_id

    # One line

    async def _ask(self, tenant: str, endpoint: Endpoint, body: dict[str, Any]) -> Answer | None:
        """Answers as the endpoint does to the same request over HTTP; see `gateway.sessions.batches.run.Ask`."""
        asked = Correlation(f"req_{secrets.token_hex(12)}", "POST", endpoint, {})
        CORRELATION.set(asked)
        try:
            status, answer = await self._call(tenant, endpoint, body)
        except ApiError as error:
            if self._service.dispatch.draining or error.code == "engine_failed":
                return None
            log_fault(error)
            told = refusal(error, endpoint)
            return Answer(told.status_code, asked.request_id, bytes(told.body), error.retry_after_s)
        except Exception as error:
            log_failed(f"{type(error).__name__}: {error}", error)
            told = refusal(internal(), endpoint)
            return Answer(told.status_code, asked.request_id, bytes(told.body))
        return Answer(status, asked.request_id, answer)

    async def _call(self, tenant: str, endpoint: Endpoint, body: dict[str, Any]) -> tuple[int, bytes]:
        content = orjson.dumps({name: value for name, value in body.items() if name not in _LANE_FIELDS})
        client = self._service.access.client_of(tenant)
        client = replace(client, tenant=replace(client.tenant, default_lane=Lane.BATCH))
        unread: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]
        sent: list[Message] = []

        async def receive() -> Message:
            if not unread:
                await asyncio.Event().wait()  # this client never hangs up; its task is cancelled
            return unread.pop()

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": endpoint,
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            CLIENT: client,
        }
        response = await self._handlers[endpoint]["POST"](HttpRequest(scope, receive))
        await ServerSendMiddleware(response)(scope, receive, send)
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


def _found(batch: Batch | None) -> Batch:
    return existing(batch, "There is no batch of that id.", "id")
