"""The listening socket: made before anything slow, so that a port in use is told at once."""

from __future__ import annotations

import errno
import ipaddress
import socket

from penstock.app.errors import OperatorError
from penstock.app.log import log
from penstock.app.settings import FrontSettings

_BACKLOG = 2048


def bind(host: str, port: int, flag: str = "--port") -> socket.socket:
    """A socket that listens already: who connects while the model loads waits for an answer, and gets one.

    Raises:
        OperatorError: the address cannot be had.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError:
        raise OperatorError(f"--host {host}: not an address of this machine") from None
    # TCP by name, else asyncio leaves Nagle's algorithm on: a token would wait for the client's word on the last one.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise OperatorError(_reason(host, port, flag, error)) from None
    listener.setblocking(False)
    return listener


def _reason(host: str, port: int, flag: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"{flag} {port}: another program listens there already; stop it or take another port"
    if error.errno == errno.EACCES:
        return f"{flag} {port}: this user may not listen there; take a port from 1024 on"
    return f"--host {host}: not an address of this machine ({error.strerror})"


def url(listener: socket.socket) -> str:
    """Where to point a browser."""
    host, port = listener.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "::1" if listener.family == socket.AF_INET6 else "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def port_of(listener: socket.socket) -> int:
    port: int = listener.getsockname()[1]
    return port


def check_exposure(listener: socket.socket, settings: FrontSettings) -> None:
    """Refuses to let everybody in who reaches an address, unless that was asked for.

    Raises:
        OperatorError: the address is not a loopback one, and no keys are asked for.
    """
    if is_loopback(listener) or settings.api_keys_file is not None:
        return
    if not settings.insecure:
        raise OperatorError(
            f"--host {settings.host}: whoever reaches it could use this server; give --api-keys-file"
            " (`penstock key` makes keys), or say --insecure"
        )
    log.warning("--insecure: whoever reaches %s can use this server", settings.host)


def is_loopback(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback
