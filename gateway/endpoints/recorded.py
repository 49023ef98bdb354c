"""Recorded replies of all APIs: how they are asked for, begun or found again, followed and forgotten."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.gateway.access.idempotency import HEADER, RESUMABLE_HEADER, idempotency_key, not_here
from penstock.gateway.endpoints.intake import Handler, Intake
from penstock.gateway.endpoints.params import GenerationParams
from penstock.gateway.endpoints.replies import Sender, follow, position_asked
from penstock.gateway.http.errors import invalid
from penstock.gateway.service import Service
from penstock.gateway.sessions.owners import owned_id
from penstock.gateway.sessions.recordings.kinds import IDS, PREFIXES, details_of
from penstock.gateway.sessions.recordings.reader import Reader
from penstock.gateway.sessions.recordings.recording import Recording
from penstock.gateway.wire.frames import Json
from penstock.gateway.wire.schemas import Sampled


@dataclass(frozen=True, slots=True)
class Recorded:
    """How a recorded reply was asked for: with an `Idempotency-Key`, or as a resumable stream."""

    key: str | None

    @property
    def way(self) -> str:
        return "a resumable stream" if self.key is None else f"the header '{HEADER}'"

    def check(self, unfit: Mapping[str, object]) -> None:
        """Raises 400 if a field is set that recordings do not have; `unfit` says which are."""
        field = next((field for field, is_set in unfit.items() if is_set), None)
        if field is not None:
            raise invalid(f"'{field}' cannot be used together with {self.way}.", field)


def recorded(http: HttpRequest, body: Sampled) -> Recorded | None:
    """Returns how a request asks for its reply to be recorded; None if it does not.

    Raises:
        ApiError: 400, for a header that says neither yes nor no.
    """
    header = http.headers.get(RESUMABLE_HEADER, "false")
    if header not in ("true", "false"):
        raise invalid(f"'{RESUMABLE_HEADER}' must be 'true' or 'false'.", RESUMABLE_HEADER)
    key, options = idempotency_key(http), body.stream_options
    resumable = header == "true" or (options is not None and bool(options.resumable))
    return Recorded(key) if key is not None or resumable else None


@dataclass(frozen=True, slots=True)
class Turn:
    """A request for a recorded reply, once its prompt is made."""

    params: GenerationParams
    prompt: list[int]
    more: dict[str, Any]
    """The details that the writer of its kind is made of."""


class Recorder:
    """Recorded replies of one service."""

    def __init__(self, service: Service, intake: Intake) -> None:
        self._service = service
        self._intake = intake

    async def reply(
        self,
        kind: str,
        tenant: str,
        key: str | None,
        body: object,
        begin: Callable[[], Awaitable[Turn]],
    ) -> Sender:
        """Sends the reply to the turn that `begin` makes, or the one that was made of the same body before."""
        reply_id = owned_id(PREFIXES[kind], self._service.tag, 32)
        start = partial(self._start, kind, reply_id, begin)
        made = await self._service.idempotency.once(tenant, key, (kind, body), reply_id, start)
        recording = await self._intake.find_recording(tenant, made) if isinstance(made, str) else made
        if recording is None:
            raise not_here()
        return self._follow(recording, -1)

    async def _start(self, kind: str, reply_id: str, begin: Callable[[], Awaitable[Turn]]) -> Recording:
        turn = await begin()
        params = turn.params
        [request] = await self._intake.requests(params, {reply_id: turn.prompt})
        head = self._intake.head(reply_id, params.body.model)
        stream = bool(params.body.stream)
        return await self._service.recordings.start(
            request,
            kind=kind,
            details=details_of(head, params.reading, stream=stream, **turn.more),
            created=head.created,
            detachable=True,
            journalled=True,
            max_detached_s=self._service.options.timeouts.detached_s,
            reservation=await self._intake.reserve(params.client, [request]),
        )

    def _follow(self, recording: Recording, position: int) -> Sender:
        return follow(self._service, Reader(recording, position), streamed=recording.is_streamed)

    def by_id(self, kind: str, deleted: Mapping[str, object]) -> dict[str, Handler]:
        """Returns the handlers that follow replies of one kind again, and stop and forget them.

        Args:
            deleted: what is said of one that was forgotten, beside its id.
        """

        async def show(http: HttpRequest) -> Response:
            position = position_asked(http)
            return self._follow(await self._recording(http, kind), position)

        async def discard(http: HttpRequest) -> Response:
            recording = await self._recording(http, kind)
            await self._service.recordings.discard(recording)
            return Json({"id": recording.id, **deleted})

        return {"GET": show, "DELETE": discard}

    async def _recording(self, http: HttpRequest, kind: str) -> Recording:
        client, recording_id = self._intake.client(http), http.path_params["id"]
        if not IDS[kind].fullmatch(recording_id):
            raise invalid(f"The id must be '{PREFIXES[kind]}' and 32 hexadecimal digits.", "id")
        recording = await self._intake.recording(client.tenant.name, recording_id)
        if recording.kind != kind:
            raise invalid("The id is that of another kind of reply.", "id")
        return recording
