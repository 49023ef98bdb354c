"""Limits of requests, checked before any work is done for one."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import orjson
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.gateway.http.correlation import PROBES
from penstock.gateway.http.errors import ApiError, invalid, refused
from penstock.gateway.http.hosts import Hosts
from penstock.gateway.http.refusals import refusal
from penstock.gateway.store.time_budget import TIME_BUDGET, TimeBudget

_STRING = re.compile(rb'"[^"]*"?')
_PIECE_BYTES = 64 * 1024
_CONTAINERS = frozenset({dict, list})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on one request. Beyond them it is refused with a 4xx that names the field."""

    max_body_bytes: int = 4 * 1024 * 1024
    max_bodies_bytes: int = 256 * 1024 * 1024
    """The bytes of all bodies together, each from its arrival until its answer begins; uploads do not count."""
    max_upload_bytes: int = 100 * 1024 * 1024
    """The bytes of an upload, which is not kept in memory."""
    max_header_bytes: int = 32 * 1024
    max_headers: int = 100
    max_json_depth: int = 32
    max_json_containers: int = 16_384
    """The arrays and objects of a body: each takes far more memory than its two brackets did."""
    max_json_strings: int = 65_536
    """The strings of a body, names of members included."""
    max_json_values: int = 524_288
    """The values of a body, by the commas between them: numbers cost time long before they fill a body."""
    max_json_members: int = 2048
    """The members of one object."""
    max_messages: int = 2048
    max_content_parts: int = 256
    max_tools: int = 512
    max_tool_calls: int = 128
    """The calls of one message."""
    max_template_variables: int = 32
    max_prompts: int = 64
    max_inputs: int = 1024
    """The texts of one request for embeddings."""
    max_branches: int = 8192
    """The questions of one request for decisions, and the tokens of their answers but for each first one."""
    max_choices: int = 128
    """The choices of one request, those of all its prompts together."""
    max_beams: int = 16
    max_stop: int = 16
    max_stop_chars: int = 256
    max_stop_token_ids: int = 64
    max_logit_bias: int = 1024
    max_bad_words: int = 64
    max_bad_word_chars: int = 256
    max_allowed_token_ids: int = 16_384
    max_metadata: int = 16
    max_grammar_bytes: int = 64 * 1024
    """The bytes of a schema, regular expression or grammar that an answer has to match."""
    max_grammar_choices: int = 1024
    max_top_logprobs: int = 20
    max_logprobs: int = 2**20
    """The log probabilities of a reply in one piece: all are kept until it is complete, at about 100 bytes each."""
    max_bytes_per_token: int = 16
    """A prompt of more bytes than the context times this is too long whatever its tokens are."""


class LimitsMiddleware:
    """Refuses requests to other hosts, too many headers, too long ones, and too long bodies, declared or not.

    Every other request gets its time for the store.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: Limits,
        hosts: Collection[str] = (),
        uploads: frozenset[str] = frozenset(),
    ) -> None:
        """
        Args:
            hosts: see `gateway.http.hosts.Hosts`.
            uploads: the paths whose bodies are uploads.
        """
        self.app = app
        self.hosts = Hosts(hosts)
        self.limits = limits
        self.uploads = uploads
        self._bodies = _Bodies(limits.max_bodies_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        TIME_BUDGET.set(TimeBudget())
        is_upload = scope["path"] in self.uploads
        max_bytes = self.limits.max_upload_bytes if is_upload else self.limits.max_body_bytes
        headers = scope["headers"]
        # Whoever probes asks by an address: kubelet by the pod's, a health check in a container by loopback.
        is_probe = scope["path"] in PROBES
        error = None if is_probe else self.hosts.refusal(headers)
        error = error or self._check_headers(headers, max_bytes)
        if error is not None:
            await refusal(error, scope["path"])(scope, receive, send)
            return
        body = _Body(receive, max_bytes, _Bodies(max_bytes) if is_upload else self._bodies)

        async def send_released(message: Message) -> None:
            body.release()
            await send(message)

        try:
            await self.app(scope, body, send_released)
        finally:
            body.release()

    def _check_headers(self, headers: list[tuple[bytes, bytes]], max_bytes: int) -> ApiError | None:
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


def parse_object(body: bytes, limits: Limits) -> dict[str, object]:
    """Returns the JSON object in a request body.

    Raises:
        ApiError: 400, if it is none, or larger or nested deeper than `limits` allow.
    """
    _check_counts(body, limits)
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if error.msg.startswith("depth limit"):
            raise _too_deep(limits) from None
        message = f"The request body could not be parsed as JSON: {error}."
        raise invalid(message, None, "invalid_json") from None
    if not isinstance(value, dict):
        raise invalid("The request body must be a JSON object.", None, "invalid_json")
    _check_nesting(value, limits)
    return value


def parse_messages(text: str, limits: Limits) -> object:
    """Returns the value of a query's `messages`; raises 400 if it is not JSON."""
    return parse_object(b'{"messages":' + text.encode() + b"}", limits).get("messages")


def _check_counts(body: bytes, limits: Limits) -> None:
    """Raises 400 for more containers, values or strings than `limits` allow, before any is made."""
    bounds = (
        ("arrays and objects", limits.max_json_containers),
        ("values", limits.max_json_values),
        ("strings", limits.max_json_strings),
    )
    if all(number <= most for number, (_, most) in zip(_count(body), bounds, strict=True)):
        return
    # Most of them may stand inside strings. Without escaped ones, every quote opens or closes a string; a piece at a
    # time, for a search holds the interpreter until it is over.
    body = body.replace(rb"\\", b"  ").replace(rb"\"", b"  ")
    containers = values = num_quotes = 0
    for start in range(0, len(body), _PIECE_BYTES):
        piece = body[start : start + _PIECE_BYTES]
        found, commas, _ = _count(_STRING.sub(b"", b'"' + piece if num_quotes % 2 else piece))
        containers += found
        values += commas
        num_quotes += piece.count(b'"')
        for number, (what, most) in zip((containers, values, num_quotes / 2), bounds, strict=True):
            if number > most:
                raise _too_many(what, most)


def _count(text: bytes) -> tuple[int, int, float]:
    """Returns the number of opening brackets, of commas and of pairs of quotes."""
    return text.count(b"[") + text.count(b"{"), text.count(b","), text.count(b'"') / 2


def _check_nesting(value: dict[str, object], limits: Limits) -> None:
    level: list[dict[str, Any] | list[Any]] = [value]
    for _ in range(limits.max_json_depth):
        below: list[dict[str, Any] | list[Any]] = []
        for node in level:
            if isinstance(node, dict) and len(node) > limits.max_json_members:
                raise _too_many("members in one object", limits.max_json_members)
            items = node.values() if isinstance(node, dict) else node
            if not _CONTAINERS.isdisjoint(map(type, items)):
                below += [item for item in items if type(item) in _CONTAINERS]
        if not below:
            return
        level = below
    raise _too_deep(limits)


def _too_deep(limits: Limits) -> ApiError:
    message = f"The JSON body is nested deeper than {limits.max_json_depth} levels."
    return invalid(message, None, "json_too_deep")


def _too_many(what: str, most: int) -> ApiError:
    return invalid(f"The JSON body has more than {most} {what}.", None, "json_too_large")
