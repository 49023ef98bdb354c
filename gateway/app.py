"""The ASGI application: routes, errors, and the middleware around them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
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
from penstock.gateway.endpoints.answering import counted_lookups
from penstock.gateway.endpoints.batches import BatchesApi, MessageBatchesApi
from penstock.gateway.endpoints.files import FilesApi
from penstock.gateway.endpoints.intake import Endpoints, Intake
from penstock.gateway.endpoints.openapi import OpenApi
from penstock.gateway.endpoints.operation import handlers_of, routes_of
from penstock.gateway.endpoints.operations import CLUSTER_APIS, PLAIN_APIS
from penstock.gateway.endpoints.operator import MetricsApi, ProbesApi
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


def create_app(service: Service, static: Path | None = None, intake: Intake | None = None) -> ASGIApp:
    """The gateway of one service. Its lifespan runs `service.running()`, and the batches.

    Args:
        static: folder of the chat page, served at `/` and `/static/`; without it there is none.
        intake: of the service, if others use it as well.
    """
    intake, files = intake or Intake(service), Files(service.store)
    apis: list[Endpoints] = [api(service, intake) for api in PLAIN_APIS]
    batches = BatchesApi(service, intake, files, handlers_of(*apis))
    apis += [
        FilesApi(service, intake, files),
        batches,
        MessageBatchesApi(service, intake, files, batches.batches),
        *([api(service, intake) for api in CLUSTER_APIS] if service.options.cluster_secret else ()),
        *(() if service.options.metrics_elsewhere else [MetricsApi(service)]),
    ]
    routes = [
        *routes_of(*apis, wrapped=partial(counted_lookups, intake)),
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
        lifespan=partial(_running, service, batches),
    )
    app.router.redirect_slashes = False
    uploads = frozenset({"/v1/files"})
    entered = Entrance(app, options.limits, options.allowed_hosts, uploads, service.tenants.note_refused)
    return _with_origins(entered, options.cors_origins)


def create_metrics_app(service: Service) -> ASGIApp:
    """Returns the application for the separate metrics port."""
    return Starlette(
        routes=routes_of(ProbesApi(service, Intake(service)), MetricsApi(service)),
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


@contextlib.asynccontextmanager
async def _running(service: Service, batches: BatchesApi, _: Starlette) -> AsyncIterator[None]:
    async with service.running(), batches.running():
        yield
