"""The answer to a request: it is let in, its reply begins, live or recorded, and is sent, streamed or whole."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.gateway.access.idempotency import HEADER, RESUMABLE_HEADER, idempotency_key
from penstock.gateway.access.quotas import QuotaReservation
from penstock.gateway.background import meanwhile
from penstock.gateway.endpoints.intake import Endpoints, Inbound, Intake
from penstock.gateway.endpoints.operation import Handler, Operation
from penstock.gateway.endpoints.requests import RequestGroup, RequestMaker
from penstock.gateway.endpoints.transfer import given_by, take_from
from penstock.gateway.errors import invalid, unsupported
from penstock.gateway.http.connections import Connection
from penstock.gateway.http.json_response import JsonResponse
from penstock.gateway.reply.generation import Live
from penstock.gateway.reply.whole import whole, whole_json
from penstock.gateway.service import Service
from penstock.gateway.sessions.chats import keep
from penstock.gateway.sessions.owners import owned_id
from penstock.gateway.sessions.recordings.recording import Reader, Recording
from penstock.gateway.sessions.responses.threads import NO_THREAD, Thread
from penstock.gateway.wire.ask import Ask, Turn
from penstock.gateway.wire.frames import json_pieces
from penstock.gateway.wire.sampling import SEARCH_FIELDS, check_beams
from penstock.gateway.wire.strict import BodyT
from penstock.gateway.wire.writing import Head, Reply, WholeWriter, Writer

_PIECE_BYTES = 64 * 1024

ReplyHook = Callable[[dict[str, Any], int], Awaitable[None]]
"""A ReplyHook takes a whole reply's JSON and its size in bytes."""
MakeWriter = Callable[[Head, Inbound, RequestGroup], WholeWriter[Reply]]
"""Makes the writer of a reply; where the ask may stream, it is a `Writer`."""


class Recorder(ABC):
    """An API's way of recording replies."""

    kind: str
    prefix: str
    """The beginning of its ids."""
    num_digits: int
    always = False
    """Whether every reply is recorded."""

    def thread(self, inbound: Inbound) -> AbstractAsyncContextManager[Thread]:  # noqa: ARG002
        """Holds the thread that a turn continues until its recording has begun."""
        return contextlib.nullcontext(NO_THREAD)

    @abstractmethod
    def details(self, inbound: Inbound, group: RequestGroup, thread: Thread, head: Head) -> dict[str, Any]:
        """Returns what a recording has to know of its request, as JSON."""

    @abstractmethod
    def reply(self, recording: Recording, body: Any) -> Response: ...

    @abstractmethod
    async def repeat(self, tenant: str, reply_id: str, body: Any) -> Response:
        """Returns the reply to a request that was sent before."""


