"""`/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

import re
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from penstock.gateway.access.idempotency import not_here
from penstock.gateway.endpoints.answering import Answering, Made, ModelEndpoints, Recorder
from penstock.gateway.endpoints.arrivals import Arrival
from penstock.gateway.endpoints.intake import Handler, Intake, route
from penstock.gateway.endpoints.replies import Attached, position_asked
from penstock.gateway.http.errors import invalid
from penstock.gateway.service import Service
from penstock.gateway.sessions.chats import keep
from penstock.gateway.sessions.recordings.completions import CHAT, TEXT, CompletionFormat, details_of, script
from penstock.gateway.sessions.recordings.reader import Reader
from penstock.gateway.sessions.recordings.recording import Recording
from penstock.gateway.sessions.responses.threads import Thread
from penstock.gateway.wire.frames import Json, StreamWriter, at_once
from penstock.gateway.wire.schemas import ChatBody, CompletionBody
from penstock.gateway.wire.shapes import ChatShape, CompletionShape, Head

PREFIXES = {CHAT: "chatcmpl-", TEXT: "cmpl-"}
"""The beginning of the ids of each kind; 32 hexadecimal digits follow."""
CHAT_ID, TEXT_ID = (re.compile(prefix + r"[0-9a-f]{32}") for prefix in PREFIXES.values())


class CompletionsApi(ModelEndpoints):
    """Chat and text completions of one service."""

    def __init__(self, service: Service, intake: Intake, answering: Answering) -> None:
        super().__init__(service, intake, answering)
        service.recordings.scripts |= dict.fromkeys((CHAT, TEXT), script)
        service.recordings.on_end[CHAT] = self._keep_recorded
        self._recorders = {kind: CompletionRecorder(service, intake, kind) for kind in PREFIXES}

    def routes(self) -> list[Route]:
        return [
            route("/v1/completions", POST=self.complete),
            route("/v1/completions/{id}", **self.by_id(TEXT, "text_completion.deleted")),
        ]

    async def chat(self, http: HttpRequest) -> Response:
        return await self._answer(http, ChatBody, self._chat_writer, PREFIXES[CHAT], self._recorders[CHAT])

    async def complete(self, http: HttpRequest) -> Response:
        return await self._answer(
            http, CompletionBody, self._text_writer, PREFIXES[TEXT], self._recorders[TEXT]
        )

    def _chat_writer(self, head: Head, came: Arrival, made: Made) -> StreamWriter:
        return self._writer(ChatShape, head, came, made)

    def _text_writer(self, head: Head, came: Arrival, made: Made) -> StreamWriter:
        return self._writer(CompletionShape, head, came, made)

    def _writer(
        self, shape: type[ChatShape | CompletionShape], head: Head, came: Arrival, made: Made
    ) -> StreamWriter:
        shown = came.ask.shown
        return StreamWriter(
            shape(self._service.tokenizer, shown.extras),
            head,
            include_usage=shown.usage,
            usage_so_far=shown.usage_so_far,
            reading=made.guidance.reading,
        )

    async def _keep_recorded(self, recording: Recording) -> None:
        stored = recording.details.get("stored")
        if stored is not None and recording.error is None and not recording.num_dropped:
            body = CompletionFormat(recording, self._service.tokenizer).body(recording)
            await keep(self._service.store, recording.tenant, stored, at_once(body))

    # Replies that were recorded

    def by_id(self, kind: str, deleted: str) -> dict[str, Handler]:
        """Returns the handlers that follow replies of one kind again, and stop and forget them."""

        async def follow(http: HttpRequest) -> Response:
            position = position_asked(http)
            return self._recorders[kind].follow(await self._recording(http, kind), position)

        async def discard(http: HttpRequest) -> Response:
            recording = await self._recording(http, kind)
            await self._service.recordings.discard(recording)
            return Json({"id": recording.id, "object": deleted, "deleted": True})

        return {"GET": follow, "DELETE": discard}

    async def _recording(self, http: HttpRequest, kind: str) -> Recording:
        client, recording_id = self._intake.client(http), http.path_params["id"]
        if not (CHAT_ID if kind == CHAT else TEXT_ID).fullmatch(recording_id):
            raise invalid(f"The id must be '{PREFIXES[kind]}' and 32 hexadecimal digits.", "id")
        recording = await self._intake.recording(client.tenant.name, recording_id)
        if recording.kind != kind:
            raise invalid("The id is that of another kind of reply.", "id")
        return recording


class CompletionRecorder(Recorder):
    """Records completions of one kind."""

    num_digits = 32

    def __init__(self, service: Service, intake: Intake, kind: str) -> None:
        self._service = service
        self._intake = intake
        self.kind, self.prefix = kind, PREFIXES[kind]

    def details(self, came: Arrival, made: Made, thread: Thread, head: Head) -> dict[str, Any]:  # noqa: ARG002
        return details_of(
            head,
            made.guidance.reading,
            stream=came.ask.streams,
            include_usage=came.ask.shown.usage,
            num_choices=made.requests[0].n,
            stored=came.ask.kept.stored,
        )

    def follow(self, recording: Recording, position: int = -1) -> Attached:
        format = CompletionFormat(recording, self._service.tokenizer, position)
        reader = Reader(recording, format, position)
        return Attached(self._service, reader, streamed=recording.details["stream"])

    def reply(self, recording: Recording, _: Any) -> Response:
        return self.follow(recording)

    async def repeat(self, tenant: str, reply_id: str, _: Any) -> Response:
        recording = await self._intake.find_recording(tenant, reply_id)
        if recording is None:
            raise not_here()
        return self.follow(recording)
