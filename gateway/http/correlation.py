"""One name per request, the client's own if it gave a usable one: `x-request-id`."""

from __future__ import annotations

import re
import secrets
from contextvars import ContextVar
from dataclasses import dataclass
from urllib.parse import quote

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_VALID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_MAX_PATH_CHARS = 200


@dataclass(frozen=True, slots=True)
class Correlation:
    """What the log says of a request, so that its client and its operator speak of the same one."""

    request_id: str
    method: str
    path: str

    def __str__(self) -> str:
        """One short line: a path is quoted, so that no client writes lines of its own into the log."""
        return f"{self.method} {quote(self.path[:_MAX_PATH_CHARS], errors='replace')}"


CORRELATION: ContextVar[Correlation | None] = ContextVar("CORRELATION", default=None)
"""The request that the running task answers; None outside requests."""


class RequestIdMiddleware:
    """Answers every request with its `x-request-id`, and tells CORRELATION of it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = _given(scope["headers"]) or f"req_{secrets.token_hex(12)}"
        CORRELATION.set(Correlation(request_id, scope["method"], scope["path"]))
        answered = False

        async def send_named(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)
            answered = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await self.app(scope, receive, send_named)
        except Exception:
            # Starlette raises again what `answer_fault` has answered and logged; the server would log it once more.
            if not answered:
                raise


def _given(headers: list[tuple[bytes, bytes]]) -> str | None:
    for name, value in headers:
        if name == b"x-request-id" and _VALID.fullmatch(value):
            return value.decode("ascii")
    return None
