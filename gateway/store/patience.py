"""A time budget for Redis, shared by all calls of a request, and a larger one for calls that it cannot do without."""

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
"""The number of checks on an unanswered call before it is given up."""
INSIST_S = 5.0
"""The time for which a request that only the store can answer retries: the breaker probes twice in it."""
_PAUSE_S = 0.05
GLANCE_S = 0.02
"""The interval of these checks while this process is not late."""


@dataclass(slots=True)
class Patience:
    """The time budget of a request's calls, counted in checks."""

    num_glances: int = NUM_GLANCES


def insistent() -> Patience:
    """Returns the budget for a call that the request cannot do without."""
    return Patience(round(INSIST_S / GLANCE_S))


PATIENCE: ContextVar[Patience | None] = ContextVar("PATIENCE", default=None)
"""The budget of the current request; None outside requests, where every call has its full time."""


class PatienceMiddleware:
    """Gives every request its own budget."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":  # what runs for as long as the server does is in no hurry
            PATIENCE.set(Patience())
        await self.app(scope, receive, send)


async def insist(ask: Callable[[], Awaitable[T]], clock: Callable[[], float] | None = None) -> T:
    """Makes a call that the request cannot do without, retrying for up to `INSIST_S`.

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
