"""The gRPC server of one service: its methods, its port, and its way up and down."""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message_factory import GetMessageClass

from penstock.gateway.endpoints.answering import MakeWriter, ModelEndpoints
from penstock.gateway.endpoints.intake import Inbound, Intake
from penstock.gateway.endpoints.requests import RequestGroup
from penstock.gateway.reply.generation import Live
from penstock.gateway.reply.whole import whole
from penstock.gateway.rpc.calls import Call, Calls
from penstock.gateway.rpc.generate import GenerateWriter, generate_body
from penstock.gateway.rpc.infer import InferWriter, infer_body
from penstock.gateway.rpc.schema import INFERENCE, PENSTOCK
from penstock.gateway.service import Service
from penstock.gateway.wire.inference import model_metadata, server_metadata
from penstock.gateway.wire.strict import StrictBody
from penstock.gateway.wire.writing import Head

_STOP_S = 5.0
"""The time that calls which were told to end may take for it."""


class _Methods(ModelEndpoints):
    """The methods of both services."""

    # The Open Inference Protocol

    async def server_live(self, _: Call) -> AsyncGenerator[bytes, None]:
        yield _reply(INFERENCE.ServerLiveResponse(live=self._service.health == "ok"))

    async def server_ready(self, _: Call) -> AsyncGenerator[bytes, None]:
        yield _reply(INFERENCE.ServerReadyResponse(ready=self._service.readiness == "ready"))

    async def model_ready(self, call: Call) -> AsyncGenerator[bytes, None]:
        self._intake.check_model(call.message.name)
        yield _reply(INFERENCE.ModelReadyResponse(ready=self._service.readiness == "ready"))

    async def server_metadata(self, _: Call) -> AsyncGenerator[bytes, None]:
        yield _reply(INFERENCE.ServerMetadataResponse(**server_metadata()))

    async def model_metadata(self, call: Call) -> AsyncGenerator[bytes, None]:
        self._intake.client(call.http)
        self._intake.check_model(call.message.name)
        size = self._service.options.embedding.size
        yield _reply(INFERENCE.ModelMetadataResponse(**model_metadata(call.message.name, size)))

    async def model_infer(self, call: Call) -> AsyncGenerator[bytes, None]:
        options = self._service.options
        kind, values = infer_body(call.message, options.models[0], options.limits)

        def write(_: Head, inbound: Inbound, __: RequestGroup) -> InferWriter:
            return InferWriter(call.message, inbound.body, is_normalised=options.embedding.is_normalised)

        reply = await self._submitted(call, kind, values, write)
        try:
            await reply.end()
            if reply.error is not None:
                raise reply.error
            fields: Any = await whole(reply.writer, reply, reply.outputs())
            yield _reply(INFERENCE.ModelInferResponse(**fields))
        finally:
            self._service.dispatch.release(reply)

    # Penstock's own

    async def generate(self, call: Call) -> AsyncGenerator[bytes, None]:
        options = self._service.options
        kind, values = generate_body(call.message, options.models[0], options.limits)
        reply = await self._submitted(
            call, kind, values, lambda head, _, group: GenerateWriter(head, group.reading)
        )
        try:
            while not reply.at_end:
                await reply.news()
                if reply.error is not None and not call.connection.committed:
                    raise reply.error
                call.connection.overdue = False  # the connection is kept alive by gRPC itself
                for frame in filter(None, reply.frames()):  # there is no tail
                    yield frame
            if reply.error is not None:
                raise reply.error
        finally:
            self._service.dispatch.release(reply)

    async def _submitted(
        self, call: Call, kind: type[StrictBody], values: Mapping[str, object], write: MakeWriter
    ) -> Live:
        """Returns a reply that was let in; it has to be released.

        Raises:
            ApiError: 4xx or 503, for everything that a request may be refused for.
        """
        inbound = await self._intake.begin(call.http, kind, values)
        self._check(inbound.ask)
        reply = await self._live(inbound, write, f"rpc-{secrets.token_hex(16)}")
        reply.connection = call.connection
        if reply.reservation is not None:
            call.headers.update(reply.reservation.headers)
        self._service.dispatch.submit(reply)
        return reply


def _reply(message: Any) -> bytes:
    serialized: bytes = message.SerializeToString()
    return serialized


class RpcServer:
    """A gRPC server for one service, on a port of its own; to be used on the service's event loop."""

    def __init__(self, service: Service, intake: Intake) -> None:
        self._service = service
        self._methods = _Methods(service, intake)
        self._server: Any = None

    async def start(self, address: str, certificate: tuple[bytes, bytes] | None = None) -> int:
        """Listens at an address, such as `127.0.0.1:8001`, and returns the port.

        Args:
            certificate: the certificate and its private key in PEM format; with it, the server speaks TLS alone.

        Raises:
            RuntimeError: the address cannot be had.
        """
        limits = self._service.options.limits
        options = {
            "grpc.max_receive_message_length": limits.max_body_bytes,
            "grpc.max_send_message_length": -1,
            "grpc.max_metadata_size": limits.max_header_bytes,
            "grpc.so_reuseport": 0,
        }
        self._server = server = grpc.aio.server(options=list(options.items()))
        server.add_generic_rpc_handlers(self._handlers())
        if certificate is None:
            port: int = server.add_insecure_port(address)
        else:
            chain, key = certificate
            port = server.add_secure_port(address, grpc.ssl_server_credentials([(key, chain)]))
        await server.start()
        return port

    def _handlers(self) -> list[Any]:
        """Returns the handlers of both services."""
        methods = {f"/{one.containing_service.full_name}/{one.name}": one for one in _DESCRIPTORS}
        calls = Calls(
            self._service,
            {
                path: (getattr(self._methods, _snake(one.name)), GetMessageClass(one.input_type))
                for path, one in methods.items()
            },
        )
        return [
            grpc.method_handlers_generic_handler(
                one.containing_service.full_name,
                {one.name: calls.handler(path, streams=one.server_streaming)},
            )
            for path, one in methods.items()
        ]

    async def stop(self) -> None:
        """Ends what still runs, and closes the port."""
        self._service.dispatch.fail_all()
        await self._server.stop(_STOP_S)


_DESCRIPTORS = [method for schema in (INFERENCE, PENSTOCK) for method in schema.service.methods]


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
