"""`/v1/messages`, Anthropic's API: a chat under other names."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from penstock.gateway.endpoints.answering import Made, ModelEndpoints
from penstock.gateway.endpoints.arrivals import Arrival
from penstock.gateway.endpoints.intake import route
from penstock.gateway.wire.anthropic.bodies import CountTokensBody, MessagesBody
from penstock.gateway.wire.anthropic.messages import MessageWriter
from penstock.gateway.wire.frames import Json
from penstock.gateway.wire.shapes import Head


class MessagesApi(ModelEndpoints):
    """Messages of one service."""

    def routes(self) -> list[Route]:
        return [
            route("/v1/messages", POST=self.create),
            route("/v1/messages/count_tokens", POST=self.count),
        ]

    async def create(self, http: HttpRequest) -> Response:
        return await self._answer(http, MessagesBody, _writer, "msg_")

    async def count(self, http: HttpRequest) -> Response:
        """Answers how many tokens the prompt of such a message has."""
        _, [prompt], headers = await self._intake.counted_prompts(http, CountTokensBody)
        return Json({"input_tokens": len(prompt)}, headers=headers)


def _writer(head: Head, came: Arrival, made: Made) -> MessageWriter:
    return MessageWriter(head, came.body.max_tokens, made.guidance.reading.parser(head.id))
