"""The Open Inference Protocol's probes and metadata over HTTP, as KServe asks for them."""

from __future__ import annotations

from http import HTTPStatus

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.gateway.endpoints.intake import Endpoints
from penstock.gateway.endpoints.operation import ANY, OWN, serves
from penstock.gateway.http.json_response import JsonResponse
from penstock.gateway.wire.inference import model_metadata, server_metadata


class InferenceApi(Endpoints):
    """The state of one service and its model; inference itself is offered over gRPC."""

    @serves("GET /v2/health/live", OWN, is_open=True, is_probe=True)
    async def live(self, _: HttpRequest) -> Response:
        """Say whether the server works, for KServe."""
        is_live = self._service.health == "ok"
        return JsonResponse({"live": is_live}, _status(is_live))

    @serves("GET /v2/health/ready", OWN, is_open=True, is_probe=True)
    async def ready(self, _: HttpRequest) -> Response:
        """Say whether the server takes requests, for KServe."""
        is_ready = self._service.readiness == "ready"
        return JsonResponse({"ready": is_ready}, _status(is_ready))

    @serves("GET /v2", ANY, is_open=True)
    async def show_server(self, _: HttpRequest) -> Response:
        """Say the server's name and version, for KServe."""
        return JsonResponse(server_metadata())

    @serves("GET /v2/models/{name:path}/ready", OWN, is_open=True, is_probe=True, statuses=(404,))
    async def model_ready(self, http: HttpRequest) -> Response:
        """Say whether the model takes requests, for KServe."""
        name = http.path_params["name"]
        self._intake.check_model(name)
        is_ready = self._service.readiness == "ready"
        return JsonResponse({"name": name, "ready": is_ready}, _status(is_ready))

    @serves("GET /v2/models/{name:path}", ANY, statuses=(404,))
    async def show_model(self, http: HttpRequest) -> Response:
        """Show the model's inputs and outputs, for KServe."""
        self._intake.client(http)
        name = http.path_params["name"]
        self._intake.check_model(name)
        return JsonResponse(model_metadata(name, self._service.options.embedding.size))


def _status(is_well: bool) -> int:
    return HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE
