"""`/v1/models` lists the names of the model, in OpenAI's format or, to those who speak it, in Anthropic's."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from gateway.endpoints.cursors import CursorQuery, cursor_page, window
from gateway.endpoints.intake import Intake
from gateway.http.refusals import speaks_anthropic
from gateway.service import Service
from gateway.wire.frames import Json
from gateway.wire.strict import validated


class ModelsApi:
    """The names under which one service serves its model."""

    def __init__(self, service: Service, intake: Intake) -> None:
        self._service = service
        self._intake = intake

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.list_models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.show, methods=["GET"]),
        ]

    async def list_models(self, http: HttpRequest) -> Response:
        self._intake.client(http)
        names = self._service.options.models
        if not speaks_anthropic(http):
            return Json({"object": "list", "data": [self._model(name) for name in names]})
        ids, has_more = window(names, validated(CursorQuery, http.query_params))
        return Json(cursor_page([self._model_info(name) for name in ids], ids, has_more=has_more))

    async def show(self, http: HttpRequest) -> Response:
        self._intake.client(http)
        name = http.path_params["name"]
        self._intake.check_model(name)
        return Json(self._model_info(name) if speaks_anthropic(http) else self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        """The model as OpenAI's API shows it."""
        return {
            "id": name,
            "object": "model",
            "created": self._service.options.created,
            "owned_by": "penstock",
            "root": self._service.options.models[0],
            "max_model_len": self._service.dispatch.context_length,
            "defaults": asdict(self._service.options.defaults),
        }

    def _model_info(self, name: str) -> dict[str, Any]:
        """The model as Anthropic's API shows it."""
        context_length = self._service.dispatch.context_length
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": f"{datetime.fromtimestamp(self._service.options.created, UTC):%Y-%m-%dT%H:%M:%SZ}",
            "lifecycle": "active",
            "max_input_tokens": context_length,
            "max_tokens": context_length,
        }
