"""The ASGI application: routes, errors, and the middleware around them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp

from penstock.gateway.access import quotas
from penstock.gateway.access.idempotency import RESUMABLE_HEADER
from penstock.gateway.endpoints.answering import Answering
from penstock.gateway.endpoints.batches import BatchesApi, MessageBatchesApi
from penstock.gateway.endpoints.completions import CompletionsApi
from penstock.gateway.endpoints.conversations import ConversationsApi
from penstock.gateway.endpoints.embeddings import DecisionsApi, EmbeddingsApi
from penstock.gateway.endpoints.events import EventsApi
from penstock.gateway.endpoints.files import FilesApi
from penstock.gateway.endpoints.intake import Endpoints, Handler, Intake
from penstock.gateway.endpoints.llama import LlamaApi
from penstock.gateway.endpoints.lookups import counted
from penstock.gateway.endpoints.messages import MessagesApi
from penstock.gateway.endpoints.models import ModelsApi, TokensApi
from penstock.gateway.endpoints.ollama import OllamaApi
from penstock.gateway.endpoints.openapi import OpenApi
from penstock.gateway.endpoints.operator import OperatorApi, ServerInfoApi
from penstock.gateway.endpoints.rendering import RenderApi
from penstock.gateway.endpoints.responses import ResponsesApi
from penstock.gateway.endpoints.state import StateApi
from penstock.gateway.endpoints.stored_chats import StoredChatsApi
from penstock.gateway.endpoints.usage import UsageApi
from penstock.gateway.errors import DROPPED_HEADER, ApiError
from penstock.gateway.http.correlation import IGNORED_HEADER
from penstock.gateway.http.entrance import Entrance
from penstock.gateway.http.page import Page
from penstock.gateway.http.refusals import (
    answer_api_error,
    answer_disconnect,
    answer_fault,
    answer_http_error,
)
from penstock.gateway.service import Service
from penstock.gateway.sessions.batches.batch import Endpoint
from penstock.gateway.sessions.batches.files import Files
from penstock.gateway.wire.lanes import TPOT_HEADER, TTFT_HEADER

_REQUEST_HEADERS = [
    *("authorization", "x-api-key", "content-type", "idempotency-key", "last-event-id", "x-request-id"),
    *("traceparent", "tracestate", TTFT_HEADER, TPOT_HEADER, RESUMABLE_HEADER),
    *("openai-organization", "openai-project", "openai-beta"),
    *("anthropic-version", "anthropic-beta", "anthropic-dangerous-direct-browser-access"),
    # What OpenAI's own package says of itself in a browser.
    *(
        f"x-stainless-{name}"
        for name in ("lang", "package-version", "os", "arch", "runtime", "runtime-version")
    ),
    *(f"x-stainless-{name}" for name in ("retry-count", "timeout", "helper-method", "async")),
    *("x-stainless-poll-helper", "x-stainless-custom-poll-interval"),
]


def create_app(service: Service, static: Path | None = None) -> ASGIApp:
    """The gateway of one service. Its lifespan runs `service.running()`, and the batches.

    Args:
        static: folder of the chat page, served at `/` and `/static/`; without it there is none.
    """
    intake, files = Intake(service), Files(service.store)
    answering = Answering(service, intake)
    completions = CompletionsApi(service, intake, answering)
    embeddings = EmbeddingsApi(service, intake, answering)
    chats = StoredChatsApi(service, intake, completions)
    responses = ResponsesApi(service, intake, answering)
    messages = MessagesApi(service, intake, answering)
    handlers: dict[Endpoint, Handler] = {
        "/v1/chat/completions": completions.chat,
        "/v1/completions": completions.complete,
        "/v1/embeddings": embeddings.embed,
        "/v1/responses": responses.create,
        "/v1/messages": messages.create,
    }
    batches = BatchesApi(service, intake, files, handlers)
    described: list[Endpoints] = [
        RenderApi(service, intake),  # before those of a reply whose id it could be
        chats,
        completions,
        embeddings,
        DecisionsApi(service, intake, answering),
        responses,
        FilesApi(service, intake, files),
        batches,
        ConversationsApi(service, intake),
        MessageBatchesApi(service, intake, files, batches.batches),  # before a message whose id it could be
        messages,
        OllamaApi(service, intake, answering),
        LlamaApi(service, intake, answering),
        ModelsApi(service, intake),
        TokensApi(service, intake),
        EventsApi(service, intake),
        UsageApi(service, intake),
        ServerInfoApi(service, intake),
    ]
    routes = [
        *(counted(route, intake) for endpoints in described for route in endpoints.routes()),
        *StateApi(service).routes(),
        *OperatorApi(service).routes(with_metrics=not service.options.metrics_elsewhere),
        *(_page_routes(static) if static else ()),
    ]
    options = service.options
    openapi = OpenApi(routes, options.limits, with_keys=bool(options.clients))
    app = Starlette(
        routes=openapi.routes,
        exception_handlers={
            ApiError: partial(answer_api_error, overload_status=options.overload_status),
            HTTPException: answer_http_error,
            ClientDisconnect: answer_disconnect,
            Exception: answer_fault,
        },
        lifespan=_lifespan(service, batches),
    )
    app.router.redirect_slashes = False
    uploads = frozenset({"/v1/files"})
    entered = Entrance(app, options.limits, options.allowed_hosts, uploads, service.tenants.note_refused)
    return _with_origins(entered, options.cors_origins)


def create_metrics_app(service: Service) -> ASGIApp:
    """Returns the application for the separate metrics port."""
    return Starlette(
        routes=OperatorApi(service).routes(with_metrics=True),
        exception_handlers={HTTPException: answer_http_error},
    )


def _with_origins(app: ASGIApp, origins: tuple[str, ...]) -> ASGIApp:
    """Lets pages of these origins call, and read every answer. It is outermost, so faults have its headers too."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=_REQUEST_HEADERS,
        expose_headers=[
            "x-request-id",
            "request-id",
            "retry-after",
            "retry-after-ms",
            "x-should-retry",
            DROPPED_HEADER,
            IGNORED_HEADER,
            *quotas.HEADERS,
            *quotas.ANTHROPIC_HEADERS,
        ],
    )


def _page_routes(static: Path) -> list[Route]:
    page = Page(static)
    return [Route("/", page.index), Route("/static/{path:path}", page.file)]


def _lifespan(
    service: Service, batches: BatchesApi
) -> Callable[[Starlette], AbstractAsyncContextManager[None]]:
    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with service.running(), batches.running():
            yield

    return lifespan
