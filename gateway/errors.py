"""Every refusal and fault that a client can get, and how each API spells it, in a plain reply as within a stream."""

from __future__ import annotations

import contextlib
import json
import math
import random
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import TypeVar

from penstock.gateway.store.interface import StoreUnavailable

DROPPED_HEADER = "x-llm-d-request-dropped-reason"
"""The header by which llm-d's clients tell that a request was refused for load, and did not fail."""
_DROPPED = {"queue_timeout": "rejected-ttl-expired"}
"""llm-d's reasons, where the queue was not just full."""
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    501: "api_error",
    503: "overloaded_error",
}
ObjectT = TypeVar("ObjectT")


class ApiError(Exception):
    """A refusal or a fault that is reported to the client.

    Attributes:
        status: the HTTP status, if nothing was sent yet.
        type, param, code: as in OpenAI's error object.
        retry_after_s: when it is worth coming back.
        close: True if the connection is not to be used again.
        extra_headers: what else the reply has, if nothing was sent yet.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        close: bool = False,
        extra_headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.close = close
        self.extra_headers = dict(extra_headers or {})
        self.anthropic_message = message
        """The message to clients of Anthropic's API."""

    @property
    def is_fault(self) -> bool:
        """Whether the server failed over the request; False if it refused the request or was told to end."""
        return self.status == HTTPStatus.INTERNAL_SERVER_ERROR or self.code == "engine_failed"

    @property
    def is_overload(self) -> bool:
        """Whether the server refused the request for its load alone."""
        return DROPPED_HEADER in self.extra_headers

    def body(self) -> bytes:
        """OpenAI's error object as JSON; the same in a reply and in a frame of a stream."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()

    def headers(self) -> dict[str, str]:
        headers = dict(self.extra_headers)
        if self.retry_after_s is not None:
            headers |= _retry_headers(self.retry_after_s)
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers["www-authenticate"] = "Bearer"
        if self.close:
            headers["connection"] = "close"
        return headers


def _retry_headers(seconds: float) -> dict[str, str]:
    """Up to a fifth is added at random: clients that were refused together must not come back together."""
    seconds = min(seconds * random.uniform(1.0, 1.2), 60.0)
    return {"retry-after": str(max(1, math.ceil(seconds))), "retry-after-ms": str(math.ceil(seconds * 1000))}


def invalid(
    message: str, param: str | None, code: str | None = "invalid_value", status: int = HTTPStatus.BAD_REQUEST
) -> ApiError:
    """Makes the error for a mistake of the client's, in the field `param`."""
    return ApiError(status, message, param=param, code=code)


def not_found(message: str, param: str | None = None) -> ApiError:
    return invalid(message, param, "not_found", HTTPStatus.NOT_FOUND)


def existing(value: ObjectT | None, message: str, param: str | None = None) -> ObjectT:
    """Returns the object; raises 404 if there is none."""
    if value is None:
        raise not_found(message, param)
    return value


def gone(message: str, code: str) -> ApiError:
    """Makes the error for a reply that was there and is not kept any more."""
    return invalid(message, "starting_after", code, HTTPStatus.GONE)


def unsupported(param: str) -> ApiError:
    return invalid(f"'{param}' is not supported by this server.", param, "unsupported_parameter")


def unauthorized(message: str) -> ApiError:
    return ApiError(HTTPStatus.UNAUTHORIZED, message, code="invalid_api_key")


def model_not_found(name: str) -> ApiError:
    message = f"The model '{name}' does not exist or you do not have access to it."
    return invalid(message, "model", "model_not_found", HTTPStatus.NOT_FOUND)


def refused(message: str, reason: str, retry_after_s: float, *, tenant_limit: bool) -> ApiError:
    """Makes the error of a request that may come again: 429 for the tenant's own limit, 503 for the server's load."""
    if tenant_limit:
        status, kind, headers = HTTPStatus.TOO_MANY_REQUESTS, "rate_limit_error", {}
    else:
        status, kind = HTTPStatus.SERVICE_UNAVAILABLE, "server_error"
        headers = {DROPPED_HEADER: _DROPPED.get(reason, "rejected-saturated")}
    return ApiError(
        status, message, type=kind, code=reason, retry_after_s=retry_after_s, extra_headers=headers
    )


def unavailable(message: str, code: str, *, close: bool = False) -> ApiError:
    """Makes the error of a server that takes no work now."""
    return ApiError(
        HTTPStatus.SERVICE_UNAVAILABLE,
        message,
        type="server_error",
        code=code,
        retry_after_s=5.0,
        close=close,
    )


@contextlib.contextmanager
def answering_unavailable(what: str) -> Iterator[None]:
    """Makes a 503 of a store that does not answer, which says that `what` cannot be read now."""
    try:
        yield
    except StoreUnavailable:
        raise unavailable(f"{what} cannot be read now.", "store_unavailable") from None


def internal(message: str = "The server had an error while processing your request.") -> ApiError:
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, type="server_error", code="internal_error")


def anthropic_body(error: ApiError, request_id: str | None) -> bytes:
    """Returns Anthropic's error object as JSON."""
    spelt = {
        "type": _ANTHROPIC_TYPES.get(error.status, "invalid_request_error"),
        "message": error.anthropic_message,
    }
    return json.dumps({"type": "error", "error": spelt, "request_id": request_id}).encode()


def ollama_body(error: ApiError) -> bytes:
    """Returns Ollama's error as JSON."""
    return json.dumps({"error": error.message}).encode()
