"""A time budget for Redis, shared by all calls of a request, and a larger one for calls that it cannot do without."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

from penstock.gateway.store.interface import StoreUnavailable

T = TypeVar("T")

NUM_CHECKS = 4
"""The number of checks on an unanswered call before it is given up."""
RETRY_S = 5.0
"""The time for which a request that only the store can answer retries: the breaker probes twice in it."""
_PAUSE_S = 0.05
CHECK_S = 0.02
"""The interval of these checks while this process is not late."""


@dataclass(slots=True)
class TimeBudget:
    """The time budget of a request's calls, counted in checks."""

    num_checks: int = NUM_CHECKS


def retry_budget() -> TimeBudget:
    """Returns the budget for a call that the request cannot do without."""
    return TimeBudget(round(RETRY_S / CHECK_S))


TIME_BUDGET: ContextVar[TimeBudget | None] = ContextVar("TIME_BUDGET", default=None)
"""The budget of the current request; None outside requests, where every call has its full time."""


async def retrying(ask: Callable[[], Awaitable[T]], clock: Callable[[], float] | None = None) -> T:
    """Makes a call that the request cannot do without, retrying for up to `RETRY_S`.

    Raises:
        StoreUnavailable: there was none in all that time.
    """
    clock = clock or time.monotonic
    end_s = clock() + RETRY_S
    before = TIME_BUDGET.set(budget := retry_budget())
    try:
        while True:
            try:
                return await ask()
            except StoreUnavailable:
                if clock() >= end_s or not budget.num_checks:
                    raise
            await asyncio.sleep(_PAUSE_S)
    finally:
        TIME_BUDGET.reset(before)
