"""`/v1/batches` and Anthropic's `/v1/messages/batches` run many requests when there is room for them.

OpenAI's come in a file; Anthropic's come in one body, and run as those of a file do.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import Message

from penstock.gateway.endpoints.cursors import CursorQuery, cursor_page, window
from penstock.gateway.endpoints.files import begun
from penstock.gateway.endpoints.intake import CLIENT, Endpoints, Intake
from penstock.gateway.endpoints.operation import ANY, BY_ID, ONCE, Handler, looks_up, serves
from penstock.gateway.errors import ApiError, existing, invalid
from penstock.gateway.http.correlation import CORRELATION, Correlation
from penstock.gateway.http.hosts import FORWARDED_HOST, FORWARDED_PROTO
from penstock.gateway.http.json_response import JsonResponse
from penstock.gateway.http.refusals import answer_api_error, answer_fault
from penstock.gateway.off_loop import off_loop
from penstock.gateway.service import Service
from penstock.gateway.sessions.batches.batch import (
    BATCHES,
    MAX_LINES,
    MAX_RESULT_BYTES,
    Batch,
    Endpoint,
    new_batch_id,
)
from penstock.gateway.sessions.batches.files import Files, answering
from penstock.gateway.sessions.batches.run import Batches, LineAnswer
from penstock.gateway.sessions.responses.objects import page
from penstock.gateway.sessions.responses.schemas import PageQuery
from penstock.gateway.store.interface import Key
from penstock.gateway.wire.schemas import Metadata, check_metadata
from penstock.gateway.wire.strict import Most, StrictBody, validated
from penstock.priority.lanes import Lane

BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")
MESSAGE_BATCH_ID = re.compile(r"msgbatch_[0-9a-f]{32}")
MAX_LISTED = 1000
_LANE_FIELDS = frozenset({"service_tier", "speed"})
"""The fields of a request that would name another lane than that of batches."""


class BatchBody(StrictBody):
    """The body of `POST /v1/batches`."""

    NOT_SUPPORTED = frozenset({"output_expires_after"})

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None


class BatchedMessage(StrictBody):
    """A request of a batch; its parameters are checked when its turn comes."""

    custom_id: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    params: dict[str, object]


class MessageBatchBody(StrictBody):
    """The body of `POST /v1/messages/batches`."""

    requests: Annotated[list[BatchedMessage], Field(min_length=1), Most(MAX_LINES)]


class _OneApi(Endpoints):
    """The batches of one API."""

    ids: re.Pattern[str]
    parameter: str
    """The parameter of paths that is the id of a batch."""
    param: str
    """The name by which a refusal names it."""
    name: str

    def __init__(self, service: Service, intake: Intake, files: Files, batches: Batches) -> None:
        super().__init__(service, intake)
        self._store = service.store
        self._files = files
        self._batches = batches

    @abstractmethod
    def view(self, http: HttpRequest, batch: Batch) -> dict[str, Any]:
        """Returns a batch as the API shows it."""

    async def show(self, http: HttpRequest) -> Response:
        _, batch = await self._found(http)
        return JsonResponse(self.view(http, batch))

    async def cancel(self, http: HttpRequest) -> Response:
        """Stops a batch, or shows it if it has ended."""
        tenant, batch = await self._found(http)
        with answering():
            return JsonResponse(self.view(http, await self._batches.cancel(tenant, batch.id) or batch))

    async def _found(self, http: HttpRequest) -> tuple[str, Batch]:
        """Returns the tenant and the batch that the path names, checking the client first so that ids stay secret."""
        tenant, batch_id = self._intake.tenant(http), http.path_params[self.parameter]
        with answering():
            is_id = self.ids.fullmatch(batch_id) is not None
            batch = await BATCHES.get(self._store, tenant, batch_id, keep=False) if is_id else None
        return tenant, existing(batch, f"There is no {self.name} of that id.", self.param)

    async def _ids(self, tenant: str) -> list[str]:
        """Returns the ids of the tenant's batches, the newest first."""
        return list(filter(self.ids.fullmatch, await self._store.list(BATCHES.kind, tenant, MAX_LISTED)))


