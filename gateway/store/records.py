"""Records of one kind come back as they were put; what cannot be read is none."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

from pydantic import TypeAdapter, ValidationError

from penstock.gateway.off_loop import off_loop
from penstock.gateway.store.interface import Key, Store, StoreUnavailable

MAX_CHANGES = 20
"""A record that other processes change this often while one is under way cannot be changed."""

T = TypeVar("T")
log = logging.getLogger("penstock.store")


class Records(Generic[T]):
    """Records are of one kind, as JSON; large ones are read and written off the event loop.

    Everything that asks the store may raise StoreUnavailable.
    """

    def __init__(self, kind: str, type_: type[T], ttl_s: float, num_bytes: Callable[[T], int]) -> None:
        """
        Args:
            ttl_s: records are forgotten so long after they were put or read.
            num_bytes: of a record as JSON, about.
        """
        self.kind = kind
        self._codec = TypeAdapter(type_)
        self._ttl_s = ttl_s
        self._num_bytes = num_bytes
        self._changing: WeakValueDictionary[Key, asyncio.Lock] = WeakValueDictionary()

    async def get(self, store: Store, tenant: str, id_: str, *, keep: bool = True) -> T | None:
        """The record, or None. With `keep` its time to live begins again."""
        key = Key(self.kind, tenant, id_)
        return await self._decoded(key, await store.get(key, self._ttl_s if keep else None))

    async def some(self, store: Store, tenant: str, ids: Iterable[str]) -> list[T]:
        """The records of these ids that there are. Looking at them does not keep them alive."""
        read = await asyncio.gather(*(self.get(store, tenant, id_, keep=False) for id_ in ids))
        return [record for record in read if record is not None]

    async def put(self, store: Store, tenant: str, id_: str, record: T) -> None:
        await store.put(Key(self.kind, tenant, id_), await self._encoded(record), self._ttl_s)

    async def add(self, store: Store, tenant: str, id_: str, record: T) -> T | None:
        """Puts the record if there is none; returns the one that was there."""
        key = Key(self.kind, tenant, id_)
        return await self._decoded(key, await store.add(key, await self._encoded(record), self._ttl_s))

    async def change(self, store: Store, tenant: str, id_: str, edit: Callable[[T], None]) -> T | None:
        """Changes a record by `edit`, where no other process did meanwhile, and returns it; None if there is none.

        `edit` is called again if one did. What it raises leaves the record as it is.
        """
        key = Key(self.kind, tenant, id_)
        async with self.exclusive(tenant, id_):
            for _ in range(MAX_CHANGES):
                value = await store.get(key, self._ttl_s)
                record = await self._decoded(key, value)
                if value is None or record is None:
                    return None
                edit(record)
                if await store.replace(key, value, await self._encoded(record), self._ttl_s):
                    return record
        raise StoreUnavailable(f"the {self.kind} is changed all the time")

    @contextlib.asynccontextmanager
    async def exclusive(self, tenant: str, id_: str) -> AsyncIterator[None]:
        """Keeps all else in this process from changing the record, while it is entered."""
        async with self._changing.setdefault(Key(self.kind, tenant, id_), asyncio.Lock()):
            yield

    async def _encoded(self, record: T) -> bytes:
        return await off_loop(self._num_bytes(record), self._codec.dump_json, record)

    async def _decoded(self, key: Key, value: bytes | None) -> T | None:
        if value is None:
            return None
        try:
            return await off_loop(len(value), self._codec.validate_json, value)
        except ValidationError as error:
            fault = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(map(str, fault["loc"])) or "it"
            log.warning(
                "the %s %s is passed over, for it cannot be read: %s: %s", *key[::2], field, fault["msg"]
            )
            return None
