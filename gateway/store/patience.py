"""A request has some patience with Redis for all its calls together, and more where it needs nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.gateway.store.interface import StoreUnavailable

T = TypeVar("T")

NUM_GLANCES = 4
"""A call that is not answered is looked after so often before it is given up."""
INSIST_S = 5.0
"""A request that only the store can answer asks again for so long: the breaker probes twice meanwhile."""
_PAUSE_S = 0.05
GLANCE_S = 0.02
"""A call is looked after so often, while this process is not late."""


@dataclass(slots=True)
class Patience:
    """Patience is what one call may take: the calls of a request do not add up to more."""

    num_glances: int = NUM_GLANCES


def insistent() -> Patience:
    """The patience of one who can go on with nothing but the answer."""
    return Patience(round(INSIST_S / GLANCE_S))


PATIENCE: ContextVar[Patience | None] = ContextVar("PATIENCE", default=None)
"""The patience of the request that is served; None outside requests, where every call has all of its time."""


class PatienceMiddleware:
    """The middleware gives every request its own patience."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":  # what runs for as long as the server does is in no hurry
            PATIENCE.set(Patience())
        await self.app(scope, receive, send)


async def insist(ask: Callable[[], Awaitable[T]], clock: Callable[[], float] | None = None) -> T:
    """Asks for what the request cannot go on without, again and again for up to `INSIST_S`.

    Raises:
        StoreUnavailable: there was none in all that time.
    """
    clock = clock or time.monotonic
    end_s = clock() + INSIST_S
    before = PATIENCE.set(patience := insistent())
    try:
        while True:
            try:
                return await ask()
            except StoreUnavailable:
                if clock() >= end_s or not patience.num_glances:
                    raise
            await asyncio.sleep(_PAUSE_S)
    finally:
        PATIENCE.reset(before)