class BatchesApi(_OneApi):
    """OpenAI's API for the batches of one service."""

    ids, parameter, param, name = BATCH_ID, "batch_id", "id", "batch"

    def __init__(
        self, service: Service, intake: Intake, files: Files, handlers: Mapping[str, Mapping[str, Handler]]
    ) -> None:
        """`handlers` are those of the paths that lines can be sent to, by HTTP method."""
        self.batches = Batches(
            service.store,
            service.dispatch,
            service.options.limits,
            files,
            self._ask,
            replica=service.options.replica,
            model=service.options.models[0],
        )
        super().__init__(service, intake, files, self.batches)
        self._handlers = handlers

    def view(self, http: HttpRequest, batch: Batch) -> dict[str, Any]:  # noqa: ARG002
        return batch.as_json()

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
            id=new_batch_id(), endpoint=body.endpoint, input_file_id=file.id, metadata=body.metadata
        )
        shown = batch.as_json()
        await self.batches.create(tenant, batch)
        return JsonResponse(shown)

    @looks_up("/v1/batches", ANY, query=PageQuery, statuses=(503,))
    async def list_batches(self, http: HttpRequest) -> Response:
        """List batches."""
        tenant = self._intake.tenant(http)
        query = validated(PageQuery, http.query_params)
        with answering():
            ids = reversed(await self._ids(tenant))
            listed = page([{"id": batch_id} for batch_id in ids], query)
            read = await BATCHES.some(self._store, tenant, [entry["id"] for entry in listed["data"]])
        # The ids of the page stay, for the next one to go on after.
        listed["data"] = [batch.as_json() for batch in read]
        return JsonResponse(listed)

    @looks_up("/v1/batches/{batch_id}", BY_ID)
    async def show(self, http: HttpRequest) -> Response:
        """Show a batch."""
        return await super().show(http)

    @serves("POST /v1/batches/{batch_id}/cancel", BY_ID)
    async def cancel(self, http: HttpRequest) -> Response:
        """Stop a batch."""
        return await super().cancel(http)

    # One line

    async def _ask(self, tenant: str, endpoint: Endpoint, body: dict[str, Any]) -> LineAnswer | None:
        """Answers as the endpoint does to the same request over HTTP; see `gateway.sessions.batches.run.AskLine`."""
        correlation = Correlation(f"req_{secrets.token_hex(12)}", "POST", endpoint, {})
        CORRELATION.set(correlation)
        http, sent, retry_after_s = self._request(tenant, endpoint, body), list[Message](), None

        async def send(message: Message) -> None:
            sent.append(message)

        try:
            response = await self._handlers[endpoint]["POST"](http)
            await response(http.scope, http.receive, send)
        except ApiError as error:
            if self._service.dispatch.draining or error.code == "engine_failed":
                return None
            response, retry_after_s = await answer_api_error(http, error), error.retry_after_s
        except Exception as error:
            response = await answer_fault(http, error)
        else:
            answer = b"".join(message.get("body", b"") for message in sent)
            return LineAnswer(sent[0]["status"], correlation.request_id, answer)
        return LineAnswer(response.status_code, correlation.request_id, bytes(response.body), retry_after_s)

    def _request(self, tenant: str, endpoint: Endpoint, body: dict[str, Any]) -> HttpRequest:
        content = orjson.dumps({name: value for name, value in body.items() if name not in _LANE_FIELDS})
        client = self._service.access.client_of(tenant)
        scope = {
            "type": "http",
            "method": "POST",
            "path": endpoint,
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            CLIENT: replace(client, tenant=replace(client.tenant, default_lane=Lane.BATCH)),
        }
        unread = asyncio.Queue[Message]()  # after its body this client says nothing: its task is cancelled
        unread.put_nowait({"type": "http.request", "body": content, "more_body": False})
        return HttpRequest(scope, unread.get)


