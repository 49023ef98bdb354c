"""Hosts: the names that a server answers to.

A page of somebody else's can give its own name this machine's address, and a browser then takes this server for that
page's own (DNS rebinding). The name stays in the Host header, and gives it away.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from http import HTTPStatus

from penstock.gateway.errors import ApiError

FORWARDED_HOST = "x-forwarded-host"
"""The header with the host that a client asked a switch or another proxy for."""
FORWARDED_PROTO = "x-forwarded-proto"
"""The header with the scheme by which a client reached a proxy."""
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")


class Hosts:
    """The names that a server answers to."""

    def __init__(self, hosts: Collection[str] = ()) -> None:
        """`hosts` are names or addresses without ports; none, or "*" among them, is any."""
        self._hosts = frozenset(map(_name, hosts))
        self._any = not hosts or "*" in hosts

    def refusal(self, headers: Iterable[tuple[bytes, bytes]]) -> ApiError | None:
        """Returns why a request with these headers is refused; None if it is for one of these hosts."""
        names = (value.decode("latin-1") for name, value in headers if name == b"host")
        if self._any or all(_name(name) in self._hosts for name in names):
            return None
        message = (
            "This server does not answer to the host of this request; "
            "its operator can allow it by --allowed-hosts."
        )
        return ApiError(HTTPStatus.MISDIRECTED_REQUEST, message, code="host_not_allowed", close=True)


def _name(host: str) -> str:
    """Returns a host without port, brackets and the dot of a full name, in small letters."""
    name, colon, port = host.strip().rpartition(":")
    if not colon or (":" in name and not name.endswith("]")) or not (port.isdigit() or not port):
        name = host.strip()
    return name.strip("[]").removesuffix(".").lower()
