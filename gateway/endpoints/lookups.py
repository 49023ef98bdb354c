"""Looking up what is kept counts as a request: to follow a long reply takes as much of the server as a short one."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from penstock.gateway.endpoints.intake import Intake
from penstock.gateway.endpoints.operations import OPERATIONS
from penstock.gateway.endpoints.replies import Sender


def counted(route: Route, intake: Intake) -> Route:
    """Returns a route that counts its GETs against their client's quota, where the table of operations says so."""
    operation, answer = OPERATIONS.get(route.path_format, {}).get("GET"), route.endpoint
    if operation is None or not operation.is_lookup:
        return route

    async def counting(http: HttpRequest) -> Response:
        headers = await intake.count(intake.client(http)) if http.method in ("GET", "HEAD") else {}
        response: Response = await answer(http)
        if not isinstance(response, Sender):  # that has the headers of its own reservation
            response.headers.update(headers)
        return response

    return Route(route.path, counting, methods=list(route.methods or ()))