class MessageBatchesApi(_OneApi):
    """Anthropic's API for the batches of one service."""

    ids, parameter, name = MESSAGE_BATCH_ID, "message_batch_id", "message batch"
    param = parameter

    def view(self, http: HttpRequest, batch: Batch) -> dict[str, Any]:
        """Returns a batch as Anthropic's API shows it."""
        status = "canceling" if batch.status == "cancelling" else "in_progress"
        return {
            "id": batch.id,
            "type": "message_batch",
            "processing_status": "ended" if batch.ended else status,
            "request_counts": _counts(batch),
            "created_at": _instant(batch.created_at),
            "expires_at": _instant(batch.expires_at),
            "ended_at": _instant(batch.times.get(batch.status)) if batch.ended else None,
            "cancel_initiated_at": _instant(batch.times.get("cancelling")),
            "archived_at": None,
            "results_url": f"{_url(http, batch.id)}/results" if batch.ended else None,
        }

    @serves("POST /v1/messages/batches", ONCE, MessageBatchBody, statuses=(429, 503))
    async def create(self, http: HttpRequest) -> Response:
        """Run requests for messages."""
        tenant = self._intake.tenant(http)
        requests = (await self._intake.read(http, MessageBatchBody)).requests
        _check_requests(requests)
        content = await off_loop(len(await http.body()), _input_of, requests)
        batch_id = f"msgbatch_{secrets.token_hex(16)}"
        file = await self._files.add(tenant, f"{batch_id}_input.jsonl", "batch", content)
        batch = Batch(id=batch_id, endpoint="/v1/messages", input_file_id=file.id, num_lines=len(requests))
        shown = self.view(http, batch)
        try:
            with answering():
                await self._batches.create(tenant, batch)
        except BaseException:
            await self._files.delete(tenant, file)
            raise
        return JsonResponse(shown)

    @looks_up("/v1/messages/batches", ANY, query=CursorQuery, statuses=(503,))
    async def list_batches(self, http: HttpRequest) -> Response:
        """List batches of messages."""
        tenant = self._intake.tenant(http)
        query = validated(CursorQuery, http.query_params)
        with answering():
            ids, has_more = window(await self._ids(tenant), query)
            read = await BATCHES.some(self._store, tenant, ids)
        return JsonResponse(cursor_page([self.view(http, batch) for batch in read], ids, has_more=has_more))

    @serves("DELETE /v1/messages/batches/{message_batch_id}", BY_ID)
    async def delete(self, http: HttpRequest) -> Response:
        """Forget a batch of messages that has ended."""
        tenant, batch = await self._ended(http)
        for file in await self._files.all(tenant):
            if file.id in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
                await self._files.delete(tenant, file)
        with answering():
            await self._store.delete(Key(BATCHES.kind, tenant, batch.id))
        return JsonResponse({"id": batch.id, "type": "message_batch_deleted"})

    @looks_up(
        "/v1/messages/batches/{message_batch_id}/results",
        BY_ID,
        answers=("application/x-jsonl",),
        statuses=(410,),
    )
    async def results(self, http: HttpRequest) -> Response:
        """Give the results of a batch of messages that has ended."""
        parts = await begun(self._results(*await self._ended(http)))
        return StreamingResponse(parts, media_type="application/x-jsonl")

    @looks_up("/v1/messages/batches/{message_batch_id}", BY_ID)
    async def show(self, http: HttpRequest) -> Response:
        """Show a batch of messages."""
        return await super().show(http)

    @serves("POST /v1/messages/batches/{message_batch_id}/cancel", BY_ID)
    async def cancel(self, http: HttpRequest) -> Response:
        """Stop a batch of messages."""
        return await super().cancel(http)

    async def _results(self, tenant: str, batch: Batch) -> AsyncIterator[bytes]:
        """Reads the result of each request; those that no process got to come last."""
        files = {file.id: file for file in await self._files.all(tenant)}
        shown: set[str] = set()
        for file_id in (batch.output_file_id, batch.error_file_id, batch.input_file_id):
            is_left = file_id == batch.input_file_id
            if file_id not in files or (is_left and len(shown) >= batch.num_lines):
                continue
            make = partial(_left_results, batch) if is_left else _results
            async for lines in self._files.lines(tenant, files[file_id], MAX_RESULT_BYTES):
                yield await off_loop(sum(map(len, lines)), make, lines, shown)

    async def _ended(self, http: HttpRequest) -> tuple[str, Batch]:
        tenant, batch = await self._found(http)
        if not batch.ended:
            raise invalid(f"The message batch '{batch.id}' has not ended yet.", self.param)
        return tenant, batch


