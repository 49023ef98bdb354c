"""What one request may wait for Redis, all its calls together."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

NUM_GLANCES = 4
"""A call that is not answered is looked after so often before it is given up."""


@dataclass(slots=True)
class Patience:
    """As much as one call may take: the calls of a request do not add up to more."""

    num_glances: int = NUM_GLANCES


PATIENCE: ContextVar[Patience | None] = ContextVar("PATIENCE", default=None)
"""None outside requests: there every call has all the time that a call may take."""


class PatienceMiddleware:
    """Gives every request its own."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":  # what runs for as long as the server does is in no hurry
            PATIENCE.set(Patience())
        await self.app(scope, receive, send)
