"""The entrance of every request: its name, and the limits that are checked before any work is done for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from http import HTTPStatus

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.gateway.errors import ApiError, refused
from penstock.gateway.http.correlation import CORRELATION, PROBES, Correlation, log_answer
from penstock.gateway.http.hosts import Hosts
from penstock.gateway.http.refusals import refusal
from penstock.gateway.limits import Limits
from penstock.gateway.store.time_budget import TIME_BUDGET, TimeBudget

_REFUSED = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)


class Entrance:
    """The layer around an application: every request gets a name and a time budget for the store, and is logged.

    Requests to other hosts, those with too many or too long headers, and bodies that are too long, declared or not, are
    refused. Starlette's own layers are inside, so that this one sees every answer.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: Limits,
        hosts: Collection[str] = (),
        uploads: frozenset[str] = frozenset(),
        note_refused: Callable[[str], None] = lambda _: None,
    ) -> None:
        """
        Args:
            hosts: see `gateway.http.hosts.Hosts`.
            uploads: the paths whose bodies are uploads.
            note_refused: is called with the tenant of each request that was answered with 429 or 503.
        """
        self.app = app
        self.hosts = Hosts(hosts)
        self.limits = limits
        self.uploads = uploads
        self._bodies = _Bodies(limits.max_bodies_bytes)
        self._note_refused = note_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        CORRELATION.set(request := Correlation.of(scope))
        TIME_BUDGET.set(TimeBudget())
        began_s = time.perf_counter()
        is_whole, status = False, 0
        is_upload = request.path in self.uploads
        max_bytes = self.limits.max_upload_bytes if is_upload else self.limits.max_body_bytes
        body = _Body(receive, max_bytes, _Bodies(max_bytes) if is_upload else self._bodies)

        async def send_named(message: Message) -> None:
            nonlocal is_whole, status
            body.release()
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).update(request.headers())
            await send(message)
            is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)

        error = self._refusal(scope, max_bytes)
        app = self.app if error is None else refusal(error, request.path)
        try:
            await app(scope, body, send_named)
        except Exception:
            # Starlette raises again what `answer_fault` has answered and logged; the server would log it once more.
            if not is_whole:
                raise
        finally:
            body.release()
            if request.tenant and status in _REFUSED:
                self._note_refused(request.tenant)
            log_answer(request, status, is_whole=is_whole, seconds=time.perf_counter() - began_s)

    def _refusal(self, scope: Scope, max_bytes: int) -> ApiError | None:
        headers = scope["headers"]
        # Whoever probes asks by an address: kubelet by the pod's, a health check in a container by loopback.
        if scope["path"] not in PROBES and (error := self.hosts.refusal(headers)) is not None:
            return error
        size = sum(len(name) + len(value) for name, value in headers)
        if len(headers) > self.limits.max_headers or size > self.limits.max_header_bytes:
            return headers_too_large()
        declared = next((value for name, value in headers if name == b"content-length"), b"0")
        if not declared.isdigit() or int(declared[:20]) > max_bytes:
            return _body_too_large(max_bytes)
        return None


@dataclass(slots=True)
class _Bodies:
    """The bodies that are held at a time."""

    max_bytes: int
    num_bytes: int = 0


class _Body:
    """A `receive` that refuses to hand out more than so many bytes, or more than there is room for with all bodies."""

    __slots__ = ("_bodies", "_max_bytes", "_num_bytes", "_receive")

    def __init__(self, receive: Receive, max_bytes: int, bodies: _Bodies) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._bodies = bodies
        self._num_bytes = 0

    async def __call__(self) -> Message:
        message = await self._receive()
        num_bytes = len(message.get("body", b""))
        self._num_bytes += num_bytes
        self._bodies.num_bytes += num_bytes
        if self._num_bytes > self._max_bytes:
            raise _body_too_large(None)
        if self._bodies.num_bytes > self._bodies.max_bytes:
            text = (
                f"The bodies of the requests at work have more than {self._bodies.max_bytes} bytes together."
            )
            raise refused(text, "too_many_bodies", 1.0, tenant_limit=False)
        return message

    def release(self) -> None:
        """Makes room: the answer begins, or the request is over."""
        self._bodies.num_bytes -= self._num_bytes
        self._num_bytes = 0


def forget_body(http: Request) -> None:
    """Drops the body that a request object keeps, for that lives until the end of its answer."""
    http.__dict__.pop("_body", None)


def headers_too_large() -> ApiError:
    return ApiError(
        HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
        "The request's headers are too many or too long.",
        code="headers_too_large",
        close=True,
    )


def _body_too_large(max_bytes: int | None) -> ApiError:
    """The connection stays open, and the rest of the body is passed over: to hang up on a client that is still sending
    resets the connection, and it may never read the answer."""
    most = "" if max_bytes is None else f" It may have {max_bytes} bytes."
    return ApiError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"The request body is too large.{most}",
        code="body_too_large",
    )
