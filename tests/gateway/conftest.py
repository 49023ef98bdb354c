"""The event loop of this package's tests, and what their stores leave open."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from penstock.gateway.store import time_budget
from tests.gateway.store.stores import OPENED


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _short_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that a test takes away does not come back by itself."""
    monkeypatch.setattr(time_budget, "RETRY_S", 0.2)


@pytest.fixture
async def closing() -> AsyncIterator[None]:
    """Closes the connections to Redis of a test, whatever became of it."""
    yield
    while OPENED:
        await OPENED.pop().aclose()
