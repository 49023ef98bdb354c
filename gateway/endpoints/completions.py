"""`/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.gateway.endpoints.answering import ModelEndpoints
from penstock.gateway.endpoints.intake import Arrival, Intake
from penstock.gateway.endpoints.operation import BY_ID, answers, follows, serves
from penstock.gateway.endpoints.recorded import ReplyRecorder
from penstock.gateway.endpoints.requests import Made
from penstock.gateway.reply.whole import whole_json
from penstock.gateway.service import Service
from penstock.gateway.sessions.chats import keep
from penstock.gateway.sessions.recordings.kinds import CHAT, TEXT
from penstock.gateway.sessions.recordings.recording import Recording
from penstock.gateway.wire.completions import ChatWriter, CompletionWriter, TextWriter
from penstock.gateway.wire.schemas import ChatBody, CompletionBody
from penstock.gateway.wire.writing import Head


class CompletionsApi(ModelEndpoints):
    """Chat and text completions of one service."""

    def __init__(self, service: Service, intake: Intake) -> None:
        super().__init__(service, intake)
        self._chats = chat_recorder(service, intake)
        self._texts = ReplyRecorder(service, intake, TEXT, _details, _deleted("text_completion"))
        service.recordings.on_end[CHAT] = self._keep_recorded

    @answers("/v1/chat/completions", ChatBody)
    async def chat(self, http: HttpRequest) -> Response:
        """Answer a conversation, streamed or whole."""
        return await self._answer(http, ChatBody, partial(self._writer, ChatWriter), self._chats)

    @answers("/v1/completions", CompletionBody)
    async def complete(self, http: HttpRequest) -> Response:
        """Continue texts, streamed or whole."""
        return await self._answer(http, CompletionBody, partial(self._writer, TextWriter), self._texts)

    @follows("/v1/completions/{id}")
    async def follow(self, http: HttpRequest) -> Response:
        """Follow a resumable continuation, after the event that was seen last."""
        return await self._texts.show(http)

    @serves("DELETE /v1/completions/{id}", BY_ID)
    async def forget(self, http: HttpRequest) -> Response:
        """Stop and forget a resumable continuation."""
        return await self._texts.discard(http)

    def _writer(
        self, make: type[CompletionWriter], head: Head, came: Arrival, made: Made
    ) -> CompletionWriter:
        shown = came.ask.shown
        return make(
            self._service.tokenizer,
            head,
            shown.extras,
            reading=made.reading,
            include_usage=shown.usage,
            usage_so_far=shown.usage_so_far,
        )

    async def _keep_recorded(self, recording: Recording) -> None:
        stored = recording.details.get("stored")
        if stored is not None and recording.error is None:
            body, completion = await whole_json(recording.writer, recording, recording.outputs())
            await keep(self._service.store, recording.tenant, stored, completion, len(body))


def chat_recorder(service: Service, intake: Intake) -> ReplyRecorder:
    return ReplyRecorder(service, intake, CHAT, _details, _deleted("chat.completion"))


def _deleted(name: str) -> dict[str, object]:
    return {"object": f"{name}.deleted", "deleted": True}


def _details(came: Arrival) -> dict[str, Any]:
    stored = came.ask.kept.stored
    return {"include_usage": came.ask.shown.usage, **({} if stored is None else {"stored": stored})}
