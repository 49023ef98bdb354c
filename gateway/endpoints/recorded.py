"""Recorded replies of all APIs but responses: they are begun or found again, followed and forgotten."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.gateway.access.idempotency import not_here
from penstock.gateway.endpoints.answering import Made, Recorder
from penstock.gateway.endpoints.intake import Arrival, Handler, Intake
from penstock.gateway.endpoints.replies import Sender, follow, position_asked
from penstock.gateway.errors import invalid
from penstock.gateway.http.json_response import Json
from penstock.gateway.service import Service
from penstock.gateway.sessions.recordings.kinds import IDS, PREFIXES, details_of
from penstock.gateway.sessions.recordings.recording import Reader, Recording
from penstock.gateway.sessions.responses.threads import Thread
from penstock.gateway.wire.ask import Ask
from penstock.gateway.wire.writing import Head


class ReplyRecorder(Recorder):
    """Records the replies of one kind."""

    num_digits = 32

    def __init__(
        self, service: Service, intake: Intake, kind: str, more: Callable[[Ask], dict[str, Any]]
    ) -> None:
        """`more` returns the further details that the writers of this kind are made of."""
        self._service = service
        self._intake = intake
        self._more = more
        self.kind, self.prefix = kind, PREFIXES[kind]

    def details(self, came: Arrival, made: Made, thread: Thread, head: Head) -> dict[str, Any]:  # noqa: ARG002
        return details_of(head, made.guidance.reading, stream=came.ask.streams, **self._more(came.ask))

    def reply(self, recording: Recording, _: Any) -> Response:
        return self._follow(recording, -1)

    async def repeat(self, tenant: str, reply_id: str, _: Any) -> Response:
        recording = await self._intake.find_recording(tenant, reply_id)
        if recording is None:
            raise not_here()
        return self._follow(recording, -1)

    def by_id(self, deleted: Mapping[str, object]) -> dict[str, Handler]:
        """Returns the handlers that follow a reply again, and stop and forget it.

        Args:
            deleted: what is said of one that was forgotten, beside its id.
        """

        async def show(http: HttpRequest) -> Response:
            position = position_asked(http)
            return self._follow(await self._recording(http), position)

        async def discard(http: HttpRequest) -> Response:
            recording = await self._recording(http)
            await self._service.recordings.discard(recording)
            return Json({"id": recording.id, **deleted})

        return {"GET": show, "DELETE": discard}

    def _follow(self, recording: Recording, position: int) -> Sender:
        return follow(self._service, Reader(recording, position), streamed=recording.is_streamed)

    async def _recording(self, http: HttpRequest) -> Recording:
        client, recording_id = self._intake.client(http), http.path_params["id"]
        if not IDS[self.kind].fullmatch(recording_id):
            raise invalid(f"The id must be '{self.prefix}' and 32 hexadecimal digits.", "id")
        recording = await self._intake.recording(client.tenant.name, recording_id)
        if recording.kind != self.kind:
            raise invalid("The id is that of another kind of reply.", "id")
        return recording
