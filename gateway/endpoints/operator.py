"""What the operator's own programs ask: `/health`, `/ready`, `/metrics`, `/load`, `/version`, `/server_info`."""

from __future__ import annotations

from dataclasses import asdict
from http import HTTPStatus
from importlib.metadata import version

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from penstock.gateway.endpoints.intake import Endpoints, route
from penstock.gateway.errors import ApiError
from penstock.gateway.http.json_response import Json
from penstock.gateway.instruments import CONTENT_TYPE
from penstock.gateway.service import Service


class ServerInfoApi(Endpoints):
    """The settings of one service, for its operator alone."""

    def routes(self) -> list[Route]:
        return [route("/server_info", GET=self.show)]

    async def show(self, http: HttpRequest) -> Response:
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


class OperatorApi:
    """The state of one service, for its operator's programs."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self, *, with_metrics: bool) -> list[Route]:
        return [
            route("/health", GET=self.health),
            route("/ping", GET=self.health),
            route("/ready", GET=self.ready),
            route("/load", GET=self.load),
            route("/version", GET=self.version),
            *([route("/metrics", GET=self.metrics)] if with_metrics else ()),
        ]

    async def health(self, http: HttpRequest) -> Response:
        """Answers 503 if this process has to be started again or, where the operator wants it, like `ready`."""
        if self._service.options.health_is_ready:
            return await self.ready(http)
        health = self._service.health
        status = HTTPStatus.OK if health == "ok" else HTTPStatus.SERVICE_UNAVAILABLE
        return Json({"status": health}, status)

    async def ready(self, _: HttpRequest) -> Response:
        """Answers 503 if requests have to be sent elsewhere."""
        readiness = self._service.readiness
        status = HTTPStatus.OK if readiness == "ready" else HTTPStatus.SERVICE_UNAVAILABLE
        return Json({"status": readiness}, status)

    async def load(self, _: HttpRequest) -> Response:
        """Says how many requests wait or run, as vLLM's routers ask for it."""
        return Json({"server_load": len(self._service.dispatch)})

    async def version(self, _: HttpRequest) -> Response:
        return Json({"version": version("penstock")})

    async def metrics(self, _: HttpRequest) -> Response:
        return Response(self._service.render_metrics(), headers={"content-type": CONTENT_TYPE})
