"""The first part of a request, at a replica for prompts alone: it computes the prompt, and another one goes on.

The other one takes the prompt's KV while it is computed: it is told of every part of it that is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import orjson

from penstock.cluster.relay import Target
from penstock.cluster.upstream import Address, Headers, connect, request_bytes
from penstock.gateway.endpoints.prefill import PATH, PULL_PATH, PrefillOrder, PullOrder
from penstock.gateway.endpoints.state import EVERY_S, SECRET_HEADER
from penstock.gateway.http.connections import Connection

LATE_S = 5.0
"""The time at which a prompt is no longer waited for: after twice its forecast and this."""


@dataclass(slots=True)
class _Listener:
    """The reply to an order; a `cluster.upstream.ReplyListener`."""

    on_over: Callable[[], None]
    status: int = 0
    is_over: bool = False
    is_whole: bool = field(default=False)

    def on_head(self, status: int, headers: Headers) -> None:  # noqa: ARG002
        self.status = status

    def on_body(self, body: bytes) -> None:
        pass

    def on_end(self, *, is_whole: bool) -> None:
        self.is_over, self.is_whole = True, is_whole
        self.on_over()


async def compute(
    order: PrefillOrder, target: Target, secret: str, connection: Connection, forecast_s: float
) -> bool:
    """Has a replica compute a prompt, and returns whether it did so in time; who else serves the request does it then.

    Args:
        connection: that of the client, with which the replica's work ends.
    """
    body = orjson.dumps(order)
    headers = [*target.headers, *_headers(secret)]
    listener, loop = _Listener(connection.wake), asyncio.get_running_loop()
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


async def tell_of_progress(
    order: PullOrder,
    address: Address,
    secret: str,
    num_blocks: int,
    num_there: Callable[[], int],
    note_told: Callable[[int], None],
) -> None:
    """Has a replica take the KV of a prompt from the one that computes it, until all is there or the replica fails.

    Replicas say what they have no more often than every EVERY_S, so it is looked at as often.

    Args:
        address: of the replica that takes it.
        num_blocks: of the prompt.
        num_there: returns how many of them, from the first on, have been computed.
        note_told: is called with the number of blocks that the replica is told of next.
    """
    while not num_there():
        await asyncio.sleep(EVERY_S)
    over = asyncio.Event()
    try:
        upstream = await connect(
            address,
            request_bytes("POST", PULL_PATH.encode(), address, _headers(secret), None),
            _Listener(over.set),
        )
    except OSError:
        return
    try:
        await upstream.upload(_progress(order, num_blocks, num_there, note_told))
        await over.wait()
    finally:
        upstream.close()


async def _progress(
    order: PullOrder, num_blocks: int, num_there: Callable[[], int], note_told: Callable[[int], None]
) -> AsyncIterator[bytes]:
    """Yields the lines of the body."""
    yield orjson.dumps(order, option=orjson.OPT_APPEND_NEWLINE)
    num_told = 0
    while num_told < num_blocks:
        if (number := num_there()) > num_told:
            note_told(number - num_told)
            num_told = number
            yield b"%d\n" % number
        await asyncio.sleep(EVERY_S)


def _headers(secret: str) -> Headers:
    return [(SECRET_HEADER.encode(), secret.encode()), (b"content-type", b"application/json")]
