"""What a request may be at most, checked before any work is done for it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from http import HTTPStatus
from typing import NoReturn

import anyio.to_thread
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import ApiError, invalid

OFF_LOOP_BYTES = 32 * 1024
"""JSON or text longer than this is worked on in a thread: parsing it would hold every stream up."""

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on one request. Beyond them it is refused with a 4xx that names the field."""

    max_body_bytes: int = 4 * 1024 * 1024
    max_header_bytes: int = 32 * 1024
    max_headers: int = 100
    max_json_depth: int = 32
    max_messages: int = 2048
    max_content_parts: int = 256
    max_prompts: int = 64
    max_choices: int = 128
    """Choices of one request, those of all its prompts together."""
    max_stop: int = 16
    max_stop_chars: int = 256
    max_stop_token_ids: int = 64
    max_logit_bias: int = 1024
    max_top_logprobs: int = 20
    max_bytes_per_token: int = 16
    """A prompt of more bytes than the context times this is too long whatever its tokens are."""


class LimitsMiddleware:
    """Refuses too many headers, too long ones, and bodies that are too long, declared or not."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self.app = app
        self.limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        error = self._check_headers(scope["headers"])
        if error is not None:
            await error.response()(scope, receive, send)
            return
        await self.app(scope, _Counted(receive, self.limits.max_body_bytes), send)

    def _check_headers(self, headers: list[tuple[bytes, bytes]]) -> ApiError | None:
        size = sum(len(name) + len(value) for name, value in headers)
        if len(headers) > self.limits.max_headers or size > self.limits.max_header_bytes:
            return headers_too_large()
        declared = next((value for name, value in headers if name == b"content-length"), b"0")
        if not declared.isdigit() or int(declared[:20]) > self.limits.max_body_bytes:
            return _body_too_large(self.limits.max_body_bytes)
        return None


class _Counted:
    """A `receive` that refuses to hand out more than so many bytes of body."""

    __slots__ = ("_left", "_receive")

    def __init__(self, receive: Receive, max_bytes: int) -> None:
        self._receive = receive
        self._left = max_bytes

    async def __call__(self) -> Message:
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            raise _body_too_large(None)
        return message


def headers_too_large() -> ApiError:
    return ApiError(
        HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
        "The request's headers are too many or too long.",
        code="headers_too_large",
        close=True,
    )


def _body_too_large(max_bytes: int | None) -> ApiError:
    most = "" if max_bytes is None else f" It may have {max_bytes} bytes."
    return ApiError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"The request body is too large.{most}",
        code="body_too_large",
        close=True,
    )


def json_depth(body: bytes) -> int:
    """How deep arrays and objects are nested, in time linear in the body and without parsing it.

    For a body that is not JSON it is at least the depth that a parser reaches before it finds out.
    """
    depth = deepest = 0
    for bracket in _STRING.sub(b"", body).translate(None, _NOT_BRACKETS):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


async def parse_object(body: bytes, limits: Limits) -> dict[str, object]:
    """The JSON object in a request body.

    Raises:
        ApiError: 400, if it is none, or nested too deep.
    """
    if len(body) > OFF_LOOP_BYTES:
        return await anyio.to_thread.run_sync(_parse_object, body, limits)
    return _parse_object(body, limits)


def _parse_object(body: bytes, limits: Limits) -> dict[str, object]:
    if json_depth(body) > limits.max_json_depth:
        message = f"The JSON body is nested deeper than {limits.max_json_depth} levels."
        raise invalid(message, None, "json_too_deep")
    try:
        value = json.loads(body.decode(), parse_constant=_refuse_constant)
    except ValueError as error:
        message = f"The request body could not be parsed as JSON: {error}."
        raise invalid(message, None, "invalid_json") from None
    if not isinstance(value, dict):
        raise invalid("The request body must be a JSON object.", None, "invalid_json")
    return value


def parse_messages(text: str, limits: Limits) -> object:
    """The value of a query's `messages`.

    Raises:
        ApiError: 400, if it is not JSON.
    """
    return _parse_object(b'{"messages":' + text.encode() + b"}", limits).get("messages")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
