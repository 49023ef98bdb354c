"""Errors as each API spells them; the object is the same in a plain reply and within a stream."""

from __future__ import annotations

import json
from typing import Protocol

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


class Fault(Protocol):
    """The part of `gateway.http.errors.ApiError` that a client is sent."""

    status: int
    message: str
    type: str
    param: str | None
    code: str | None

    @property
    def anthropic_message(self) -> str: ...

    def body(self) -> bytes:
        """Returns OpenAI's error object as JSON."""


def anthropic_body(fault: Fault, request_id: str | None) -> bytes:
    """Returns Anthropic's error object as JSON."""
    error = {
        "type": _ANTHROPIC_TYPES.get(fault.status, "invalid_request_error"),
        "message": fault.anthropic_message,
    }
    return json.dumps({"type": "error", "error": error, "request_id": request_id}).encode()


def ollama_body(fault: Fault) -> bytes:
    """Returns Ollama's error as JSON."""
    return json.dumps({"error": fault.message}).encode()
