"""`/v1/responses/input_tokens` counts the tokens that the prompt of a response would have."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from penstock.gateway.endpoints.intake import Endpoints, Intake, route
from penstock.gateway.endpoints.responses import ResponsesApi
from penstock.gateway.service import Service
from penstock.gateway.sessions.responses.objects import input_items
from penstock.gateway.sessions.responses.schemas import InputItems, ResponseBody, check_response
from penstock.gateway.wire.frames import Json


class InputTokensBody(ResponseBody):
    """The body of `POST /v1/responses/input_tokens`: that of a response, of which nothing is required."""

    IGNORED = ResponseBody.IGNORED | {"personality"}

    model: str = ""
    input: Annotated[str | InputItems, BeforeValidator(lambda given: [] if given is None else given)] = Field(
        default_factory=list
    )
    personality: str | None = None


class InputTokensApi(Endpoints):
    """The counts of tokens of one service's responses."""

    def __init__(self, service: Service, intake: Intake, responses: ResponsesApi) -> None:
        super().__init__(service, intake)
        self._responses = responses

    def routes(self) -> list[Route]:
        return [route("/v1/responses/input_tokens", POST=self.count)]

    async def count(self, http: HttpRequest) -> Response:
        client = self._intake.client(http)
        async with self._intake.counted(client) as headers:
            body = await self._intake.read(http, InputTokensBody)
            check_response(body, self._service.options.limits)
            self._intake.check_model(body.model or self._service.options.models[0])
            thread = await self._responses.thread(client.tenant.name, body)
            items, counting = input_items(body.input), self._intake.counting(client.tenant)
            prompt = await self._responses.prompt(body, items, thread, counting)
            return Json({"object": "response.input_tokens", "input_tokens": len(prompt)}, headers=headers)
