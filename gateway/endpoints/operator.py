"""What the operator's own programs ask: `/health`, `/ready`, `/metrics`, `/load`, `/version`, `/server_info`."""

from __future__ import annotations

from dataclasses import asdict
from http import HTTPStatus
from importlib.metadata import version

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.gateway.endpoints.intake import Endpoints
from penstock.gateway.endpoints.operation import ANY, OWN, serves
from penstock.gateway.errors import ApiError
from penstock.gateway.http.json_response import Json
from penstock.gateway.instruments import CONTENT_TYPE
from penstock.gateway.service import Service


class ServerInfoApi(Endpoints):
    """The settings of one service, for its operator alone."""

    @serves("GET /server_info", ANY, statuses=(403,))
    async def show(self, http: HttpRequest) -> Response:
        """Show the server's settings to its operator."""
        if not self._intake.client(http).is_operator:
            message = "Only a key of the operator's may see the server's settings."
            raise ApiError(HTTPStatus.FORBIDDEN, message, code="operator_only")
        service, stats = self._service, self._service.engine_stats()
        return Json(
            {
                "version": version("penstock"),
                "models": service.options.models,
                "context_length": service.dispatch.context_length,
                "vocab_size": service.vocab_size,
                "block_size": service.options.block_size,
                "num_kv_tokens": stats.num_kv_tokens,
                "max_num_seqs": stats.max_num_seqs,
                "max_batch_tokens": stats.max_batch_tokens,
                "defaults": asdict(service.options.defaults),
                "limits": asdict(service.options.limits),
            }
        )


class OperatorApi(Endpoints):
    """The state of one service, for its operator's programs."""

    @serves("GET /health", OWN, is_open=True, is_probe=True)
    async def health(self, http: HttpRequest) -> Response:
        """Red means: restart this process; with --health ready, what /ready says."""
        if self._service.options.health_is_ready:
            return await self.ready(http)
        health = self._service.health
        status = HTTPStatus.OK if health == "ok" else HTTPStatus.SERVICE_UNAVAILABLE
        return Json({"status": health}, status)

    @serves("GET /ping", OWN, is_open=True, is_probe=True)
    async def ping(self, http: HttpRequest) -> Response:
        """Say what /health says, for SageMaker."""
        return await self.health(http)

    @serves("GET /ready", OWN, is_open=True, is_probe=True)
    async def ready(self, _: HttpRequest) -> Response:
        """Red means: send requests elsewhere."""
        readiness = self._service.readiness
        status = HTTPStatus.OK if readiness == "ready" else HTTPStatus.SERVICE_UNAVAILABLE
        return Json({"status": readiness}, status)

    @serves("GET /load", ANY, is_open=True)
    async def load(self, _: HttpRequest) -> Response:
        """Say how many requests wait or run.

        vLLM's routers ask for it.
        """
        return Json({"server_load": len(self._service.dispatch)})

    @serves("GET /version", ANY, is_open=True)
    async def version(self, _: HttpRequest) -> Response:
        """Say the version of Penstock."""
        return Json({"version": version("penstock")})


class MetricsApi(Endpoints):
    """The metrics of one service; they may have a port of their own."""

    def __init__(self, service: Service) -> None:
        self._service = service

    @serves("GET /metrics", OWN, answers=("text/plain",), is_open=True)
    async def metrics(self, _: HttpRequest) -> Response:
        """Give the metrics, for Prometheus."""
        return Response(self._service.render_metrics(), headers={"content-type": CONTENT_TYPE})