def _check_requests(requests: list[BatchedMessage]) -> None:
    ids: set[str] = set()
    for number, one in enumerate(requests):
        if one.custom_id in ids:
            message = f"requests[{number}].custom_id: '{one.custom_id}' is that of another request, too."
            raise invalid(message, f"requests[{number}].custom_id")
        if one.params.get("stream"):
            message = f"requests[{number}].params.stream cannot be asked for in a batch."
            raise invalid(message, f"requests[{number}].params.stream")
        ids.add(one.custom_id)


def _input_of(requests: list[BatchedMessage]) -> bytes:
    """Makes an input file of requests."""
    line = {"method": "POST", "url": "/v1/messages"}
    return b"\n".join(
        orjson.dumps({"custom_id": one.custom_id, **line, "body": one.params}) for one in requests
    )


def _url(http: HttpRequest, batch_id: str) -> str:
    """Returns the batch's URL as its client can reach it: Anthropic's clients follow it as it is, with their key."""
    # Of several proxies the first one is the client's.
    scheme, host = (
        http.headers.get(name, given).partition(",")[0].strip()
        for name, given in ((FORWARDED_PROTO, http.url.scheme), (FORWARDED_HOST, http.url.netloc))
    )
    return f"{scheme}://{host}/v1/messages/batches/{batch_id}"


def _counts(batch: Batch) -> dict[str, int]:
    if not batch.ended:
        return {"processing": batch.num_lines, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0}
    left = batch.num_lines - batch.num_completed - batch.num_failed
    is_cancelled = batch.status == "cancelled"
    return {
        "processing": 0,
        "succeeded": batch.num_completed,
        "errored": batch.num_failed - batch.num_expired + (0 if is_cancelled else left),
        "canceled": left if is_cancelled else 0,
        "expired": batch.num_expired,
    }


def _instant(seconds: int | None) -> str | None:
    return None if seconds is None else f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"


def _results(lines: Iterable[bytes], shown: set[str]) -> bytes:
    """Makes results of the lines of an output or error file, and adds the `custom_id` of each to `shown`."""
    results = [orjson.loads(line) for line in lines if line]
    shown.update(one["custom_id"] for one in results)
    return b"".join(_result(one["custom_id"], _outcome(one["response"])) for one in results)


def _left_results(batch: Batch, lines: Iterable[bytes], shown: set[str]) -> bytes:
    """Makes results of the lines of an input file that are not in `shown`: no process got to them."""
    outcome: dict[str, Any] = {"type": "canceled"}
    if batch.errors:
        error = {"type": "api_error", "message": batch.errors[0].message}
        outcome = {"type": "errored", "error": {"type": "error", "error": error, "request_id": None}}
    ids = (orjson.loads(line)["custom_id"] for line in lines if line)
    return b"".join(_result(custom_id, outcome) for custom_id in ids if custom_id not in shown)


def _outcome(response: dict[str, Any] | None) -> dict[str, Any]:
    if response is None:
        return {"type": "expired"}
    if response["status_code"] == 200:
        return {"type": "succeeded", "message": response["body"]}
    return {"type": "errored", "error": response["body"]}


def _result(custom_id: str, outcome: dict[str, Any]) -> bytes:
    return orjson.dumps({"custom_id": custom_id, "result": outcome}) + b"\n"
