"""`/v1/messages`, Anthropic's API: a chat under other names."""

from __future__ import annotations

import secrets
import time

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from gateway.endpoints.intake import Intake, route
from gateway.endpoints.replies import Reply
from gateway.service import Service
from gateway.wire.anthropic.bodies import CountTokensBody, MessagesBody, as_chat
from gateway.wire.anthropic.messages import MessageWriter
from gateway.wire.frames import Json
from gateway.wire.sampling import tier_of
from gateway.wire.shapes import Head


class MessagesApi:
    """Messages of one service."""

    def __init__(self, service: Service, intake: Intake) -> None:
        self._service = service
        self._intake = intake

    def routes(self) -> list[Route]:
        return [
            route("/v1/messages", POST=self.create),
            route("/v1/messages/count_tokens", POST=self.count),
        ]

    async def create(self, http: HttpRequest) -> Response:
        arrival_s = self._service.clock()
        client = self._intake.client(http)
        self._service.dispatch.check_open()
        body = await self._intake.read_as(http, MessagesBody, as_chat)
        batch = await self._intake.chat(client, body, arrival_s, may_be_fewer=True)
        self._intake.check_room(batch, len(await http.body()))
        prompt, batch = await self._intake.prompt(batch, body)
        head = Head(
            id=f"msg_{secrets.token_hex(16)}",
            created=int(time.time()),
            model=body.model,
            service_tier=tier_of(batch.lane),
        )
        assert body.max_tokens is not None
        writer = MessageWriter(head, body.max_tokens, batch.reading.parser_of(head.id))
        return Reply(self._service, await self._intake.job(client, batch, [prompt], head.id, writer))

    async def count(self, http: HttpRequest) -> Response:
        """How many tokens the prompt of such a message has."""
        client = self._intake.client(http)
        async with self._intake.counted(client) as headers:
            body = await self._intake.read_as(http, CountTokensBody, as_chat)
            self._intake.check_model(body.model)
            prompt, _ = await self._intake.counting(client.tenant).conversation(body)
            return Json({"input_tokens": len(prompt)}, headers=headers)
