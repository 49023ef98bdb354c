"""Which store a server keeps things in: its own memory, or a Redis."""

from __future__ import annotations

import time

from penstock.app.errors import OperatorError
from penstock.gateway.store.interface import Store
from penstock.gateway.store.memory import MemoryStore


def make_store(redis_url: str | None, namespace: str, replica: str) -> Store:
    """
    Args:
        namespace: servers of the same model share streams, quotas and prefixes, others do not. All share records:
            conversations outlive a model.
        replica: this process's name among them.

    Raises:
        OperatorError: the URL is none of a Redis. Whether one answers there is not asked: it may come later.
    """
    local = MemoryStore(time.monotonic)
    if redis_url is None:
        return local
    from penstock.gateway.store.redis import RedisStore
    from penstock.gateway.store.shared import SharedStore

    try:
        remote = RedisStore(redis_url, namespace=namespace, replica=replica, records_namespace="records")
    except ValueError as error:
        raise OperatorError(f"--redis-url: {error}") from None
    return SharedStore(local, remote)
