"""Clients of the gRPC services, made by protoc from the .proto files."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from functools import cache
from typing import Any

import grpc
import grpc.aio

from penstock.gateway.endpoints.intake import Intake
from penstock.gateway.rpc.schema import PROTOS
from penstock.gateway.rpc.server import RpcServer
from tests.gateway.harness import Gateway

TIMEOUT_S = 60


@cache
def generated(name: str) -> tuple[Any, Any]:
    """The messages and the stubs of a .proto file, as protoc makes them."""
    sys.path.append(str(PROTOS))
    try:
        made: tuple[Any, Any] = grpc.protos_and_services(f"{name}.proto")
        return made
    finally:
        sys.path.remove(str(PROTOS))


PENSTOCK, PENSTOCK_STUBS = generated("generate")
INFERENCE, INFERENCE_STUBS = generated("inference")


def stubs(channel: Any) -> tuple[Any, Any]:
    """The stubs of the Open Inference Protocol and of Penstock's own service."""
    return INFERENCE_STUBS.GRPCInferenceServiceStub(channel), PENSTOCK_STUBS.PenstockStub(channel)


@contextlib.asynccontextmanager
async def connected(gateway: Gateway, *options: tuple[str, Any]) -> AsyncIterator[tuple[Any, Any]]:
    """Stubs of a gateway's services on a real port, in this event loop."""
    server = RpcServer(gateway.service, Intake(gateway.service))
    port = await server.start("127.0.0.1:0")
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
            yield stubs(channel)
    finally:
        await server.stop()


def texts(*values: str, name: str = "text_input", **fields: Any) -> Any:
    """A request for the answers to texts."""
    tensor = {"name": name, "datatype": "BYTES", "shape": [len(values)]}
    contents = {"bytes_contents": [value.encode() for value in values]}
    given = {"model_name": "fake", "inputs": [{**tensor, "contents": contents}], **fields}
    return INFERENCE.ModelInferRequest(**given)


def parameters(**values: Any) -> dict[str, Any]:
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    return {name: INFERENCE.InferParameter(**{kinds[type(value)]: value}) for name, value in values.items()}


async def error_of(calling: Any) -> Any:
    """The error that a call ends with, as its client has it."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            if hasattr(calling, "read"):
                while await calling.read() != grpc.aio.EOF:
                    pass
            else:
                await calling
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call ended well")
