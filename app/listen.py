"""The listening socket: made before anything slow, so that a port in use is reported at once."""

from __future__ import annotations

import errno
import ipaddress
import socket
import ssl
from pathlib import Path
from typing import TypedDict

from penstock.app.errors import OperatorError, TransientError
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
        kind = TransientError if error.errno == errno.EADDRINUSE else OperatorError
        raise kind(_reason(host, port, flag, error)) from None
    listener.setblocking(False)
    return listener


def _reason(host: str, port: int, flag: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"{flag} {port}: another program listens there already; stop it or take another port"
    if error.errno == errno.EACCES:
        return f"{flag} {port}: this user may not listen there; take a port from 1024 on"
    return f"--host {host}: not an address of this machine ({error.strerror})"


class Certificate(TypedDict):
    """The files of a certificate and its key, as uvicorn names them."""

    ssl_certfile: Path | None
    ssl_keyfile: Path | None


def certificate_of(settings: FrontSettings) -> Certificate:
    """Returns the checked files of the certificate and its key, if the server is to have some.

    Raises:
        OperatorError: a file cannot be read, or is not what its setting says.
    """
    certificate, key = settings.ssl_certfile, settings.ssl_keyfile
    if certificate is None:
        if key is not None:
            raise OperatorError(f"--ssl-keyfile {key}: give --ssl-certfile, too")
        return Certificate(ssl_certfile=None, ssl_keyfile=None)
    for name, path in (("certfile", certificate), ("keyfile", key)):
        try:
            _ = path and path.read_bytes()
        except OSError as error:
            raise OperatorError(f"--ssl-{name} {path}: {error.strerror}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(certificate)
    except ssl.SSLError:
        raise OperatorError(f"--ssl-certfile {certificate}: no certificate in PEM format") from None
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        named = f"--ssl-certfile {certificate}" if key is None else f"--ssl-keyfile {key}"
        raise OperatorError(f"{named}: {_reason_of(error)}") from None
    return Certificate(ssl_certfile=certificate, ssl_keyfile=key)


def _no_password() -> str:
    raise ValueError("the key has a password; give one without")


def _reason_of(error: ssl.SSLError | ValueError) -> str:
    if not isinstance(error, ssl.SSLError):
        return str(error)
    if error.reason == "KEY_VALUES_MISMATCH":
        return "not the key of the certificate"
    return "no private key in PEM format"


def url(listener: socket.socket, settings: FrontSettings) -> str:
    """Returns the address for a browser."""
    scheme = "http" if settings.ssl_certfile is None else "https"
    host, port = listener.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "::1" if listener.family == socket.AF_INET6 else "127.0.0.1"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


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
