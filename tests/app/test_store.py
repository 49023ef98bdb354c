"""A URL decides where a server keeps things."""

from __future__ import annotations

import pytest

from penstock.app.errors import OperatorError
from penstock.app.store import make_store
from penstock.gateway.store.memory import MemoryStore
from penstock.gateway.store.shared import SharedStore


def test_a_store_is_in_memory_or_in_redis() -> None:
    assert type(make_store(None, "n", "r")) is MemoryStore
    assert type(make_store("redis://127.0.0.1:1", "n", "r")) is SharedStore


def test_a_url_that_is_none_of_a_redis_is_told() -> None:
    with pytest.raises(OperatorError, match=r"^--redis-url: .*redis://"):
        make_store("http://127.0.0.1", "n", "r")
