"""`/v1/messages`, Anthropic's API: a chat under other names."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.gateway.endpoints.answering import ModelEndpoints
from penstock.gateway.endpoints.intake import Arrival, Intake
from penstock.gateway.endpoints.operation import ANY, BY_ID, answers, follows, serves
from penstock.gateway.endpoints.recorded import ReplyRecorder
from penstock.gateway.endpoints.requests import Made
from penstock.gateway.http.json_response import Json
from penstock.gateway.service import Service
from penstock.gateway.sessions.recordings.kinds import MESSAGE
from penstock.gateway.wire.anthropic.bodies import CountTokensBody, MessagesBody
from penstock.gateway.wire.anthropic.messages import MessageWriter
from penstock.gateway.wire.writing import Head


class MessagesApi(ModelEndpoints):
    """Messages of one service."""

    def __init__(self, service: Service, intake: Intake) -> None:
        super().__init__(service, intake)
        self._recorder = ReplyRecorder(
            service,
            intake,
            MESSAGE,
            lambda came: {"max_tokens": came.ask.max_tokens.number},
            {"type": "message_deleted"},
        )

    @answers("/v1/messages", MessagesBody)
    async def create(self, http: HttpRequest) -> Response:
        """Answer a conversation in Anthropic's format, streamed or whole."""
        return await self._answer(http, MessagesBody, _writer, self._recorder)

    @serves("POST /v1/messages/count_tokens", ANY, CountTokensBody, statuses=(404, 429))
    async def count(self, http: HttpRequest) -> Response:
        """Count the tokens of such a conversation."""
        _, [prompt], headers = await self._intake.counted_prompts(http, CountTokensBody)
        return Json({"input_tokens": len(prompt)}, headers=headers)

    @follows("/v1/messages/{id}")
    async def follow(self, http: HttpRequest) -> Response:
        """Follow a resumable message, after the event that was seen last."""
        return await self._recorder.show(http)

    @serves("DELETE /v1/messages/{id}", BY_ID)
    async def forget(self, http: HttpRequest) -> Response:
        """Stop and forget a resumable message."""
        return await self._recorder.discard(http)


def _writer(head: Head, came: Arrival, made: Made) -> MessageWriter:
    return MessageWriter(head, came.body.max_tokens, made.reading)
