"""`/v1/messages`, Anthropic's API: a chat under other names."""

from __future__ import annotations

import secrets
from dataclasses import replace
from functools import partial

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from penstock.gateway.endpoints.intake import Endpoints, Intake, route
from penstock.gateway.endpoints.params import GenerationParams
from penstock.gateway.endpoints.recorded import Recorder, Turn, recorded
from penstock.gateway.service import Service
from penstock.gateway.sessions.recordings.kinds import MESSAGE, PREFIXES
from penstock.gateway.wire.anthropic.bodies import CountTokensBody, MessagesBody, as_chat
from penstock.gateway.wire.anthropic.messages import MessageWriter
from penstock.gateway.wire.frames import Json
from penstock.gateway.wire.schemas import ChatBody


class MessagesApi(Endpoints):
    """Messages of one service."""

    def __init__(self, service: Service, intake: Intake) -> None:
        super().__init__(service, intake)
        self._recorder = Recorder(service, intake)

    def routes(self) -> list[Route]:
        return [
            route("/v1/messages", POST=self.create),
            route("/v1/messages/count_tokens", POST=self.count),
            route("/v1/messages/{id}", **self._recorder.by_id(MESSAGE, {"type": "message_deleted"})),
        ]

    async def create(self, http: HttpRequest) -> Response:
        came = await self._intake.begin(http, MessagesBody, as_chat)
        body = came.body
        params = await self._intake.chat(came, body, may_be_fewer=True)
        if (kept := recorded(http, body)) is not None:
            begin = partial(self._turn, replace(params, is_recorded=True), body)
            return await self._recorder.reply(MESSAGE, came.tenant.name, kept.key, body, begin)
        self._intake.check_room(params, came.num_bytes)
        prompt, params = await self._intake.prompt(params, body)
        head = self._intake.head(PREFIXES[MESSAGE] + secrets.token_hex(16), body.model)
        assert body.max_tokens is not None
        writer = MessageWriter(head, body.max_tokens, params.reading)
        return await self._intake.reply(params, [prompt], head.id, writer)

    async def _turn(self, params: GenerationParams, body: ChatBody) -> Turn:
        self._intake.check_room(params, self._service.dispatch.context_length)
        prompt, params = await self._intake.prompt(params, body)
        return Turn(params, prompt, {"max_tokens": body.max_tokens})

    async def count(self, http: HttpRequest) -> Response:
        """Answers how many tokens the prompt of such a message has."""
        client = self._intake.client(http)
        async with self._intake.counted(client) as headers:
            body = await self._intake.read_as(http, CountTokensBody, as_chat)
            self._intake.check_model(body.model)
            prompt, _ = await self._intake.counting(client.tenant).conversation(body)
            return Json({"input_tokens": len(prompt)}, headers=headers)