class ModelEndpoints(Endpoints):
    """Some endpoints whose requests the model answers."""

    def __init__(self, service: Service, intake: Intake) -> None:
        super().__init__(service, intake)
        self._make_requests = RequestMaker(service, intake).make

    async def _answer(
        self,
        http: HttpRequest,
        kind: type[BodyT],
        write: MakeWriter,
        recorder: Recorder | None = None,
        *,
        prefix: str = "reply-",
        load: Callable[[Inbound], dict[str, object]] = lambda _: {},
    ) -> Response:
        """Answers a request whose body is of a kind.

        Args:
            recorder: records replies that outlive their connection.
            prefix: the beginning of the ids of replies that are never recorded.
            load: returns the reply to an ask for nothing but that the model be loaded.

        Raises:
            ApiError: 4xx or 503, for everything that a request may be refused for.
        """
        inbound = await self._intake.begin(http, kind)
        ask = inbound.ask
        self._check(ask)
        if ask.sampling is not None and ask.sampling.kv_transfer_params is not None:
            take_from(ask.sampling.kv_transfer_params, self._service.options.cluster_secret)
        if not ask.input:
            return JsonResponse(load(inbound))
        key = idempotency_key(http) if recorder is not None and HEADER in http.headers else None
        outlives = recorder is not None and (
            key is not None or ask.retention.background or _is_resumable(http, ask)
        )
        if recorder is None or not (recorder.always or outlives):
            prefix = prefix if recorder is None else recorder.prefix
            reply = await self._live(inbound, write, prefix + secrets.token_hex(16))
            stored = ask.retention.stored
            keep_whole = (
                None if stored is None else partial(keep, self._service.store, inbound.tenant.name, stored)
            )
            return LiveSender(self._service, reply, keep_whole)
        check_recordable(ask, recorder, key)
        inbound = replace(inbound, is_recorded=True)
        reply_id = owned_id(recorder.prefix, self._service.tag, recorder.num_digits)
        start = partial(self._begin_recording, inbound, recorder, reply_id, outlives)
        recording = await self._service.idempotency.once(
            inbound.tenant.name, key, inbound.body, reply_id, start
        )
        if isinstance(recording, str):
            return await recorder.repeat(inbound.tenant.name, recording, inbound.body)
        return recorder.reply(recording, inbound.body)

    async def _live(self, inbound: Inbound, write: MakeWriter, reply_id: str) -> Live:
        """Returns a reply whose requests were made, and are not yet submitted."""
        self._check_room(inbound)
        ask, group = inbound.ask, await self._make_requests(inbound, reply_id)
        return Live(
            group.requests,
            await self._intake.reserve(inbound.client, group.requests),
            write(self._head(ask, reply_id), inbound, group),
            streamed=ask.streams,
            thoughts=self._service.formats.thoughts(group.reading),
            echoes=group.echoes,
            in_full=ask.reply_options.extras.token_ids or ask.reply_options.usage_so_far,
            keeps=ask.streams and (ask.retention.output or ask.retention.stored is not None),
        )

    async def _begin_recording(
        self, inbound: Inbound, recorder: Recorder, reply_id: str, outlives: bool
    ) -> Recording:
        self._check_room(inbound)
        retention, head = inbound.ask.retention, self._head(inbound.ask, reply_id)
        async with recorder.thread(inbound) as thread:
            group = await self._make_requests(inbound, reply_id, thread)
            return await self._service.recordings.start(
                group.requests[0],
                kind=recorder.kind,
                details=recorder.details(inbound, group, thread, head),
                created=head.created,
                detachable=outlives,
                journalled=outlives,
                max_detached_s=None if retention.background else self._service.options.timeouts.detached_s,
                reservation=await self._intake.reserve(inbound.client, group.requests),
            )

    def _check(self, ask: Ask) -> None:
        self._intake.check_model(ask.model)
        if ask.sampling is not None and ask.sampling.model_fields_set & SEARCH_FIELDS:
            check_beams(ask.sampling, self._most_beams if ask.sampling.use_beam_search else 0)
        size = self._service.options.embedding.size
        if ask.dimensions is not None and size is not None and ask.dimensions > size:
            raise invalid(f"'dimensions' may be at most {size} for this model.", "dimensions")

    @property
    def _most_beams(self) -> int:
        return min(self._service.options.limits.max_beams, self._service.engine_stats().max_num_seqs)

    def _check_room(self, inbound: Inbound) -> None:
        """Raises 429 or 503 if no prompt that the ask may have is let in, before it is tokenised."""
        dispatch = self._service.dispatch
        most = dispatch.context_length if isinstance(inbound.ask.input, Turn) else inbound.num_bytes
        dispatch.check_room(inbound.urgency, inbound.tenant.name, inbound.at_s, most)

    def _head(self, ask: Ask, reply_id: str) -> Head:
        options = self._service.options
        params = None if ask.sampling is None else ask.sampling.kv_transfer_params
        gives = params is not None and params.do_remote_decode
        return Head(
            id=reply_id,
            created=int(time.time()),
            model=ask.model,
            system_fingerprint=options.system_fingerprint,
            kv_transfer=given_by(options.replica, reply_id, options.cluster_secret) if gives else None,
        )


def _is_resumable(http: HttpRequest, ask: Ask) -> bool:
    """Returns whether a reply is to be resumable; raises 400 for a header that says neither yes nor no."""
    header = http.headers.get(RESUMABLE_HEADER, "false")
    if header not in ("true", "false"):
        raise invalid(f"'{RESUMABLE_HEADER}' must be 'true' or 'false'.", RESUMABLE_HEADER)
    return header == "true" or ask.retention.resumable


def check_recordable(ask: Ask, recorder: Recorder, key: str | None) -> None:
    """Raises 400 if something is asked for that recordings do not have."""
    way = "a resumable stream" if key is None else f"the header '{HEADER}'"
    body, options = ask.sampling, ask.reply_options
    assert body is not None
    unfit = {
        "use_beam_search": body.use_beam_search,
        "best_of": body.num_generated > (body.n or 1),
        "prompt_logprobs": body.prompt_logprobs is not None,
        "return_token_ids": body.return_token_ids,
        "return_tokens_as_token_ids": body.return_tokens_as_token_ids,
        "stream_options.continuous_usage_stats": options.usage_so_far,
        "functions": options.extras.functions,
        "echo": options.echo,
    }
    field = next((field for field, is_unfit in unfit.items() if is_unfit), None)
    if field is not None and recorder.always:
        raise unsupported(field)
    if field is not None:
        raise invalid(f"'{field}' cannot be used together with {way}.", field)
    if ask.num_prompts > 1:
        raise invalid(f"There can only be one prompt together with {way}.", ask.field)


