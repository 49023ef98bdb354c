"""One name per request, the client's own if it gave a usable one: `x-request-id`."""

from __future__ import annotations

import re
import secrets

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_VALID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


class RequestIdMiddleware:
    """Answers every request with its `x-request-id`."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = _given(scope["headers"]) or f"req_{secrets.token_hex(12)}"

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self.app(scope, receive, send_named)


def _given(headers: list[tuple[bytes, bytes]]) -> str | None:
    for name, value in headers:
        if name == b"x-request-id" and _VALID.fullmatch(value):
            return value.decode("ascii")
    return None
