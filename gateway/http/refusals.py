"""Errors as replies, each spelt as the API that was asked for spells it: OpenAI's, Anthropic's or Ollama's."""

from __future__ import annotations

from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from penstock.gateway.errors import ApiError, anthropic_body, internal, ollama_body
from penstock.gateway.http.correlation import ANTHROPIC_PATH, CORRELATION, log_failed, log_fault

OLLAMA_PATH = "/api/"
_MODELS_PATH = "/v1/models"

OVERLOADED = 529
"""The status that Anthropic has where others have 503."""


def speaks_anthropic(http: Request) -> bool:
    """Returns whether a request uses Anthropic's API, whose list of models has the same path as OpenAI's."""
    path = http.url.path
    return path.startswith(ANTHROPIC_PATH) or (
        path.startswith(_MODELS_PATH) and "anthropic-version" in http.headers
    )


def refusal(error: ApiError, path: str, overload_status: int = HTTPStatus.SERVICE_UNAVAILABLE) -> Response:
    """Returns the reply to a request for `path`; refusals by load have the status that the operator chose."""
    status, body = overload_status if error.is_overload else error.status, error.body()
    if path.startswith(ANTHROPIC_PATH):
        status = OVERLOADED if status == HTTPStatus.SERVICE_UNAVAILABLE else status
        http = CORRELATION.get()
        body = anthropic_body(error, None if http is None else http.request_id)
    elif path.startswith(OLLAMA_PATH):
        body = ollama_body(error)
    return Response(body, status, error.headers(), media_type="application/json")


async def answer_api_error(
    request: Request, error: Exception, overload_status: int = HTTPStatus.SERVICE_UNAVAILABLE
) -> Response:
    assert isinstance(error, ApiError)
    log_fault(error)
    path = ANTHROPIC_PATH if speaks_anthropic(request) else request.url.path
    return refusal(error, path, overload_status)


async def answer_http_error(request: Request, error: Exception) -> Response:
    """Answers 404 and 405, which the router raises."""
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    explained = {
        404: ("unknown_url", f"Unknown request URL: {method} {path}."),
        405: ("method_not_allowed", f"Method {method} is not allowed on {path}."),
    }
    code, message = explained.get(error.status_code, ("http_error", error.detail))
    reply = refusal(ApiError(error.status_code, message, code=code), path)
    reply.headers.update(error.headers or {})
    return reply


async def answer_disconnect(_: Request, __: Exception) -> Response:
    """Answers with 499, as logs call it; nobody is there to read it."""
    return Response(status_code=499)


async def answer_fault(request: Request, error: Exception) -> Response:
    """Answers what no code foresaw. The trace goes to the log, never to the client."""
    log_failed(f"{type(error).__name__}: {error}", error)
    return refusal(internal(), request.url.path)
