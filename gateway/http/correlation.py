"""Correlation: every request has a name, its `x-request-id`, by which its client and the log speak of it."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.gateway.errors import ApiError

access_log = logging.getLogger("penstock.access")
log = logging.getLogger("penstock.gateway")

ANTHROPIC_PATH = "/v1/messages"
"""The path below which clients know Anthropic's API: its errors, and its name for the request's id."""
PROBES = ("/health", "/ping", "/ready", "/metrics")
"""The paths that are asked for every few seconds: the log has them at level debug alone."""
_TRACE_HEADERS = ("traceparent", "tracestate")
TICKET_HEADER = "x-penstock-ticket"
_VALID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_MAX_PATH_CHARS = 200
_MAX_ADDRESS_CHARS = 64
_MAX_REASON_CHARS = 500
_REFUSED = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)


@dataclass(slots=True)
class Correlation:
    """A request as the log and its client know it."""

    request_id: str
    method: str
    path: str
    trace_headers: Mapping[str, str]
    """W3C's trace context, as the client sent it."""
    ticket: str = ""
    """The ticket of the switch that sent it, see `gateway.tickets`; empty if none did."""
    trace_id: str = ""
    """The id of its trace; empty if it is not traced."""
    address: str = ""
    """The address that it came from; empty if that is not known."""
    tenant: str = ""
    """The tenant whose key it has; empty while that is not known."""
    account: Callable[[], Mapping[str, object]] = dict
    """Returns the lane and tokens of its generation, for the access log; nothing if it has none."""
    ignored: list[str] = field(default_factory=list)
    """The fields of its body that were taken and not honoured; the reply names them."""

    def __str__(self) -> str:
        """Returns one short line: a path is quoted, so that no client writes lines of its own into the log."""
        return f"{self.method} {quote(self.path[:_MAX_PATH_CHARS], errors='replace')}"


IGNORED_HEADER = "x-penstock-ignored"

CORRELATION: ContextVar[Correlation | None] = ContextVar("CORRELATION", default=None)
"""The request that the running task answers; None outside requests."""


class RequestIdMiddleware:
    """Answers every request with its `x-request-id`, tells CORRELATION of it, and logs how it ended."""

    def __init__(self, app: ASGIApp, note_refused: Callable[[str], None] = lambda _: None) -> None:
        """`note_refused` is called with the tenant of each request that was answered with 429 or 503."""
        self.app = app
        self._note_refused = note_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope)
        usable = filter(_VALID.fullmatch, given.getlist("x-request-id"))
        request_id = next(usable, "") or f"req_{secrets.token_hex(12)}"
        traced = {name: given[name] for name in _TRACE_HEADERS if name in given}
        request = Correlation(
            request_id,
            scope["method"],
            scope["path"],
            traced,
            given.get(TICKET_HEADER, ""),
            address=_address(scope),
        )
        CORRELATION.set(request)
        began_s = time.perf_counter()
        answered, status = False, 0

        async def send_named(message: Message) -> None:
            nonlocal answered, status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if request.ignored:
                    headers[IGNORED_HEADER] = ", ".join(request.ignored)
                if request.path.startswith(ANTHROPIC_PATH):
                    headers["request-id"] = request_id
            await send(message)
            answered = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await self.app(scope, receive, send_named)
        except Exception:
            # Starlette raises again what `answer_fault` has answered and logged; the server would log it once more.
            if not answered:
                raise
        finally:
            if request.tenant and status in _REFUSED:
                self._note_refused(request.tenant)
            _note(request, status, is_whole=answered, seconds=time.perf_counter() - began_s)


def _address(scope: Scope) -> str:
    """Returns a request's address in one word: a proxy's header may have said anything."""
    host, *_ = scope.get("client") or ("",)
    return quote(host[:_MAX_ADDRESS_CHARS], safe=":.%")


def _note(request: Correlation, status: int, *, is_whole: bool, seconds: float) -> None:
    """Logs one line; its parts are `fields` of the record, for logs that machines read."""
    level = logging.DEBUG if request.path in PROBES else logging.INFO
    if not access_log.isEnabledFor(level):
        return
    ending = "" if is_whole else ", left"
    fields = {
        "request_id": request.request_id,
        "method": request.method,
        "path": request.path[:_MAX_PATH_CHARS],
        "status": status,
        "seconds": round(seconds, 4),
        "whole": is_whole,
        **(known := _known(request)),
    }
    if request.trace_id:
        fields["trace_id"] = request.trace_id
    access_log.log(
        level,
        "%s %d%s, %.0f ms, %s%s%s",
        request,
        status,
        ending,
        1000 * seconds,
        request.request_id,
        "".join(f", {name} {value}" for name, value in known.items()),
        request.trace_id and f", trace {request.trace_id}",
        extra={"fields": fields},
    )


def _known(request: Correlation) -> dict[str, object]:
    """Returns what is known of who asked, and of what was generated."""
    who = {"address": request.address, "tenant": request.tenant}
    return {**{name: value for name, value in who.items() if value}, **request.account()}


def log_fault(error: ApiError) -> None:
    """Writes the one line about a request that the server failed over; a refusal is no fault, and is not logged.

    Whoever sends the error to the client calls this, in a reply and in a stream alike.
    """
    if error.is_fault:
        log_failed(error.message)


def log_failed(reason: str, cause: Exception | None = None) -> None:
    """Writes the line about the request of this task."""
    request = CORRELATION.get()
    request_id = "unknown" if request is None else request.request_id
    line = " ".join(reason.split())[:_MAX_REASON_CHARS]
    log.error("%s failed: %s (x-request-id %s)", request or "a request", line, request_id, exc_info=cause)
