"""Which names this server answers to.

A page of somebody else's can give its own name this machine's address, and a browser then takes this server for that
page's own (DNS rebinding). The name stays in the Host header, and gives it away.
"""

from __future__ import annotations

from collections.abc import Collection
from http import HTTPStatus

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.http.errors import ApiError
from gateway.http.refusals import refusal

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")


class HostMiddleware:
    """Refuses requests to another host than these."""

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        """`hosts` are names or addresses without ports; none, or "*" among them, is any."""
        self.app = app
        self._hosts = frozenset(_name(host) for host in hosts)
        self._any = not hosts or "*" in hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._any:
            for name, value in scope["headers"]:
                if name == b"host" and _name(value.decode("latin-1")) not in self._hosts:
                    await refusal(_not_here(), scope["path"])(scope, receive, send)
                    return
        await self.app(scope, receive, send)


def _name(host: str) -> str:
    """Without port, brackets and the dot of a full name, in small letters."""
    name, colon, port = host.strip().rpartition(":")
    if not colon or (":" in name and not name.endswith("]")) or not (port.isdigit() or not port):
        name = host.strip()
    return name.strip("[]").removesuffix(".").lower()


def _not_here() -> ApiError:
    message = "This server does not answer to the host of this request; its operator can allow it by --allowed-hosts."
    return ApiError(HTTPStatus.MISDIRECTED_REQUEST, message, code="host_not_allowed", close=True)
