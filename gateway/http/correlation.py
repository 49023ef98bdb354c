"""Correlation: every request has a name, its `x-request-id`, by which its client and the log speak of it."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.types import Scope

from penstock.gateway.errors import ApiError

access_log = logging.getLogger("penstock.access")
log = logging.getLogger("penstock.gateway")

ANTHROPIC_PATH = "/v1/messages"
"""The path below which clients know Anthropic's API: its errors, and its name for the request's id."""
PROBES = (
    *("/health", "/ping", "/ready", "/metrics", "/v2/health/live", "/v2/health/ready"),
    *(f"/inference.GRPCInferenceService/{name}" for name in ("ServerLive", "ServerReady", "ModelReady")),
)
"""The paths that are asked for every few seconds: the log has them at level debug alone."""
_TRACE_HEADERS = ("traceparent", "tracestate")
TICKET_HEADER = "x-penstock-ticket"
SOURCE_HEADER = "x-penstock-source"
_VALID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_MAX_PATH_CHARS = 200
_MAX_ADDRESS_CHARS = 64
_MAX_REASON_CHARS = 500


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
    source: str = ""
    """The replica from which that switch has it take KV, see `gateway.tickets`; empty if from none."""
    own_address: str = ""
    """The address of this server at which it came in; empty if that is not known."""
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

    @classmethod
    def of(cls, scope: Scope) -> Correlation:
        given = Headers(scope=scope)
        usable = filter(_VALID.fullmatch, given.getlist("x-request-id"))
        host, *_ = scope.get("client") or ("",)
        return cls(
            next(usable, "") or f"req_{secrets.token_hex(12)}",
            scope["method"],
            scope["path"],
            {name: given[name] for name in _TRACE_HEADERS if name in given},
            given.get(TICKET_HEADER, ""),
            given.get(SOURCE_HEADER, ""),
            _own_address(scope),
            # In one word: a proxy's header may have said anything.
            address=quote(host[:_MAX_ADDRESS_CHARS], safe=":.%"),
        )

    def headers(self) -> dict[str, str]:
        """Returns the headers by which the answer speaks of its request."""
        headers = {"x-request-id": self.request_id}
        if self.ignored:
            headers[IGNORED_HEADER] = ", ".join(self.ignored)
        if self.path.startswith(ANTHROPIC_PATH):
            headers["request-id"] = self.request_id
        return headers

    def __str__(self) -> str:
        """Returns one short line: a path is quoted, so that no client writes lines of its own into the log."""
        return f"{self.method} {quote(self.path[:_MAX_PATH_CHARS], errors='replace')}"


def _own_address(scope: Scope) -> str:
    """Returns the address of the socket, whatever the client calls it."""
    host, port = scope.get("server") or ("", None)
    if not port:
        return ""
    return f"{scope['scheme']}://[{host}]:{port}" if ":" in host else f"{scope['scheme']}://{host}:{port}"


IGNORED_HEADER = "x-penstock-ignored"

CORRELATION: ContextVar[Correlation | None] = ContextVar("CORRELATION", default=None)
"""The request that the running task answers; None outside requests."""


def log_answer(request: Correlation, status: int, *, is_whole: bool, seconds: float) -> None:
    """Logs one line; its parts are `fields` of the record, for logs that machines read."""
    level = logging.DEBUG if request.path in PROBES else logging.INFO
    if not access_log.isEnabledFor(level):
        return
    who = {"address": request.address, "tenant": request.tenant}
    details = {**{name: value for name, value in who.items() if value}, **request.account()}
    fields = {
        "request_id": request.request_id,
        "method": request.method,
        "path": request.path[:_MAX_PATH_CHARS],
        "status": status,
        "seconds": round(seconds, 4),
        "whole": is_whole,
        **details,
    }
    if request.trace_id:
        fields["trace_id"] = request.trace_id
    parts = [
        f"{request} {status}{'' if is_whole else ', left'}",
        f"{1000 * seconds:.0f} ms",
        request.request_id,
        *(f"{name} {value}" for name, value in details.items()),
        *([f"trace {request.trace_id}"] if request.trace_id else []),
    ]
    access_log.log(level, "%s", ", ".join(parts), extra={"fields": fields})


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
