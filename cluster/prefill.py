"""The first part of a request, at a replica for prompts alone: it computes the prompt, and another one goes on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import orjson

from penstock.cluster.relay import Target
from penstock.cluster.upstream import Headers, connect, request_bytes
from penstock.gateway.endpoints.prefill import PATH, PrefillOrder
from penstock.gateway.endpoints.state import SECRET_HEADER
from penstock.gateway.http.connections import Connection

LATE_S = 5.0
"""The time at which a prompt is no longer waited for: after twice its forecast and this."""


@dataclass(slots=True)
class _Listener:
    """The reply to an order; a `cluster.upstream.ReplyListener`."""

    connection: Connection
    status: int = 0
    is_over: bool = False
    is_whole: bool = field(default=False)

    def on_head(self, status: int, headers: Headers) -> None:  # noqa: ARG002
        self.status = status

    def on_body(self, body: bytes) -> None:
        pass

    def on_end(self, *, is_whole: bool) -> None:
        self.is_over, self.is_whole = True, is_whole
        self.connection.wake()


async def compute(
    order: PrefillOrder, target: Target, secret: str, connection: Connection, forecast_s: float
) -> bool:
    """Has a replica compute a prompt, and returns whether it did so in time; who else serves the request does it then.

    Args:
        connection: that of the client, with which the replica's work ends.
    """
    body = orjson.dumps(order)
    headers = [
        *target.headers,
        (SECRET_HEADER.encode(), secret.encode()),
        (b"content-type", b"application/json"),
    ]
    listener, loop = _Listener(connection), asyncio.get_running_loop()
    try:
        upstream = await connect(
            target.address, request_bytes("POST", PATH.encode(), target.address, headers, body), listener
        )
    except OSError:
        return False
    until_s = loop.time() + 2 * forecast_s + LATE_S
    timer = loop.call_at(until_s, connection.wake)
    try:
        while not listener.is_over and not connection.gone and loop.time() < until_s:
            await connection.sleep()
    finally:
        timer.cancel()
        upstream.close()
    return listener.is_whole and listener.status == 200
