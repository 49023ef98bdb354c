"""The gRPC port of a server. gRPC is imported where there is such a port alone, for it is an extra."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from penstock.app.errors import OperatorError, TransientError
from penstock.app.listen import bind
from penstock.app.settings import FrontSettings, Settings
from penstock.gateway.endpoints.intake import Intake
from penstock.gateway.service import Service

if TYPE_CHECKING:
    from penstock.gateway.rpc.server import RpcServer


class RpcPort:
    """The address that gRPC is to have; it opens its own socket, since it cannot take over one."""

    def __init__(self, settings: Settings) -> None:
        """
        Raises:
            OperatorError: gRPC is not installed, or the address cannot be had.
        """
        try:
            from penstock.gateway.rpc.server import RpcServer
        except ImportError as error:
            raise OperatorError(f"--grpc-port needs gRPC: pip install 'penstock[grpc]' ({error})") from None
        self._make: type[RpcServer] = RpcServer
        self._certificate = _certificate(settings)
        self._port = settings.grpc_port
        with bind(settings.host, settings.grpc_port, "--grpc-port") as listener:
            host = listener.getsockname()[0]
            self.address = (
                f"[{host}]:{self._port}" if listener.family == socket.AF_INET6 else f"{host}:{self._port}"
            )

    @contextlib.asynccontextmanager
    async def serving(self, service: Service, intake: Intake) -> AsyncIterator[None]:
        """While this is entered, calls are served.

        Raises:
            TransientError: another program took the port meanwhile.
        """
        server = self._make(service, intake)
        try:
            await server.start(self.address, self._certificate)
        except RuntimeError as error:
            raise TransientError(f"--grpc-port {self._port}: {error}") from None
        try:
            yield
        finally:
            await server.stop()


def _certificate(settings: FrontSettings) -> tuple[bytes, bytes] | None:
    """Returns the certificate and its key, whose files were checked."""
    if settings.ssl_certfile is None:
        return None
    chain = settings.ssl_certfile.read_bytes()
    return chain, chain if settings.ssl_keyfile is None else settings.ssl_keyfile.read_bytes()
