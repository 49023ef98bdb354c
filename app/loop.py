"""The event loop and the HTTP server on it, the same for a replica and for a switch."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import uvicorn
from starlette.types import ASGIApp

from penstock.gateway.http.protocol import GatewayProtocol


def loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    with contextlib.suppress(ImportError):
        import uvloop

        loop: type[asyncio.AbstractEventLoop] = uvloop.Loop
        return loop
    return None


def delay_garbage() -> None:
    """Before anything is loaded: what modules and vocabularies allocate stays, and looking through it takes a tenth of
    the start."""
    gc.set_threshold(100_000, 50, 100)


def settle_garbage() -> None:
    """Once everything is loaded."""
    # What loading left behind lives as long as the process, and hardly anything that a token leaves is a cycle.
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: they would cut running streams."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def uvicorn_config(
    app: ASGIApp,
    lifespan: Literal["on", "off"] = "on",
    *,
    proxies: Sequence[object] = (),
    ssl_certfile: Path | None = None,
    ssl_keyfile: Path | None = None,
) -> uvicorn.Config:
    """`proxies` are the addresses and networks whose X-Forwarded-For is believed."""
    return uvicorn.Config(
        app,
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
        http=GatewayProtocol,
        ws="none",
        lifespan=lifespan,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=bool(proxies),
        forwarded_allow_ips=[str(network) for network in proxies],
        timeout_graceful_shutdown=5,
    )
