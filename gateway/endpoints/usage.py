"""`/v1/usage`: what a tenant used of its limits, what is left, and its part of the machine now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from typing_extensions import TypedDict

from penstock.gateway.access.keys import Client
from penstock.gateway.access.quotas import utc
from penstock.gateway.endpoints.intake import Endpoints
from penstock.gateway.endpoints.operation import ANY, serves
from penstock.gateway.errors import not_found
from penstock.gateway.http.json_response import Json
from penstock.gateway.store.interface import Allotment, Grant, Window


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
        return Json(
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
        if not (named := [known for known in seen if known.tenant.name == name]):
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
    found: dict[str, dict[str, Any]] = {}
    if minute is not None:
        left = max(0, minute.remaining)
        found["minute"] = {"limit": minute.limit, "used": minute.limit - left, "remaining": left}
    for window, use in zip(windows, grant.uses, strict=True):
        limit, used = (
            (window.max_requests, use.requests) if unit == "requests" else (window.max_tokens, use.tokens)
        )
        found[window.name] = {
            "limit": limit,
            "used": used,
            "remaining": None if limit is None else max(0, limit - used),
            "ends_at": utc(window.ends_s),
        }
    return found
