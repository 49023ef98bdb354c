"""`/v1/messages`, Anthropic's API: a chat under other names."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from penstock.gateway.endpoints.answering import Answering, Made, ModelEndpoints
from penstock.gateway.endpoints.intake import Arrival, Intake, route
from penstock.gateway.endpoints.recorded import ReplyRecorder
from penstock.gateway.http.json_response import Json
from penstock.gateway.service import Service
from penstock.gateway.sessions.recordings.kinds import MESSAGE, PREFIXES
from penstock.gateway.wire.anthropic.bodies import CountTokensBody, MessagesBody
from penstock.gateway.wire.anthropic.messages import MessageWriter
from penstock.gateway.wire.ask import Ask
from penstock.gateway.wire.writing import Head


class MessagesApi(ModelEndpoints):
    """Messages of one service."""

    def __init__(self, service: Service, intake: Intake, answering: Answering) -> None:
        super().__init__(service, intake, answering)
        self._recorder = ReplyRecorder(service, intake, MESSAGE, _details)

    def routes(self) -> list[Route]:
        return [
            route("/v1/messages", POST=self.create),
            route("/v1/messages/count_tokens", POST=self.count),
            route("/v1/messages/{id}", **self._recorder.by_id({"type": "message_deleted"})),
        ]

    async def create(self, http: HttpRequest) -> Response:
        return await self._answer(http, MessagesBody, _writer, PREFIXES[MESSAGE], self._recorder)

    async def count(self, http: HttpRequest) -> Response:
        """Answers how many tokens the prompt of such a message has."""
        _, [prompt], headers = await self._intake.counted_prompts(http, CountTokensBody)
        return Json({"input_tokens": len(prompt)}, headers=headers)


def _writer(head: Head, came: Arrival, made: Made) -> MessageWriter:
    return MessageWriter(head, came.body.max_tokens, made.guidance.reading)


def _details(ask: Ask) -> dict[str, Any]:
    return {"max_tokens": ask.max_tokens.number}
