"""The state of the server for its operator's programs, and the use of their limits for its tenants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from typing_extensions import TypedDict

from penstock.gateway.access.keys import Client
from penstock.gateway.access.quotas import utc
from penstock.gateway.endpoints.intake import Endpoints
from penstock.gateway.endpoints.operation import ANY, OWN, serves
from penstock.gateway.errors import ApiError, not_found
from penstock.gateway.http.json_response import JsonResponse
from penstock.gateway.instruments import CONTENT_TYPE
from penstock.gateway.service import Service
from penstock.gateway.store.interface import Allotment, Grant, Window


class ServerInfoApi(Endpoints):
    """The settings of one service, for its operator alone."""

    @serves("GET /server_info", ANY, statuses=(403,))
    async def show_settings(self, http: HttpRequest) -> Response:
        """Show the server's settings to its operator."""
        if not self._intake.client(http).is_operator:
            message = "Only a key of the operator's may see the server's settings."
            raise ApiError(HTTPStatus.FORBIDDEN, message, code="operator_only")
        service, stats = self._service, self._service.engine_stats()
        return JsonResponse(
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


class ProbesApi(Endpoints):
    """The state of one service, for its operator's programs; also on the metrics' own port."""

    @serves("GET /health", OWN, is_open=True, is_probe=True)
    async def health(self, http: HttpRequest) -> Response:
        """Red means: restart this process; with --health ready, what /ready says."""
        if self._service.options.health_is_ready:
            return await self.ready(http)
        health = self._service.health
        status = HTTPStatus.OK if health == "ok" else HTTPStatus.SERVICE_UNAVAILABLE
        return JsonResponse({"status": health}, status)

    @serves("GET /ping", OWN, is_open=True, is_probe=True)
    async def ping(self, http: HttpRequest) -> Response:
        """Say what /health says, for SageMaker."""
        return await self.health(http)

    @serves("GET /ready", OWN, is_open=True, is_probe=True)
    async def ready(self, _: HttpRequest) -> Response:
        """Red means: send requests elsewhere."""
        readiness = self._service.readiness
        status = HTTPStatus.OK if readiness == "ready" else HTTPStatus.SERVICE_UNAVAILABLE
        return JsonResponse({"status": readiness}, status)

    @serves("GET /load", ANY, is_open=True)
    async def load(self, _: HttpRequest) -> Response:
        """Say how many requests wait or run.

        vLLM's routers ask for it.
        """
        return JsonResponse({"server_load": len(self._service.dispatch)})

    @serves("GET /version", ANY, is_open=True)
    async def version(self, _: HttpRequest) -> Response:
        """Say the version of Penstock."""
        return JsonResponse({"version": version("penstock")})


class MetricsApi(Endpoints):
    """The metrics of one service; they may have a port of their own."""

    def __init__(self, service: Service) -> None:
        self._service = service

    @serves("GET /metrics", OWN, answers=("text/plain",), is_open=True)
    async def metrics(self, _: HttpRequest) -> Response:
        """Give the metrics, for Prometheus."""
        return Response(self._service.render_metrics(), headers={"content-type": CONTENT_TYPE})


class UsageQuery(TypedDict, total=False):
    tenant: str


class UsageApi(Endpoints):
    """The usage of one service's tenants."""

    @serves("GET /v1/usage", ANY, query=UsageQuery, statuses=(404,))
    async def show(self, http: HttpRequest) -> Response:
        """Say what tenants used of their limits, and what is left.

        Lists the caller's usage; for an operator's key, that of all tenants, or of the one that it names.
        """
        clients = self._chosen(self._intake.client(http), http.query_params.get("tenant"))
        standings = await self._service.quotas.standings(clients)
        return JsonResponse(
            {
                "object": "list",
                "data": [
                    self._row(client, windows, grant)
                    for client, (windows, grant) in zip(clients, standings, strict=True)
                ],
            }
        )

    def _chosen(self, client: Client, name: str | None) -> list[Client]:
        """Returns those who are asked for; raises 404 if one is not known, or not to be seen by this client."""
        seen = self._service.access.clients() if client.is_operator else [client]
        if name is None:
            return seen
        if not (named := [one for one in seen if one.tenant.name == name]):
            raise not_found(f"There is no tenant '{name}'.", "tenant")
        return named

    def _row(self, client: Client, windows: Sequence[Window], grant: Grant) -> dict[str, Any]:
        limit = client.quota.max_streams
        return {
            "object": "usage",
            "tenant": client.tenant.name,
            "requests": _per_time(grant.requests, windows, grant, "requests"),
            "tokens": _per_time(grant.tokens, windows, grant, "tokens"),
            "streams": None if limit is None else {"limit": limit, "used": grant.num_streams},
            "last_minute": asdict(self._service.tenants.load(client.tenant.name)),
        }


def _per_time(
    minute: Allotment | None, windows: Sequence[Window], grant: Grant, unit: str
) -> dict[str, dict[str, Any]]:
    """Returns the use of each window in which there is a limit of requests or tokens."""
    uses: dict[str, dict[str, Any]] = {}
    if minute is not None:
        left = max(0, minute.remaining)
        uses["minute"] = {"limit": minute.limit, "used": minute.limit - left, "remaining": left}
    for window, use in zip(windows, grant.uses, strict=True):
        limit, used = (
            (window.max_requests, use.requests) if unit == "requests" else (window.max_tokens, use.tokens)
        )
        uses[window.name] = {
            "limit": limit,
            "used": used,
            "remaining": None if limit is None else max(0, limit - used),
            "ends_at": utc(window.ends_s),
        }
    return uses