class Sender(Response, ABC):
    """Sends the output of a reply to one reader, as a stream or as a whole."""

    def __init__(
        self,
        service: Service,
        reader: Live | Reader,
        reservation: QuotaReservation | None,
        *,
        streamed: bool,
        at_once: bool = False,
        keep: ReplyHook | None = None,
    ) -> None:
        """
        Args:
            at_once: the status is not held back until there is something to show.
            keep: is given the whole reply before the last of it is sent.
        """
        self._service = service
        self._reader = reader
        self._writer: Writer[Any] = reader.writer
        self._quota_headers = dict({} if reservation is None else reservation.headers)
        self._streamed = streamed
        self._at_once = at_once
        self._keep = keep
        self.background = None

    @abstractmethod
    def _begin(self) -> None:
        """Connects the reader and starts its work."""

    @abstractmethod
    def _leave(self) -> None:
        """Detaches the connection when it is gone or has everything; idempotent."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        connection = Connection(scope, send, service.clock, service.metrics.slow_readers.inc)
        self._reader.connection = connection
        self._begin()
        async with meanwhile(connection.watch(receive, self._leave)):
            try:
                if self._streamed:
                    await self._send_stream(connection)
                else:
                    await self._send_whole(connection)
            finally:
                self._leave()

    async def _send_stream(self, connection: Connection) -> None:
        reader = self._reader
        if self._at_once:
            await self._commit(connection)
        while not reader.at_end:
            await reader.news()
            if connection.gone:
                return
            if not connection.committed:
                self._check()  # from here on the status is 200: an error before this is a plain one
                await self._commit(connection)
            body = reader.take()
            if reader.at_end and reader.finished and reader.refusal is None and self._keep is not None:
                await self._kept(self._keep)
            if connection.overdue:
                connection.overdue = False
                body = body or self._writer.keepalive
            if body or reader.at_end:
                await connection.send(body, more=not reader.at_end)
            if reader.is_behind:
                await asyncio.sleep(0)

    async def _commit(self, connection: Connection) -> None:
        media_type = self._writer.media_type
        await connection.commit(({"content-type": media_type} if media_type else {}) | self._quota_headers)

    async def _send_whole(self, connection: Connection) -> None:
        await self._reader.end()
        self._check()
        if not self._reader.finished:
            return
        headers = dict(self._quota_headers)
        if isinstance(self._reader, Live):
            arrival_s = self._reader.requests[0].arrival_s
            headers["openai-processing-ms"] = str(math.ceil((self._service.clock() - arrival_s) * 1000))
        reader = self._reader
        if self._keep is not None:
            body = await self._kept(self._keep)
            pieces: Iterator[bytes] = (
                body[start : start + _PIECE_BYTES] for start in range(0, len(body), _PIECE_BYTES)
            )
        else:
            pieces = json_pieces(await whole(self._writer, reader.reply, reader.outputs()))
        await connection.send_whole(pieces, headers)

    def _check(self) -> None:
        if self._reader.refusal is not None:
            raise self._reader.refusal

    async def _kept(self, keep: ReplyHook) -> bytes:
        """Has the whole reply kept, and returns its JSON."""
        reader = self._reader
        body, completion = await whole_json(self._writer, reader.reply, reader.outputs())
        await keep(completion, len(body))
        return body


class LiveSender(Sender):
    """Submits a reply when the server calls it, and sends its output.

    Its requests are cancelled the moment their client is gone, whatever state they are in.
    """

    def __init__(self, service: Service, reply: Live, keep: ReplyHook | None = None) -> None:
        """A stream of which the whole reply is kept `keeps` its output."""
        super().__init__(service, reply, reply.reservation, streamed=reply.is_streamed, keep=keep)
        self._live = reply

    def _begin(self) -> None:
        self._service.dispatch.submit(self._live)

    def _leave(self) -> None:
        self._service.dispatch.release(self._live)


class RecordedSender(Sender):
    """Sends the events that a reader lacks and new ones, or the whole reply at its end."""

    def __init__(
        self, service: Service, reader: Reader, *, streamed: bool = True, at_once: bool = False
    ) -> None:
        super().__init__(service, reader, reader.recording.reservation, streamed=streamed, at_once=at_once)
        self._recorded = reader

    def _begin(self) -> None:
        if self._recorded.position >= 0:
            self._service.metrics.follows.inc()
        self._recorded.recording.attach(self._recorded)

    def _leave(self) -> None:
        recording, now = self._recorded.recording, self._service.clock()
        recording.detach(self._recorded, now)
        if recording.is_abandoned(now):
            self._service.recordings.cancel(recording)


def position_asked(http: HttpRequest) -> int:
    """Returns the last event that the client has, as `starting_after` or a browser's EventSource says; -1 for none.

    Raises:
        ApiError: 400, if it is not a number.
    """
    text = http.query_params.get("starting_after") or http.headers.get("last-event-id")
    if text is None or text == "-1":
        return -1
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise invalid("'starting_after' must be the number of an event.", "starting_after")
    return int(text)


def counted_lookups(intake: Intake, operation: Operation, handle: Handler) -> Handler:
    """Returns a handler that counts each request for what is kept.

    To follow a long reply takes as much of the server as a short one.
    """
    if not operation.is_lookup:
        return handle

    async def counting(http: HttpRequest) -> Response:
        headers = await intake.count(intake.client(http))
        response = await handle(http)
        if not isinstance(response, Sender):  # that has the headers of its own reservation
            response.headers.update(headers)
        return response

    return counting
